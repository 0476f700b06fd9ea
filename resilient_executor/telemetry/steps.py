"""One step as it is noted on its way, and the spans that are made of it afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanContext

from resilient_executor import measurements, protocol
from resilient_executor.errors import StepLost
from resilient_executor.measurements import RankTiming, StepFacts
from resilient_executor.telemetry import names, spans
from resilient_executor.telemetry.spans import Draft, Ids, Value

if TYPE_CHECKING:
    from resilient_executor.supervisor.incidents import Cause

#: The SDK keeps 128 links a span; two are for the incident that the step was lost in, or that it ended.
MAX_LINKS: Final = 126
_S: Final = 1e-9


class StepTrace:
    """What is noted of one step on its way. Everything costly waits until it has ended.

    Attributes:
        step_id: -1 until it is sent.
        ids, parent: of its span.
        header: the ``traceparent`` that travels in the envelope.
        called_ns: the engine's call; sent_ns: the graph has taken it, 0 before; ended_ns: its result was there.
        trails: for each rank of the last stage, the timings of its column of ranks.
        error: what it ended with, or None.
    """

    __slots__ = (
        "called_ns", "ended_ns", "epoch", "error", "header", "ids", "parent", "sent_ns", "sink", "step_id", "trails",
        "value",
    )  # fmt: skip

    def __init__(self, called_ns: int, value: Any, ids: Ids, parent: SpanContext | None) -> None:
        self.step_id = -1
        self.value = value
        self.ids = ids
        self.parent = parent
        self.header = ids.traceparent()
        self.called_ns = called_ns
        self.sent_ns = self.ended_ns = self.epoch = 0
        self.trails: tuple[bytes, ...] = ()
        self.error: BaseException | None = None
        self.sink: Callable[[StepTrace], None] | None = None

    def sent(self, epoch: int, step_id: int) -> None:
        """The graph of ``epoch`` has taken it, under this number."""
        self.sent_ns = time.time_ns()
        self.epoch, self.step_id = epoch, step_id

    def answered(self, replies: list[bytes]) -> None:
        """Its replies are there."""
        self.ended_ns = time.time_ns()
        self.trails = tuple(protocol.reply_trail(reply) for reply in replies)

    def ended(self, error: BaseException | None) -> None:
        """It has ended; the first end counts."""
        sink, self.sink = self.sink, None
        if sink is not None:
            self.ended_ns = self.ended_ns or time.time_ns()
            self.error = error
            sink(self)

    @property
    def outcome(self) -> str:
        """See :data:`names.OUTCOME`."""
        if self.error is None:
            return "ok"
        if isinstance(self.error, StepLost):
            return "lost" if self.sent_ns else "not_sent"
        return "raised"

    def timings(self) -> dict[int, RankTiming]:
        """Rank -> what it has measured, of the ranks whose answer has arrived."""
        found = [timing for trail in self.trails for timing in measurements.decode_trail(trail)]
        raised = measurements.raised_timing(self.error)
        return {timing.rank: timing for timing in (*found, *([raised] if raised is not None else []))}


def draft_step(
    trace: StepTrace,
    facts: StepFacts | None,
    timings: dict[int, RankTiming],
    *,
    executor: str,
    world: tuple[int, int],
    cause: Cause | None,
    identities: dict[int, dict[str, Value]],
) -> list[Draft]:
    """The step's span, and one for each rank.

    Args:
        trace: the step, which has ended.
        facts: what the engine says of it.
        timings: :meth:`StepTrace.timings`.
        executor: its name.
        world: TP size and PP size.
        cause: the first cause of the incident that it was lost in.
        identities: rank -> attributes that say which process it is.
    """
    outcome = trace.outcome
    attributes: dict[str, Value] = {names.EXECUTOR: executor, names.OUTCOME: outcome}
    step = Draft(names.STEP_SPAN, trace.ids, trace.parent, trace.called_ns, trace.ended_ns, attributes=attributes)
    if trace.epoch:
        attributes[names.EPOCH] = trace.epoch
    if trace.sent_ns:
        attributes[names.STEP] = trace.step_id
        attributes[names.QUEUED] = (trace.sent_ns - trace.called_ns) * _S
    if facts is not None:
        attributes[names.TOKENS], attributes[names.REQUESTS] = facts.tokens, facts.requests
        targets = [target for target in map(spans.parse, facts.trace_headers) if target is not None]
        step.links = [(target, {names.LINK: "request"}) for target in targets[:MAX_LINKS]]
        if len(targets) > MAX_LINKS:
            attributes[names.LINKS_DROPPED] = len(targets) - MAX_LINKS
    if trace.error is not None:
        step.error = type(trace.error).__name__
        step.error_text = f"{outcome} ({cause.kind.value})" if cause is not None else outcome
    drafts = [step]
    if trace.sent_ns:
        tp, pp = world
        for rank in range(tp * pp):
            drafts.append(_draft_rank(trace, step, rank, timings, tp, cause))
            drafts[-1].attributes.update(identities.get(rank, {}))
    return drafts


def _draft_rank(
    trace: StepTrace, step: Draft, rank: int, timings: dict[int, RankTiming], tp: int, cause: Cause | None
) -> Draft:
    attributes: dict[str, Value] = {
        names.EXECUTOR: step.attributes[names.EXECUTOR],
        names.EPOCH: trace.epoch,
        names.STEP: trace.step_id,
        names.RANK: rank,
        names.STAGE: rank // tp,
    }
    draft = Draft(f"{names.RANK_PREFIX}{rank}", step.ids.child(), step.ids.context(), trace.sent_ns, trace.ended_ns)
    draft.attributes = attributes
    timing = timings.get(rank)
    if timing is None:
        attributes[names.OUTCOME], draft.error = _end_without_answer(trace, rank, cause)
        return draft
    taken_ns = timings[rank + tp].began_ns if rank + tp in timings else trace.ended_ns
    # Clocks of two nodes differ; a span that left its parent would only confuse.
    draft.start_ns = min(max(timing.began_ns, trace.called_ns), trace.ended_ns)
    draft.end_ns = min(max(taken_ns, timing.ended_ns, draft.start_ns), trace.ended_ns)
    attributes[names.WAIT], attributes[names.COMPUTE] = wait_s(timing), compute_s(timing)
    if timing.raised:
        attributes[names.OUTCOME], draft.error = "raised", type(trace.error).__name__
        draft.end_ns = min(max(timing.ended_ns, draft.start_ns), trace.ended_ns)
    else:
        attributes[names.OUTCOME] = "ok"
        attributes[names.HAND_OVER] = max(0, taken_ns - timing.ended_ns) * _S
    return draft


def _end_without_answer(trace: StepTrace, rank: int, cause: Cause | None) -> tuple[str, str]:
    """Outcome and error of a rank that gave no answer to a step."""
    if trace.outcome != "lost":
        return "no_reply", "no_reply"
    if cause is not None and cause.rank == rank:
        return "killed", cause_error(cause)
    return "fenced", "fenced"


def cause_error(cause: Cause) -> str:
    """The ``error.type`` of what a cause has ended: the signal where there was one, else its kind."""
    if cause.signal is None:
        return cause.kind.value
    try:
        return signal.Signals(cause.signal).name
    except ValueError:
        return f"signal {cause.signal}"


def wait_s(timing: RankTiming) -> float:
    """Seconds without work before the step."""
    return max(0, timing.began_ns - timing.idle_since_ns) * _S if timing.idle_since_ns else 0.0


def compute_s(timing: RankTiming) -> float:
    """Seconds in the engine's worker."""
    return (timing.ended_ns - timing.began_ns) * _S
