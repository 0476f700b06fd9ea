"""What the executor tells, and the thread that makes spans and measurements of it.

The path of a step sees two calls: :meth:`Telemetry.begin_step`, which draws ids and asks the sampler, and the end,
which puts a reference into a queue. The thread looks into the queue a few times a second: waking it would cost more
than all the rest, and would have two threads compete for the interpreter just when the step's result has come. It lets
go of the interpreter after each piece of work. When it cannot keep up, what comes is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanContext

from resilient_executor import telemetry
from resilient_executor.telemetry import names
from resilient_executor.telemetry.assembler import Assembler, Identities
from resilient_executor.telemetry.calls import CallTrace
from resilient_executor.telemetry.metrics import Metrics
from resilient_executor.telemetry.operations import Operations
from resilient_executor.telemetry.setup import Pipes
from resilient_executor.telemetry.spans import Draft, Ids, current_parent, root_ids
from resilient_executor.telemetry.steps import StepTrace

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig
    from resilient_executor.lifecycle import Event
    from resilient_executor.protocol import WorkerInfo
    from resilient_executor.supervisor.incidents import Cause, Incident

logger = logging.getLogger(__name__)

#: Pieces of work that wait for the thread; more are dropped.
QUEUE_LIMIT: Final = 20_000
#: Between two looks into the queue, and how long others get the interpreter after each piece of work.
_LOOK_S: Final = 0.1
_BREATH_S: Final = 0.0001
#: Between two questions to the supervisor, where metrics are on.
_PULSE_S: Final = 5.0

#: rank -> (round trips in seconds since the last question, silence in seconds, suspicion).
Pulse = Mapping[int, tuple[Sequence[float], float, float]]


class Telemetry:
    """Spans and metrics of one executor; see ``telemetry.start``."""

    def __init__(self, pipes: Pipes, config: ExecutorConfig) -> None:
        self._pipes = pipes
        self._spans = pipes.spans
        self._metrics: Metrics | None = None
        if pipes.meter_provider is not None:
            self._metrics = Metrics(pipes.meter_provider, telemetry.SCOPE, telemetry.version(), config.name)
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._overflowed = 0
        self._counted = {"work": 0, "trace": 0}
        self._ask_pulse: Callable[[], Pulse] | None = None
        self._pulse_due = 0.0
        self._closing = threading.Event()
        self._operations = Operations(config.name, self._emit, self._cause_known, self._incident_closed)
        self._assembler = Assembler(
            pipes.spans,
            self._metrics,
            config.name,
            (config.tensor_parallel_size, config.pipeline_parallel_size),
            config.describe_step,
            self._operations.incident,
        )
        self._thread = threading.Thread(target=self._run, name="resilient-executor-telemetry", daemon=True)
        self._thread.start()

    # -- on the path of steps and calls -----------------------------------------------------------------------------

    def begin_step(self, value: Any, called_ns: int) -> StepTrace:
        """A step that the engine has asked for at ``called_ns``."""
        ids, parent = self._new(names.STEP_SPAN)
        trace = StepTrace(called_ns, value, ids, parent)
        trace.sink = self._step_ended
        return trace

    def begin_warm_up(self) -> StepTrace:
        """A step of the phase that is going on; it pays for what the first traced step would pay for. No span."""
        return StepTrace(time.time_ns(), None, root_ids(True), None)

    def begin_call(self, name: str, policy: str, *, in_phase: bool = False) -> CallTrace:
        """A collective RPC; in a rebuild's replay it belongs to the phase, and else to the caller's span."""
        if in_phase and (parent := self._operations.parent()) is not None:
            ids: Ids = Ids(parent.trace_id, root_ids(True).span_id, True)
            return CallTrace(name, policy, ids, parent, self._call_ended)
        ids, caller = self._new(names.RPC_SPAN)
        return CallTrace(name, policy, ids, caller, self._call_ended)

    def _new(self, name: str) -> tuple[Ids, SpanContext | None]:
        ids = root_ids(False)
        if self._spans is None:
            return ids, None
        parent = current_parent()
        if parent is not None:
            ids = Ids(parent.trace_id, ids.span_id, False)
        return (Ids(ids.trace_id, ids.span_id, True) if self._spans.sampled(name, ids, parent) else ids), parent

    def _put(self, work: Callable[..., None], *arguments: Any) -> None:
        if len(self._queue) < QUEUE_LIMIT:
            self._queue.append((work, arguments))
        else:
            self._overflowed += 1

    def _step_ended(self, trace: StepTrace) -> None:
        self._put(self._assembler.step, trace)

    def _call_ended(self, call: CallTrace) -> None:
        self._put(self._assembler.call, call)

    # -- operations -------------------------------------------------------------------------------------------------

    @contextmanager
    def operation(self, name: str, epoch: Callable[[], int]) -> Iterator[None]:
        """A start or a shutdown."""
        self._operations.begin(name, current_parent())
        try:
            yield
        except BaseException as error:
            self._operations.end(epoch(), error)
            raise
        self._operations.end(epoch(), None)

    def on_event(self, event: Event) -> None:
        """The lifecycle's listener."""
        self._operations.on_event(event)
        if event.kind == "phase":
            self._put(self._assembler.phase, event.phase, event.duration_s, event.error)
        if self._metrics is not None:
            self._metrics.state, self._metrics.epoch = event.state.value, event.epoch

    def phase_context(self) -> bytes:
        """The trace context for calls to the workers in the phase that is going on."""
        return self._operations.context()

    def workers(self, epoch: int, infos: Sequence[WorkerInfo]) -> None:
        """Who the ranks of an epoch are."""
        identities: Identities = {
            rank: {names.PID: info.process.pid, names.NODE: info.process.node_id} for rank, info in enumerate(infos)
        }
        self._assembler.workers(epoch, identities)

    def worker_calls(self, method: str, epoch: int, times: Mapping[int, tuple[int, int]], error: str = "") -> None:
        """What the workers did in a phase: rank -> begin and end in nanoseconds since the Unix epoch."""
        self._operations.worker_calls(method, epoch, times, error, self._assembler.identities(epoch))

    def _emit(self, draft: Draft) -> None:
        self._put(self._assembler.emit, draft)

    def _cause_known(self, epoch: int, cause: Cause | None) -> None:
        self._put(self._assembler.cause_known, epoch, cause)

    def _incident_closed(self, root: Draft, incident: Incident, at_ns: int) -> None:
        self._put(self._assembler.incident_closed, root, incident, at_ns)

    def ask_for_pulse(self, ask: Callable[[], Pulse]) -> None:
        """Where heartbeats' round trips come from. ``ask`` is bounded, and called in the thread."""
        self._ask_pulse = ask

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            self._work_off()
            self._assembler_tick(time.monotonic())
            self._measure()
        self._work_off()
        self._assembler_tick(float("inf"))
        self._count_drops()
        for provider in self._pipes.own:
            try:
                provider.shutdown()
            except Exception as error:  # noqa: BLE001 - the last thing that happens here
                logger.debug("telemetry: %s", error)

    def _work_off(self) -> None:
        while self._queue:
            work, arguments = self._queue.popleft()
            try:
                work(*arguments)
            except Exception:
                logger.exception("telemetry: a span or measurement could not be made")
                self._overflowed += 1
            time.sleep(_BREATH_S)

    def _assembler_tick(self, now: float) -> None:
        try:
            self._assembler.tick(now)
        except Exception:
            logger.exception("telemetry: a span could not be made")

    def _measure(self) -> None:
        self._count_drops()
        if self._metrics is None or self._ask_pulse is None or time.monotonic() < self._pulse_due:
            return
        self._pulse_due = time.monotonic() + _PULSE_S
        try:
            pulse = self._ask_pulse()
        except Exception as error:  # noqa: BLE001 - the supervisor may be gone; others see to that
            logger.debug("telemetry: no pulse: %s", error)
            return
        self._metrics.silence = {rank: silence_s for rank, (_, silence_s, _) in pulse.items()}
        self._metrics.suspicion = {rank: phi for rank, (_, _, phi) in pulse.items()}
        for rank, (round_trips, _, _) in pulse.items():
            for seconds in round_trips:
                self._metrics.record(names.HEARTBEAT, seconds, rank=rank)

    @property
    def dropped(self) -> dict[str, int]:
        """What was lost so far: ``work`` that no span was made of, spans (``trace``) that a backend did not take."""
        return {"work": self._overflowed, "trace": self._pipes.drops.dropped() if self._pipes.drops is not None else 0}

    def _count_drops(self) -> None:
        for signal, total in self.dropped.items():
            fresh = total - self._counted[signal]
            self._counted[signal] = total
            if fresh > 0 and self._metrics is not None:
                self._metrics.add(names.DROPPED, fresh, signal=signal)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything that was told so far is with the provider. For tests and demos."""
        done = threading.Event()
        self._put(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Make spans of what is left and hand it over; a backend that does not take it is waited for ``timeout_s``."""
        self._closing.set()
        self._thread.join(timeout_s)
