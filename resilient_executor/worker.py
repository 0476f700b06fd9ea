"""The Ray actor around one engine worker.

Threads: collective RPCs run in the actor's default thread, one at a time; the compiled graph has a thread of its own;
heartbeats and the sentinel have theirs, so that neither a long step nor a long call is taken for death; and one watches
the lease. The module imports neither torch nor an engine: a worker can say who it is before the heavy imports begin.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.dag import DAGContext

from resilient_executor import environment, measurements, processes, protocol, ray_guard, readers, stacks
from resilient_executor.doorbell import BellPlan, Doorbell
from resilient_executor.errors import StateError
from resilient_executor.heart import Beat, Heart
from resilient_executor.lease import Lease
from resilient_executor.protocol import (
    FAILURES_KEPT,
    LEASE_EXIT_CODE,
    Phase,
    ProcessIdentity,
    Progress,
    RankAssignment,
    RpcEnvelope,
    StaleEpoch,
    StepKind,
    Worker,
    WorkerInfo,
    WorkerSpec,
)
from resilient_executor.telemetry import logs, propagation
from resilient_executor.wire_channel import serve_worker
from resilient_executor.worker_support import (
    capture,
    count_threads,
    imported,
    logged,
    preload_quietly,
    resolve,
    serialized,
    settle,
    show_devices,
    to_stay,
)

logger = logging.getLogger(__name__)

#: Threads of the actor beside the default one. Three for supervision: the supervisor's heartbeat, that of whoever
#: stands in for it, and a health check may overlap.
CONCURRENCY_GROUPS = {"supervision": 3, "sentinel": 1}
#: Of the method ``heartbeat``. Ray keeps a record of each call and sends it to the cluster's head; not of these.
HEARTBEAT = {"concurrency_group": "supervision", "enable_task_events": False}
#: Between two looks at the lease, in seconds; and between two while the worker waits for a new one.
_LEASE_LOOK_S = 0.25
_LEASE_WAIT_S = 0.005


class WorkerActor:
    """Holds one engine worker, its rank and its epoch; believes no message of another epoch."""

    def __init__(self, created_rank: int, lease_s: float = math.inf, lease_grace_s: float = math.inf) -> None:
        ray_guard.install()
        stacks.install()
        self._created_rank = created_rank
        self._rank = created_rank
        self._epoch = 0
        self._phase = Phase.STARTING
        self._phase_began = time.monotonic()
        self._lease = Lease(lease_s, lease_grace_s, time.monotonic())
        self._worker: Any = None
        self._assignment: RankAssignment | None = None
        # Written by the graph's thread, read by the heartbeat's: single assignments, so no lock on the step's path.
        self._step_in_hand = -1
        self._step_began = 0.0
        self._last_step = -1
        self._failed_steps: tuple[int, ...] = ()
        self._steps_done = 0
        self._slowest_step_s = 0.0
        self._rpc_in_hand = ""
        self._graph_thread = 0
        self._bell: Doorbell | None = None
        #: When the last traced step ended, in ns since the Unix epoch; 0 for none.
        self._idle_since = 0
        #: Of the bundle whose rank it has taken; None where Ray gave this actor its devices.
        self._device_ids: tuple[str, ...] | None = None
        threading.Thread(target=self._keep_lease, name="resilient-executor-lease", daemon=True).start()
        self._heart = Heart(self.answer)

    # -- coming up --------------------------------------------------------------------------------------------------

    def prepare(
        self,
        variables: Mapping[str, str],
        spec: bytes,
        device_key: str,
        amount: float = 1.0,
        modules: Sequence[str] = (),
    ) -> tuple[float, ProcessIdentity]:
        """As a standby: do what needs neither a rank nor a device, which is the environment and the engine's imports.

        Args:
            variables: see :meth:`init_worker`.
            spec: see :meth:`init_worker`.
            device_key: the resource that this worker will take.
            amount: how much of it.
            modules: what a rank at work has imported.

        Returns:
            the seconds that it took, and this process.
        """
        count_threads(device_key, amount)
        environment.apply(variables)
        show_devices(device_key, None)
        began = time.monotonic()
        preload_quietly(spec, modules)
        took_s = time.monotonic() - began
        return took_s, processes.identify(os.getpid(), ray.get_runtime_context().get_node_id())

    def take_rank(
        self, created_rank: int, lease_s: float, lease_grace_s: float, device_key: str, devices: tuple[str, ...] | None
    ) -> WorkerInfo:
        """As a standby: become a worker, on the devices of a bundle. Returns what :meth:`describe` does.

        When whoever holds the devices has died, this call fails instead, and so does the attempt.
        """
        self._created_rank = self._rank = created_rank
        self._lease = Lease(lease_s, lease_grace_s, time.monotonic())
        self._device_ids = devices or ()
        if devices is not None:
            show_devices(device_key, devices)
        self._enter(Phase.STARTING)
        return self.describe()

    def describe(self) -> WorkerInfo:
        """Who and where this worker is."""
        context = ray.get_runtime_context()
        devices = self._device_ids
        if devices is None:
            devices = tuple(str(i) for ids in context.get_accelerator_ids().values() for i in ids)
        return WorkerInfo(
            created_rank=self._created_rank,
            process=processes.identify(os.getpid(), context.get_node_id()),
            node_ip=ray.util.get_node_ip_address(),
            device_ids=devices,
            actor_id=context.get_actor_id(),
        )

    def adjust_rank(self, mapping: Mapping[int, int]) -> int:
        """Take the rank that the mapping (created rank -> rank) gives this worker."""
        self._rank = mapping[self._created_rank]
        self._enter(Phase.STARTING)  # the others may have come up long after
        return self._rank

    def free_port(self) -> int:
        """A TCP port that is free on this node now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def init_worker(
        self, assignment: RankAssignment, variables: Mapping[str, str], spec: bytes, trace_context: bytes = b""
    ) -> tuple[int, int]:
        """Set the environment, then import and build the engine's worker.

        Args:
            assignment: who this worker is in its epoch.
            variables: environment variables to set, before the engine is imported.
            spec: a pickled :class:`WorkerSpec`; pickled so that the imports wait for the environment.
            trace_context: of the phase that this belongs to, here and in the other methods.

        Returns:
            when it began and ended, in nanoseconds since the Unix epoch; so do the other methods of the start.
        """
        environment.apply(variables)
        self._assignment = assignment
        self._rank = assignment.rank
        self._epoch = assignment.epoch
        self._enter(Phase.LOADING)
        logs.install()
        logs.identify(self._epoch, self._rank)
        with logged(self, "init_worker", -1, trace_context) as began:
            loaded: WorkerSpec = pickle.loads(spec)
            with to_stay():
                self._worker = resolve(loaded.cls)(assignment, **loaded.kwargs_of(assignment.rank))
        return began, time.time_ns()

    def init_device(self, trace_context: bytes = b"") -> tuple[int, int]:
        """Let the engine's worker select its device and join its process group."""
        with logged(self, "init_device", -1, trace_context) as began:
            self._engine_worker().init_device()
        return began, time.time_ns()

    def load_model(self, trace_context: bytes = b"") -> tuple[int, int]:
        """Let the engine's worker load its weights."""
        with logged(self, "load_model", -1, trace_context) as began:
            self._engine_worker().load_model()
        return began, time.time_ns()

    def set_phase(self, phase: Phase) -> None:
        """Tell the supervisor, with the next heartbeat, what this worker is busy with."""
        if phase == Phase.SERVING:
            settle()
        self._enter(phase)

    @ray.method(concurrency_group="supervision")  # type: ignore[untyped-decorator]  # Ray has no types
    def imported(self) -> tuple[str, ...]:
        """The modules of this process, for standbys."""
        return imported()

    def _enter(self, phase: Phase) -> None:
        self._phase, self._phase_began = phase, time.monotonic()

    def prepare_graph(self, buffer_bytes: int, bell: BellPlan | None, wires: bool, bytes_only: bool) -> None:
        """Get ready for the graph, which is compiled next.

        Args:
            buffer_bytes: first size of the buffers that this worker writes to; see ``graph.buffer_size``.
            bell: where it listens while it has nothing to read; None lets it spin.
            wires: what it writes goes over wires.
            bytes_only: no tensor goes between accelerators.
        """
        self._enter(Phase.COMPILING)
        self._bell = readers.listen_in_worker(bell) if bell is not None else None
        DAGContext.get_current().buffer_size_bytes = buffer_bytes
        serve_worker(wires, bytes_only)

    def shut_down(self) -> None:
        """Let the engine's worker put its things in order; its errors are logged, since its process ends anyway."""
        self._enter(Phase.STOPPING)
        close = getattr(self._worker, "shutdown", None)
        if close is not None:
            try:
                close()
            except Exception:
                logger.exception("rank %d: shutdown failed", self._rank)

    def _engine_worker(self) -> Worker:
        if self._worker is None:
            raise StateError("init_worker must be called first")
        return self._worker  # type: ignore[no-any-return]  # any class that fits the protocol

    # -- calls ------------------------------------------------------------------------------------------------------

    def run_rpc(self, envelope: RpcEnvelope) -> bytes:
        """Run one collective RPC: a method of the engine's worker by name, or a callable that gets the worker.

        Returns:
            a reply: see :mod:`measurements`.

        Raises:
            StaleEpoch: the call is meant for another generation.
            WorkerException: carries whatever the method raised.
        """
        if envelope.epoch != self._epoch:
            raise StaleEpoch(
                f"call {envelope.call_id} is of epoch {envelope.epoch}; rank {self._rank} is of {self._epoch}"
            )
        name = envelope.method if isinstance(envelope.method, str) else "a callable"
        with logged(self, name, envelope.call_id, envelope.trace_context) as began:
            self._rpc_in_hand = name
            try:
                args, kwargs = pickle.loads(envelope.arguments)
                if isinstance(envelope.method, str):
                    method: Callable[..., Any] = getattr(self._engine_worker(), envelope.method)
                    result = method(*args, **kwargs)
                else:
                    result = pickle.loads(envelope.method)(self._engine_worker(), *args, **kwargs)
                data = protocol.dumps(result)
                return measurements.encode_rpc_reply(began, time.time_ns(), data)
            finally:
                self._rpc_in_hand = ""

    def run_step(self, message: bytes | tuple[bytes, Any, bytes], serialize: bool = False) -> Any:
        """Run this rank's part of one step; bound into the compiled graph.

        Args:
            message: the step request; from the second stage on, with it the previous stage's result and the trail.
            serialize: serialise for the next stage here. Ray would do it outside of the step, where something that
                cannot be pickled ends the graph; here it is the step's own error.

        Returns:
            On the last stage a step reply, before it the request, what the next stage needs, and the trail.

        Raises:
            StaleEpoch: the request is meant for another generation.
            WorkerException: carries whatever the engine's worker raised.
        """
        request, intermediate, trail = (message, None, b"") if isinstance(message, bytes) else message
        epoch, step_id, kind, trace_context, payload = protocol.decode_request(request)
        if epoch != self._epoch:
            raise StaleEpoch(f"step {step_id} is of epoch {epoch}; rank {self._rank} is of {self._epoch}")
        self._step_began = time.monotonic()
        self._step_in_hand = step_id
        began, token = (time.time_ns(), propagation.attach(trace_context)) if trace_context else (0, None)
        try:
            if self._graph_thread != threading.get_ident():
                self._bind_thread()
            result = None
            if kind == StepKind.STEP:
                scheduler_output, grammar_output = pickle.loads(payload)
                result = self._worker.execute_stage(scheduler_output, grammar_output, intermediate)
            if began:
                trail += measurements.encode_timing(self._rank, self._idle_since, began, time.time_ns())
            assignment = self._assignment
            assert assignment is not None  # the epoch matched, so init_worker has run
            if assignment.pp_rank < assignment.pp_size - 1:
                return serialized((request, result, trail)) if serialize else (request, result, trail)
            return protocol.encode_reply(epoch, step_id, self._rank, result if assignment.wants_output else None, trail)
        except Exception as error:  # noqa: BLE001 - the engine's own, whatever it is
            self._failed_steps = (*self._failed_steps[1 - FAILURES_KEPT :], step_id)
            times = (self._idle_since, began, time.time_ns()) if began else (0, 0, 0)
            raise capture(self, error, "execute_stage", step_id, times) from None
        finally:
            if began:
                propagation.detach(token)
            # Whatever comes out of here is written to a channel next, an exception too.
            now = time.monotonic()
            while not self._lease.valid(now):  # bounded: see _keep_lease
                time.sleep(_LEASE_WAIT_S)
                now = time.monotonic()
            if kind == StepKind.STEP:  # others say nothing of how long one takes
                self._slowest_step_s = max(self._slowest_step_s, now - self._step_began)
                self._steps_done += 1
            self._idle_since = time.time_ns() if began else 0
            self._last_step = step_id
            self._step_in_hand = -1

    def _bind_thread(self) -> None:
        """Once, in the graph's own thread: a device selected in another thread is not selected here."""
        self._graph_thread = threading.get_ident()
        bind = getattr(self._worker, "bind_thread", None)
        if bind is not None:
            bind()

    # -- supervision ------------------------------------------------------------------------------------------------

    @ray.method(**HEARTBEAT)  # type: ignore[untyped-decorator]  # Ray has no types
    def heartbeat(self, epoch: int, grantor: str = "", number: int = 0, heard: int = 0) -> Progress:
        """Answer a heartbeat that comes through Ray; see :meth:`answer`."""
        return self.answer(Beat(epoch, grantor, number, heard))

    def answer(self, beat: Beat) -> Progress:
        """Answer a heartbeat.

        Args:
            beat: its grantor renews the lease by it, under a name of its own; "" for one who only asks.

        Raises:
            StaleEpoch: this worker is of another generation.
        """
        epoch, grantor = beat.epoch, beat.grantor
        if self._epoch not in (0, epoch):
            raise StaleEpoch(f"rank {self._rank} is of epoch {self._epoch}, not {epoch}")
        now, slowest = time.monotonic(), self._slowest_step_s
        if grantor:
            self._lease.beat(grantor, beat.heard)
            self._lease.answered(grantor, beat.number, now)
            self._slowest_step_s = 0.0
        step, began = self._step_in_hand, self._step_began
        return Progress(
            rank=self._rank,
            epoch=epoch,
            phase=self._phase,
            step_in_hand=step,
            step_age_s=now - began if step >= 0 else 0.0,
            last_step=self._last_step,
            failed_steps=self._failed_steps,
            rpc_in_hand=self._rpc_in_hand,
            phase_age_s=now - self._phase_began,
            steps_done=self._steps_done,
            slowest_step_s=slowest,
            asleep=self._bell is not None and self._bell.asleep,
        )

    def _keep_lease(self) -> None:
        """End this process when nobody renews its lease: it has been given up, and must not write any more."""
        while not self._lease.spent(now := time.monotonic(), _LEASE_LOOK_S):
            time.sleep(self._lease.rest_s(now, _LEASE_LOOK_S))
        logger.error(
            "rank %d, epoch %d: no heartbeat for %.1f s; this worker has been given up, and ends itself",
            self._rank, self._epoch, self._lease.duration_s + self._lease.grace_s,
        )  # fmt: skip
        os._exit(LEASE_EXIT_CODE)

    @ray.method(concurrency_group="sentinel")  # type: ignore[untyped-decorator]  # Ray has no types
    def sentinel(self) -> None:
        """Never returns: the call fails the moment Ray learns that this process is gone."""
        threading.Event().wait()  # without a bound, on purpose: it ends with the process, and that is the news
