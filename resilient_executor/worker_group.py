"""The workers of one epoch: created, ranked, initialised, called, and in the end gone.

A group is used by the thread that builds it until it serves; after that, collective RPCs may come from any thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from resilient_executor import doorbell, measurements, ranks
from resilient_executor.actors import actor_class
from resilient_executor.config import ExecutorConfig, Transport
from resilient_executor.doorbell import BellPlan
from resilient_executor.errors import RpcTimeout, WorkerStartError
from resilient_executor.graph import resolve_transport
from resilient_executor.injection import ChaosWorkerActor
from resilient_executor.journal import JournalEntry
from resilient_executor.placement import Reservation, worker_options
from resilient_executor.processes import UNKNOWN_START
from resilient_executor.protocol import Phase, ProcessIdentity, RankAssignment, RpcEnvelope, WorkerException, WorkerInfo
from resilient_executor.telemetry.calls import RankAnswer
from resilient_executor.worker import CONCURRENCY_GROUPS, WorkerActor

if TYPE_CHECKING:
    from resilient_executor.standbys import Standbys
    from resilient_executor.telemetry.calls import CallTrace
    from resilient_executor.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)

_call_ids = itertools.count()
#: A wait looks this often, in seconds, whether its group has been given up meanwhile.
_SLICE_S: Final = 0.25


def worker_class(config: ExecutorConfig) -> Any:
    """The class of actors that workers are, and standbys until they are workers."""
    return actor_class(ChaosWorkerActor if config.allow_chaos else WorkerActor, tuple(CONCURRENCY_GROUPS.items()))


@dataclass
class WorkerGroup:
    """Handles and facts of one epoch's workers.

    Attributes:
        epoch: their generation.
        handles: in rank order, once :meth:`rank` has run; in order of creation before.
        infos: the same order; shorter than ``handles`` while workers are still coming up.
        assignments: in rank order.
    """

    epoch: int
    config: ExecutorConfig
    handles: list[ActorHandle] = field(default_factory=list)
    infos: list[WorkerInfo] = field(default_factory=list)
    assignments: list[RankAssignment] = field(default_factory=list)
    #: Set by another thread (a conviction, a shutdown) to end the building of this group; says why.
    abandoned: str = ""
    #: Set when the executor is being shut down.
    stopping: threading.Event = field(default_factory=threading.Event)
    telemetry: Telemetry | None = None
    #: Actors that claim the devices of ranks which standbys have taken.
    holders: list[ActorHandle] = field(default_factory=list)
    #: Ray's references to what each worker says of itself, in order of creation.
    _describing: list[Any] = field(default_factory=list)

    def spawn(self, reservation: Reservation, standbys: Standbys | None = None) -> int:
        """Create one actor for each bundle, or have a standby take its rank. :meth:`describe` waits for them.

        Returns:
            how many standbys were taken.
        """
        remote = worker_class(self.config)
        options = {**worker_options(self.config), **self.config.ray_remote_args}
        nodes = standbys.nodes_of(reservation) if standbys is not None else []
        taken = 0
        for created_rank in range(self.config.world_size):
            if standbys is not None and nodes:
                found = standbys.take(nodes[created_rank], reservation, created_rank)
                if found is not None:
                    self.handles.append(found.handle)
                    self._describing.append(found.info)
                    self.holders += [found.holder] if found.holder is not None else []
                    taken += 1
                    continue
            strategy = reservation.strategy(created_rank)
            self.handles.append(
                remote.options(**options, scheduling_strategy=strategy).remote(
                    created_rank, self.config.lease_s, self.config.lease_grace_s
                )
            )
            self._describing.append(self.handles[-1].describe.remote())
        return taken

    def describe(self, deadline: float) -> None:
        """Wait until every worker has said who it is; what those say that came up is kept, whatever the others do.

        Raises:
            WorkerStartError: one did not come up before ``deadline`` (``time.monotonic()``).
        """
        failure: WorkerStartError | None = None
        for created_rank, reference in enumerate(self._describing):
            try:
                [info] = self._all("spawn", [reference], deadline)
                self.infos.append(info)
            except WorkerStartError as error:
                failure = failure or WorkerStartError(f"bundle {created_rank}: {error}", phase="spawn")
        if failure is not None:
            raise failure

    def processes(self) -> list[ProcessIdentity]:
        """Every process of the group: of those that have said who they are, in the order of ``infos``; then of those
        that have not, as far as Ray knows their pid. Both must be gone before their devices are used again.
        """
        known = [info.process for info in self.infos]
        described = {info.actor_id for info in self.infos}
        for handle in self.handles:
            if handle._actor_id.hex() in described:
                continue
            if (process := process_of(handle)) is not None:
                known.append(process)
        return known

    def rank(self, driver_node_id: str, deadline: float) -> None:
        """Check the topology and give out ranks, local ranks and the meeting point.

        Raises:
            TopologyError: the workers cannot form a group.
            WorkerStartError: one died meanwhile.
        """
        ranks.check_topology(self.infos, self.config.world_size)
        by_created_rank = {info.created_rank: handle for info, handle in zip(self.infos, self.handles, strict=True)}
        ordered = ranks.order_ranks(self.infos, driver_node_id)
        self.infos = ordered
        self.handles = [by_created_rank[info.created_rank] for info in ordered]
        mapping = ranks.rank_mapping(ordered)
        self._all("rank", [handle.adjust_rank.remote(mapping) for handle in self.handles], deadline)
        # A port of rank 0's own node, fresh for this epoch: a straggler of an old one finds nobody there.
        [port] = self._all("rank", [self.handles[0].free_port.remote()], deadline)
        method = ranks.init_method(ranks.rendezvous_host(ordered), port)
        self.assignments = ranks.assignments(ordered, config=self.config, epoch=self.epoch, init_method=method)

    def initialise(self, variables: Mapping[str, str], deadline: float) -> None:
        """Build the engine's workers, each with its environment and assignment.

        Raises:
            WorkerStartError: a constructor raised or its process died.
        """
        spec = cloudpickle.dumps(self.config.worker)
        context, pairs = self._context(), zip(self.handles, self.assignments, strict=True)
        calls = [handle.init_worker.remote(who, variables, spec, context) for handle, who in pairs]
        self._timed("initialise", "init_worker", calls, deadline)
        self._timed("initialise", "init_device", [h.init_device.remote(context) for h in self.handles], deadline)

    def load(self, deadline: float) -> None:
        """Load the weights.

        Raises:
            WorkerStartError: loading raised or a process died.
        """
        context = self._context()
        self._timed("load", "load_model", [handle.load_model.remote(context) for handle in self.handles], deadline)

    def prepare_graph(self, driver_node_id: str, deadline: float) -> BellPlan | None:
        """Have the workers ready for the compilation of their graph.

        Returns:
            the plan of the driver's own bell; None where nobody is to sleep.

        Raises:
            WorkerStartError: a process died.
        """
        last = self.config.output_rank
        sizes = [
            self.config.step_buffer_bytes if rank >= last else self.config.stage_buffer_bytes
            for rank in range(len(self.handles))
        ]
        nodes = [info.process.node_id for info in self.infos]
        driver: BellPlan | None = None
        workers: list[BellPlan | None] = [None] * len(nodes)
        if self.config.parking:
            driver, workers = doorbell.plan(self.config, nodes, driver_node_id)
        settings = self.config.wires, resolve_transport(self.config) is Transport.SHM
        calls = [
            handle.prepare_graph.remote(size, bell, *settings)
            for handle, size, bell in zip(self.handles, sizes, workers, strict=True)
        ]
        self._all("compile", calls, deadline)
        return driver

    def set_phase(self, phase: Phase, deadline: float) -> None:
        """Tell the workers which phase they are in, for their heartbeats.

        Raises:
            WorkerStartError: a process died.
        """
        self._all(phase.value, [handle.set_phase.remote(phase) for handle in self.handles], deadline)

    def _context(self) -> bytes:
        """The trace context of the phase that is going on."""
        return self.telemetry.phase_context() if self.telemetry is not None else b""

    def _timed(self, phase: str, method: str, references: Sequence[Any], deadline: float) -> None:
        """Wait for a method of the start on all workers, and note when each began and ended it."""
        telemetry = self.telemetry
        try:
            times = self._all(phase, references, deadline)
        except WorkerStartError as error:
            timing = measurements.raised_timing(error.__cause__)
            if telemetry is not None and timing is not None:
                failed = {timing.rank: (timing.began_ns, timing.ended_ns)}
                telemetry.worker_calls(method, self.epoch, failed, type(error.__cause__).__name__)
            raise
        if telemetry is not None:
            telemetry.worker_calls(method, self.epoch, dict(enumerate(times)))

    def _all(self, phase: str, references: Sequence[Any], deadline: float) -> list[Any]:
        """Wait for all. One failure ends the wait: its peers may wait for it in a collective, and never come back."""
        try:
            while True:
                if self.abandoned or self.stopping.is_set():
                    why = self.abandoned or "the executor is being shut down"
                    raise WorkerStartError(f"{phase}: {why}", phase=phase)
                remaining = deadline - time.monotonic()
                try:
                    return list(ray.get(list(references), timeout=max(0.0, min(remaining, _SLICE_S))))
                except GetTimeoutError:
                    if remaining <= _SLICE_S:
                        message = f"{phase}: not every worker was ready in time (start_timeout_s)"
                        raise WorkerStartError(message, phase=phase) from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WorkerException):
                message = f"{phase}: rank {cause.rank} raised {cause.summary}"
                raise WorkerStartError(message, rank=cause.rank, phase=phase) from cause.original()
            raise WorkerStartError(f"{phase}: {first_line(error)}", phase=phase) from error
        except RayError as error:
            # Whoever was given up is killed at once; then the reason is worth more than the death.
            why = f"{self.abandoned}; " if self.abandoned else ""
            raise WorkerStartError(f"{phase}: {why}{first_line(error)}", phase=phase) from error

    # -- collective RPC ---------------------------------------------------------------------------------------------

    def call(self, entry: JournalEntry, trace: CallTrace | None = None) -> list[Any]:
        """Send one collective RPC to every worker; returns Ray's references in rank order."""
        call_id = next(_call_ids)
        context = b""
        if trace is not None:
            trace.attempt(self.epoch, call_id)
            context = trace.header
        arguments = entry.per_rank or (entry.arguments,) * len(self.handles)
        return [
            handle.run_rpc.remote(RpcEnvelope(self.epoch, call_id, entry.method, arguments[rank], context))
            for rank, handle in enumerate(self.handles)
        ]

    def results(self, name: str, references: list[Any], timeout_s: float, trace: CallTrace | None = None) -> list[Any]:
        """Wait for the results of :meth:`call`, in rank order.

        Raises:
            Exception: what the engine's worker raised, as it is, with a note.
            RpcTimeout: not every rank answered in time.
            RayError: a worker died.
        """
        try:
            replies = ray.get(references, timeout=timeout_s)
            if trace is not None:
                trace.answered(dict(enumerate(map(answer_of, replies))))
            return [measurements.rpc_reply_result(reply) for reply in replies]
        except RayError as error:
            if trace is not None:
                trace.answered(answers_so_far(references), type(error).__name__)
            raise self._rpc_error(error, name, references, timeout_s) from None

    def _rpc_error(self, error: Exception, name: str, references: list[Any], timeout_s: float) -> Exception:
        """What the caller of a collective RPC gets."""
        if isinstance(error, GetTimeoutError):
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = tuple(rank for rank, reference in enumerate(references) if reference not in done)
            return RpcTimeout(name, timeout_s, late)
        if isinstance(error, RayTaskError) and isinstance(error.cause, WorkerException):
            original: Exception = error.cause.original()
            return original
        return error

    # -- going down -------------------------------------------------------------------------------------------------

    def shut_down(self, timeout_s: float) -> None:
        """Let healthy workers put their things in order; dead and silent ones are passed over."""
        references = [handle.shut_down.remote() for handle in self.handles]
        if references:
            ray.wait(references, num_returns=len(references), timeout=timeout_s)

    def kill(self) -> None:
        """Tell Ray that the actors are over. No proof: see the node agents' ``fence``."""
        for handle in [*self.handles, *self.holders]:
            try:
                ray.kill(handle, no_restart=True)
            except RayActorError:
                continue


