"""The executor's state, as everyone sees it: one place, one lock, one order of events."""

from __future__ import annotations

import atexit
import enum
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient_executor.errors import ExecutorFailed, ExecutorStopped, RecoveryTimeout
from resilient_executor.supervisor.incidents import Evidence, Incident, RankExit
from resilient_executor.supervisor.stalls import StallReport

if TYPE_CHECKING:
    from resilient_executor.executor import ResilientExecutor
    from resilient_executor.graph import StepGraph
    from resilient_executor.pipeline import StepPipeline
    from resilient_executor.protocol import WorkerInfo
    from resilient_executor.supervisor.links import Pair
    from resilient_executor.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

#: Incidents that are kept for status; the oldest go first.
MAX_INCIDENTS: Final = 1000


class ExecutorState(str, enum.Enum):
    """What status, metrics and probes all show."""

    STARTING = "STARTING"
    HEALTHY = "HEALTHY"
    #: Something is wrong and being looked into; steps in flight go on, new ones wait.
    SUSPECT = "SUSPECT"
    RECOVERING = "RECOVERING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


#: These never change again.
FINAL: Final = (ExecutorState.FAILED, ExecutorState.STOPPED)


def _calm() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(eq=False)
class RpcInHand:
    """A collective RPC that is in flight.

    Attributes:
        number: counts all calls in the order in which they are sent.
        name: of the method.
        began: when it was begun, in seconds of ``time.monotonic``.
        references: Ray's, in rank order, once it has been sent.
        ended: set when its outcome is known, and what follows from it has been put in hand.
    """

    number: int
    name: str
    began: float
    references: list[Any] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class Generation:
    """Everything of one epoch, as far as it has been built; whoever buries it takes it down from what is there."""

    epoch: int
    group: WorkerGroup | None = None
    graph: StepGraph | None = None
    pipeline: StepPipeline | None = None
    #: It has been in service; before that, its death is a failed attempt of whoever builds it.
    served: bool = False
    condemned: bool = False
    #: The collective RPCs that are in flight, oldest first.
    rpcs: list[RpcInHand] = field(default_factory=list)
    #: Those that their callers have given up, and of whose outcome nobody has heard.
    given_up: list[RpcInHand] = field(default_factory=list)
    #: How often a worker has raised without anybody knowing whether its peers came out of it. Stays when the generation
    #: is condemned first: what came out of it since may have been spoilt.
    unsettled: int = 0
    #: Set unless that is being looked into.
    calm: threading.Event = field(default_factory=_calm)
    #: The incident that its death is, once it is open.
    incident: Incident | None = None
    evidence: list[Evidence] = field(default_factory=list)
    exits: list[RankExit] = field(default_factory=list)
    #: rank -> what it was doing when it was last heard of.
    doing: dict[int, str] = field(default_factory=dict)
    #: The supervisor's report, if it found a freeze or a stall; the first one counts.
    report: StallReport | None = None
    #: Pairs of its nodes that the supervisor has found to get no answer from each other.
    cut: set[Pair] = field(default_factory=set)

    @property
    def rpc(self) -> str:
        """The collective RPC that is in flight, the oldest of several, or ""."""
        return next((call.name for call in self.rpcs.copy()), "")


@dataclass(frozen=True)
class Event:
    """Something that a listener may want to know.

    Attributes:
        kind: ``state``, ``incident`` (opened), ``phase`` (ended, with ``duration_s``), ``phase_begun``, ``recovered``,
            ``failed``, or ``standbys`` (there are more or fewer).
        at: seconds since the Unix epoch.
        phase: for phases, its name.
        duration_s: for an ended phase, its length; for ``recovered``, from detection to service.
        error: for a phase that failed, the class of the exception.
    """

    kind: str
    at: float
    state: ExecutorState
    epoch: int
    phase: str = ""
    duration_s: float = 0.0
    incident: Incident | None = None
    error: str = ""


