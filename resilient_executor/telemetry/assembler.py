"""Makes spans and measurements of what was noted. All of it runs in the recorder's thread, so it needs no lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanContext

from resilient_executor.errors import StepLost
from resilient_executor.measurements import StepFacts
from resilient_executor.telemetry import calls, names
from resilient_executor.telemetry.calls import CallTrace, draft_call
from resilient_executor.telemetry.metrics import Metrics
from resilient_executor.telemetry.requests import Requests
from resilient_executor.telemetry.spans import Draft, SpanBuilder, Value
from resilient_executor.telemetry.steps import StepTrace, draft_step

if TYPE_CHECKING:
    from resilient_executor.supervisor.incidents import Cause, Incident

#: How long a lost step waits for the first cause of its loss.
CAUSE_WAIT_S: Final = 20.0
#: How long a closed incident waits for the first good step; an idle engine sends none.
FIRST_STEP_WAIT_S: Final = 5.0
#: Epochs whose workers are remembered.
_EPOCHS: Final = 8

Identities = dict[int, dict[str, Value]]


class Assembler:
    """Builds the spans of steps, calls and incidents, and feeds the instruments."""

    def __init__(
        self,
        spans: SpanBuilder | None,
        metrics: Metrics | None,
        executor: str,
        world: tuple[int, int],
        describe_step: Callable[[Any], StepFacts] | None,
        incident_of: Callable[[int], SpanContext | None],
    ) -> None:
        self._spans = spans
        self._metrics = metrics
        self._executor = executor
        self._world = world
        self._describe_step = describe_step
        self._incident_of = incident_of
        self._requests = Requests(executor)
        self._workers: dict[int, Identities] = {}
        self._causes: dict[int, Cause | None] = {}
        self._lost: list[tuple[float, int, StepTrace]] = []
        #: A closed incident whose first good step has not come yet, and until when it is waited for.
        self._closed: tuple[Draft, float] | None = None
        #: The newest incident, for the step that resumes, however late it comes.
        self._to_resume: SpanContext | None = None

    def emit(self, draft: Draft) -> None:
        """Build a span that is finished."""
        if self._spans is not None:
            self._spans.build(draft)

    def workers(self, epoch: int, identities: Identities) -> None:
        """Who the ranks of an epoch are. Called in the thread that builds them; all others only look."""
        self._workers[epoch] = identities
        while len(self._workers) > _EPOCHS:
            del self._workers[min(self._workers)]

    def identities(self, epoch: int) -> Identities:
        """Rank -> attributes of its process."""
        return self._workers.get(epoch, {})

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self, trace: StepTrace) -> None:
        """A step has ended. A lost one waits for the first cause."""
        if isinstance(trace.error, StepLost):
            epoch = trace.error.epoch
            if epoch not in self._causes:
                self._lost.append((time.monotonic() + CAUSE_WAIT_S, epoch, trace))
                return
            self._lost_step(trace, epoch)
            return
        self._finish_step(trace, None, resumes=self._resumes(trace))

    def _resumes(self, trace: StepTrace) -> SpanContext | None:
        if trace.error is not None or self._to_resume is None:
            return None
        target, self._to_resume = self._to_resume, None
        if self._closed is not None:
            self._first_step(self._closed[0], trace)
        return target

    def _lost_step(self, trace: StepTrace, epoch: int) -> None:
        cause, incident = self._causes.get(epoch), self._incident_of(epoch)
        if self._metrics is not None and incident is not None:
            self._metrics.add(names.LOST_STEPS, cause=cause.kind.value if cause is not None else "unknown")
        self._finish_step(trace, cause, lost_in=incident)

    def _finish_step(
        self,
        trace: StepTrace,
        cause: Cause | None,
        lost_in: SpanContext | None = None,
        resumes: SpanContext | None = None,
    ) -> None:
        timings = trace.timings()
        if self._metrics is not None:
            self._metrics.step(trace, timings, self._world[0])
        incident = lost_in or resumes
        if self._spans is None or not (trace.ids.sampled or trace.error is not None or incident is not None):
            return
        facts = self._describe_step(trace.value[0]) if self._describe_step is not None else None
        drafts = draft_step(
            trace,
            facts,
            timings,
            executor=self._executor,
            world=self._world,
            cause=cause,
            identities=self.identities(trace.epoch),
        )
        self._requests.served(drafts[0], time.monotonic())
        if incident is not None:
            drafts[0].links.append((incident, {names.LINK: "incident"}))
        for draft in drafts:
            self._spans.build(draft)

    # -- incidents --------------------------------------------------------------------------------------------------

    def cause_known(self, epoch: int, cause: Cause | None) -> None:
        """The first cause of an epoch's end; lost steps have waited for it."""
        self._causes[epoch] = cause
        while len(self._causes) > _EPOCHS:
            del self._causes[min(self._causes)]
        waiting = [trace for _, lost_epoch, trace in self._lost if lost_epoch == epoch]
        self._lost = [entry for entry in self._lost if entry[1] != epoch]
        for trace in waiting:
            self._lost_step(trace, epoch)

    def incident_closed(self, root: Draft, incident: Incident, at_ns: int) -> None:
        """An incident has ended. Its span waits a moment for the first good step."""
        self._end_incident()
        if self._metrics is not None:
            cause = incident.cause.kind.value if incident.cause is not None else "unknown"
            self._metrics.add(names.RESTARTS, cause=cause, outcome=incident.outcome)
            self._metrics.record(names.OUTAGE, incident.duration_s or 0.0, cause=cause, outcome=incident.outcome)
        if incident.outcome != "recovered":
            self.emit(root)
            return
        self._closed = (root, time.monotonic() + FIRST_STEP_WAIT_S)
        self._to_resume = root.ids.context()

    def _first_step(self, root: Draft, trace: StepTrace) -> None:
        first = root.child(names.FIRST_STEP_SPAN, root.end_ns, max(trace.ended_ns, root.end_ns))
        first.attributes = {names.EXECUTOR: self._executor, names.EPOCH: trace.epoch, names.STEP: trace.step_id}
        first.links.append((trace.ids.context(), {names.LINK: "step"}))
        root.end_ns = first.end_ns
        self.emit(first)
        self._end_incident()

    def _end_incident(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            self.emit(closed[0])

    # -- calls and phases -------------------------------------------------------------------------------------------

    def call(self, call: CallTrace) -> None:
        """A collective RPC has ended."""
        if self._metrics is not None:
            method = names.RPC_PREFIX + call.name
            seconds = (call.ended_ns - call.began_ns) * 1e-9
            self._metrics.record(
                names.RPC_DURATION, seconds, rpc_system=calls.SYSTEM, rpc_method=method, error=call.error
            )
        if self._spans is not None and (call.ids.sampled or call.error or len(call.attempts) > 1):
            for draft in draft_call(call, self._executor, self.identities):
                self._spans.build(draft)

    def phase(self, name: str, seconds: float, error: str) -> None:
        """A phase has ended."""
        if self._metrics is not None:
            self._metrics.record(names.PHASE_DURATION, seconds, phase=name, error=error)

    def tick(self, now: float) -> None:
        """End what has waited long enough; ``now`` is ``time.monotonic()``, or infinity at the end."""
        if self._closed is not None and now >= self._closed[1]:
            self._end_incident()
        due = [entry for entry in self._lost if now >= entry[0]]
        self._lost = [entry for entry in self._lost if now < entry[0]]
        for _, epoch, trace in due:
            self._lost_step(trace, epoch)
        for draft in self._requests.ended(now):
            self.emit(draft)