def process_of(handle: ActorHandle) -> ProcessIdentity | None:
    """An actor's process as far as Ray knows it; None if it has none, or is dead."""
    row = ray._private.state.actors(handle._actor_id.hex())
    pid, node_id = row.get("Pid", 0), row.get("Address", {}).get("NodeID", "")
    alive = pid and node_id and row.get("State") != "DEAD"
    return ProcessIdentity(pid, UNKNOWN_START, node_id) if alive else None


def ended_at(handle: ActorHandle) -> float | None:
    """When Ray saw an actor end, seconds since the Unix epoch; None while it lives, as far as Ray knows."""
    row = ray._private.state.actors(handle._actor_id.hex())
    ended_ms = row.get("EndTime", 0) if row.get("State") == "DEAD" else 0
    return ended_ms / 1000 if ended_ms else None


def first_line(error: BaseException) -> str:
    """An error in one line: Ray's run over pages, and a task's begins with its traceback."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def answer_of(reply: bytes) -> RankAnswer:
    """What a reply to a collective RPC says of its time."""
    return RankAnswer(*measurements.rpc_reply_times(reply))


def answers_so_far(references: Sequence[Any]) -> dict[int, RankAnswer]:
    """What came of a failed collective RPC on each rank, as far as is known now; for its spans. Does not wait."""
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
    answers = {}
    for rank, reference in enumerate(references):
        if reference not in done:
            answers[rank] = RankAnswer(outcome="no_reply", error="no_reply")
            continue
        try:
            answers[rank] = answer_of(ray.get(reference, timeout=1.0))
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WorkerException):
                error_type = cause.summary.split(":", 1)[0]
                answers[rank] = RankAnswer(cause.times[1], cause.times[2], "raised", error_type)
            else:
                answers[rank] = RankAnswer(outcome="raised", error=type(cause or error).__name__)
        except RayError as error:
            answers[rank] = RankAnswer(outcome="no_reply", error=type(error).__name__)
    return answers