class Lifecycle:
    """State, serving generation, incidents and listeners. Safe for several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = ExecutorState.STARTING
        self._failure: ExecutorFailed | None = None
        self._listeners: list[Callable[[Event], None]] = []
        self.phase = ""
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self.incident_count = 0
        #: The generation that is serving or being built.
        self.current: Generation | None = None
        #: The generation that takes steps and calls now, or None. One attribute, so that the hot path needs no lock.
        self.serving: Generation | None = None

    @property
    def state(self) -> ExecutorState:
        """The state now."""
        return self._state

    @property
    def epoch(self) -> int:
        """The newest epoch; 0 before the first."""
        return self.current.epoch if self.current is not None else 0

    def move(
        self,
        state: ExecutorState,
        *,
        serving: Generation | None = None,
        failure: ExecutorFailed | None = None,
        ends: Incident | None = None,
    ) -> bool:
        """Enter a state; everyone who waits looks again. The final states are never left.

        ``ends`` is the incident that this ends; it is closed before anybody can see the new state.

        Returns:
            whether the state was entered.
        """
        with self._changed:
            if self._state in FINAL and not (self._state is ExecutorState.FAILED and state is ExecutorState.STOPPED):
                return False
            if serving is not None and serving.condemned:
                return False
            if ends is not None:
                ends.resolve("failed" if state is ExecutorState.FAILED else "recovered", time.time())
            before, self._state = self._state, state
            self.serving = serving
            self._failure = failure or self._failure
            self._changed.notify_all()
        if before is not state:
            self.emit("state")
        return True

    def await_serving(self, timeout_s: float) -> Generation:
        """The serving generation; waits for it at most ``timeout_s``.

        Raises:
            ExecutorFailed, ExecutorStopped: there will be none any more.
            RecoveryTimeout: there is none yet.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.serving is not None:
                    return self.serving
                self.raise_if_over()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    incident = self.incidents[-1].headline() if self.incidents else "no incident is known"
                    raise RecoveryTimeout(
                        f"not serving again after {timeout_s:g} s (recovery_timeout_s); state {self._state.value}, "
                        f"phase {self.phase or 'none'}; {incident}"
                    )
                self._changed.wait(remaining)

    def raise_if_over(self) -> None:
        """Raise what a call on a failed or stopped executor gets."""
        if self._state is ExecutorState.STOPPED:
            raise ExecutorStopped("the executor has been shut down; make a new one")
        if self._state is ExecutorState.FAILED:
            failure = self._failure
            assert failure is not None  # FAILED is entered with one
            raise ExecutorFailed(str(failure), failure.incident) from failure.__cause__

    # -- incidents and events ---------------------------------------------------------------------------------------

    def open_incident(self, epoch: int, detected_at: float) -> Incident:
        """Start an incident, seen first at ``detected_at``, seconds since the Unix epoch."""
        self.incident_count += 1
        incident = Incident(number=self.incident_count, epoch=epoch, detected_at=detected_at)
        self.incidents.append(incident)
        return incident

    def last_incident(self, epoch: int) -> Incident | None:
        """The newest incident of an epoch, or None."""
        return next((one for one in reversed(list(self.incidents)) if one.epoch == epoch), None)

    @contextmanager
    def in_phase(self, name: str, incident: Incident | None, durations: dict[str, float]) -> Iterator[None]:
        """Time one phase of a start or rebuild, also when it fails."""
        self.phase = name
        self.emit("phase_begun", phase=name, incident=incident)
        began, failure = time.monotonic(), ""
        try:
            yield
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            took = time.monotonic() - began
            self.phase = ""
            durations[name] = durations.get(name, 0.0) + took
            if incident is not None:
                incident.spent(name, took)
            self.emit("phase", phase=name, duration_s=took, incident=incident, error=failure)

    def note_phase(self, name: str) -> None:
        """Say more of the phase that is going on, for whoever looks."""
        if self.phase != name:
            self.phase = name
            self.emit("phase_begun", phase="waiting")

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener`` called with every event, in the thread where it happens; it must be quick."""
        self._listeners.append(listener)

    def worker_infos(self) -> tuple[WorkerInfo, ...]:
        """The workers of the newest generation in rank order; fewer while they come up."""
        group = self.current.group if self.current is not None else None
        return tuple(group.infos) if group is not None else ()

    def emit(
        self,
        kind: str,
        *,
        phase: str = "",
        duration_s: float = 0.0,
        incident: Incident | None = None,
        error: str = "",
    ) -> None:
        """Tell the listeners; one that fails is logged and does no harm."""
        if not self._listeners:
            return
        event = Event(kind, time.time(), self._state, self.epoch, phase, duration_s, incident, error)
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", kind)


def shut_down_at_exit(executor: ResilientExecutor) -> Callable[[], None]:
    """Shut down before Ray's own exit handler runs, without keeping the executor alive; returns how to undo it."""
    reference = weakref.ref(executor)

    def run() -> None:
        if (alive := reference()) is not None:
            alive.shutdown()

    atexit.register(run)
    return lambda: atexit.unregister(run)
