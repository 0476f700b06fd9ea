"""The compiled graph of one epoch: PP stages of TP ranks, from one request to the replies of the last stage.

    request -> stage 0: rank 0 .. tp-1 -> stage 1: rank tp .. 2 tp-1 -> ... -> replies

Rank i of a stage feeds rank i of the next. Every rank of the last stage is an output of the graph, so that an error of
any rank reaches the driver, whichever rank's output is wanted.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.exceptions import RayTaskError

from resilient_executor import ray_guard, readers, wire_channel
from resilient_executor.actors import unpinned
from resilient_executor.config import ExecutorConfig, Transport
from resilient_executor.doorbell import BellPlan, Doorbell
from resilient_executor.errors import ConfigError, StateError
from resilient_executor.ranks import grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.actor import ActorHandle
    from ray.dag.compiled_dag_node import CompiledDAG
    from ray.experimental.compiled_dag_ref import CompiledDAGRef

logger = logging.getLogger(__name__)

#: For what has been read already, in seconds.
_CACHED_S: Final = 5.0


class StepGraph:
    """Owns one compiled graph, from its compilation to its teardown."""

    def __init__(self, workers: Sequence[ActorHandle], config: ExecutorConfig, bell: BellPlan | None = None) -> None:
        """Compile the graph over workers in rank order.

        Args:
            workers: in rank order.
            config: of the executor.
            bell: where the driver listens while it waits for replies; None lets it spin.

        Raises:
            ray.exceptions.RayError: a worker died meanwhile.
        """
        ray_guard.install()
        self._bell: Doorbell | None = None
        self.timeout_s = config.step_timeout_s
        transport = resolve_transport(config)
        with unpinned(), InputNode() as request:
            stages = grid(config.tensor_parallel_size, config.pipeline_parallel_size)
            values: list[Any] = [request] * config.tensor_parallel_size
            for stage in stages:
                last, shared = stage is stages[-1], transport is Transport.SHM
                values = [
                    workers[rank].run_step.bind(value, serialize=shared and not last)
                    for rank, value in zip(stage, values, strict=True)
                ]
                if not last and not shared:
                    values = [value.with_tensor_transport(transport=transport.value) for value in values]
            output = MultiOutputNode(values)
        try:
            with buffer_size(config.step_buffer_bytes), wire_channel.wired(config.wires) as wires:
                self._dag: CompiledDAG | None = output.experimental_compile(
                    _submit_timeout=config.step_timeout_s,
                    _max_inflight_executions=config.inflight_limit,
                    _overlap_gpu_communication=config.overlap_communication,
                )
                # Register now as a reader of every output. Ray does it at the first read or at close(); by then the
                # writer may have died and taken the buffer with it, and the registration would abort this process (see
                # ray_guard.py).
                for channel in self._dag.dag_output_channels:
                    channel.ensure_registered_as_reader()
                if bell is not None:
                    self._bell = readers.listen_in_driver(bell, self._dag._dag_output_fetcher)
                #: Whether requests go by wires, which hold so many on their way, and to other nodes so many bytes.
                self.by_wire = bool(wires)
                self.crosses_nodes = wire_channel.cross_nodes(wires)
        except BaseException as error:
            # The error's frames hold the half-built graph, and that holds an actor of Ray's.
            traceback.clear_frames(error.__traceback__)
            raise

    def submit(self, request: bytes) -> list[CompiledDAGRef]:
        """Send one step request into the graph; the references are for :meth:`fetch`, in order of submission."""
        if self._dag is None:
            raise StateError("the graph has been torn down")
        references = self._dag.execute(request)
        if self._bell is not None:
            self._bell.ring()
        return references  # type: ignore[no-any-return]  # a list: the root is a MultiOutputNode

    def fetch(self, references: list[CompiledDAGRef]) -> list[bytes]:
        """Wait for the replies of the last stage, in TP order.

        A timeout is final. A read that times out halfway has taken some channels' values and dropped them, and the
        next one would pair the replies of different steps.

        Raises:
            ray.exceptions.RayTaskError: a rank raised; arrives without waiting for its peers.
            ray.exceptions.RayError: a worker died, the graph was torn down, or ``step_timeout_s`` has passed.
        """
        # The first get reads all channels, the others take what it has read. All of them must be taken: the error may
        # be in any, and Ray keeps what is not taken until its buffer is full.
        replies: list[bytes] = []
        error: RayTaskError | None = None
        for number, reference in enumerate(references):
            try:
                replies.append(reference.get(timeout=self.timeout_s if number == 0 else _CACHED_S))
            except RayTaskError as raised:
                error = error or raised
            except BaseException as raised:
                # Ctrl-C in the middle of a read: the frames hold a buffer of the channel. Whoever keeps the exception,
                # as the interpreter does to its end, would release it when Ray is gone, and crash the process.
                traceback.clear_frames(raised.__traceback__)
                self.discard(references)
                raise
        if error is not None:
            raise error
        return replies

    def discard(self, references: list[CompiledDAGRef]) -> None:
        """Drop references to steps of a dying graph.

        Their finaliser would read the channels to empty them, wait for what never comes, and print what it then raises.
        """
        for reference in references:
            reference._ray_get_called = True

    def tear_down(self, timeout_s: float) -> bool:
        """Close the channels and end the workers' loops; whoever waits in :meth:`fetch` is released.

        Ray's own teardown waits for the workers without a bound, so it runs in a thread that is left to itself when
        the time is up. Kill the workers first, unless they are healthy: a worker stuck in a collective never comes
        back.

        Returns:
            whether it finished within ``timeout_s``.
        """
        dag, self._dag = self._dag, None
        if dag is None:
            return True
        thread = threading.Thread(target=_tear_down, args=(dag,), name="resilient-executor-teardown", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if self._bell is not None:
            self._bell.close()
        if thread.is_alive():
            logger.warning("the teardown of a compiled graph did not end within %g s; it is left behind", timeout_s)
        return not thread.is_alive()


@contextmanager
def buffer_size(size: int) -> Iterator[None]:
    """Set the first size of the buffers that this process writes to, for one compilation.

    ``experimental_compile(_buffer_size_bytes=...)`` does not do it: Ray 2.60 creates its channels without passing the
    size on, and takes the process's default. Workers set theirs in ``WorkerActor.prepare_graph``.
    """
    context = DAGContext.get_current()
    before, context.buffer_size_bytes = context.buffer_size_bytes, size
    try:
        yield
    finally:
        context.buffer_size_bytes = before


def _tear_down(dag: CompiledDAG) -> None:
    try:
        dag.teardown()
    except Exception:
        logger.debug("teardown of a compiled graph", exc_info=True)
    finally:
        # Ray's helper beside the driver lives as long as the graph's object, which any kept exception may hold.
        if (proxy := getattr(dag, "_proxy_actor", None)) is not None and ray.is_initialized():
            ray.kill(proxy, no_restart=True)


def resolve_transport(config: ExecutorConfig) -> Transport:
    """The transport that this group will use between its stages.

    ``auto`` takes NCCL where the workers' device is a CUDA GPU that is really there (Ray's fake GPUs are not), and
    shared memory elsewhere: other accelerators, CPU.

    Raises:
        ConfigError: NCCL was asked for where it cannot work.
    """
    if config.pipeline_parallel_size == 1:
        return Transport.SHM
    if config.transport is Transport.SHM:
        return Transport.SHM
    if config.transport is Transport.NCCL:
        if config.device_key != "GPU":
            raise ConfigError(
                f"transport 'nccl' needs device_key 'GPU', not {config.device_key!r}; use 'shm' or 'auto'"
            )
        return Transport.NCCL
    return Transport.NCCL if config.device_key == "GPU" and cuda_present() else Transport.SHM


def cuda_present() -> bool:
    """Whether an alive node of the cluster shows an NVIDIA accelerator type, which fake GPUs do not have."""
    return any(
        name.startswith("accelerator_type:") for node in ray.nodes() if node["Alive"] for name in node["Resources"]
    )
