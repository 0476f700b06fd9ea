"""Spans that are decided on now and built later.

A span of the SDK costs 16 to 40 microseconds, too much for the path of a step. So what happens is noted as a
:class:`Draft`: the ids are drawn at once, because they travel in the envelope, and a background thread makes the span
with exactly these ids and times. That also makes it possible to keep an unsampled step after all when it fails.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.sampling import Sampler

# A generator of its own: an application that seeds Python's global one must not get the same trace ids every time.
_RANDOM: Final = random.Random()
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_DEFAULT: Final = TraceFlags(TraceFlags.DEFAULT)
#: Events on one span, of the 128 that the SDK keeps.
MAX_EVENTS: Final = 128

Value = str | int | float | bool | Sequence[int] | Sequence[str]


class Ids(NamedTuple):
    """The identity of a span, before there is one."""

    trace_id: int
    span_id: int
    sampled: bool

    def child(self) -> Ids:
        """A new span of the same trace."""
        return Ids(self.trace_id, _RANDOM.getrandbits(64) or 1, self.sampled)

    def traceparent(self) -> bytes:
        """As it travels in an envelope: W3C ``traceparent`` in ASCII."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.sampled)

    def context(self) -> SpanContext:
        """As the API wants it, for a parent or a link."""
        return SpanContext(
            self.trace_id, self.span_id, is_remote=False, trace_flags=_SAMPLED if self.sampled else _DEFAULT
        )


def root_ids(sampled: bool) -> Ids:
    """A span that begins a trace."""
    return Ids(_RANDOM.getrandbits(128) or 1, _RANDOM.getrandbits(64) or 1, sampled)


@dataclass(slots=True)
class Draft:
    """A span to be.

    Attributes:
        parent: its parent, or None for the root of a trace.
        start_ns, end_ns: nanoseconds since the Unix epoch.
        links: (span, attributes) pairs.
        events: (name, time in ns, attributes) triples.
        error: the ``error.type`` of a failure; "" for a success, which leaves the span's status unset.
        error_text: one line for the status; no text of an engine's exception, which may quote a prompt.
    """

    name: str
    ids: Ids
    parent: SpanContext | None
    start_ns: int
    end_ns: int = 0
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, Value] = field(default_factory=dict)
    links: list[tuple[SpanContext, dict[str, Value]]] = field(default_factory=list)
    events: list[tuple[str, int, dict[str, Value]]] = field(default_factory=list)
    error: str = ""
    error_text: str = ""

    def child(self, name: str, start_ns: int, end_ns: int = 0, **attributes: Value) -> Draft:
        """A span below this one, in the same trace."""
        return Draft(name, self.ids.child(), self.ids.context(), start_ns, end_ns, attributes=dict(attributes))


class _Preset:
    """An id generator that gives out what it was told to. Belongs to the one thread that builds spans."""

    def __init__(self) -> None:
        self.ids = root_ids(True)

    def generate_span_id(self) -> int:
        return self.ids.span_id

    def generate_trace_id(self) -> int:
        return self.ids.trace_id

    def is_trace_id_random(self) -> bool:
        return True


class _Decided:
    """A sampler for spans on which the provider's own sampler has been asked before."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Any = None,
        links: Any = None,
        trace_state: Any = None,
    ) -> Any:
        from opentelemetry.sdk.trace.sampling import Decision, SamplingResult

        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        return "Decided"


class SpanBuilder:
    """Makes spans from drafts with an SDK's provider, ours or the application's.

    ``sampler`` and ``id_generator`` are public attributes of the SDK's ``Tracer``. The provider hands out one tracer a
    scope, to everybody who asks; so what is changed here is a copy.
    """

    def __init__(self, provider: Any) -> None:
        from resilient_executor import telemetry

        self._tracer = copy.copy(provider.get_tracer(telemetry.SCOPE, telemetry.version()))
        self._sampler: Sampler = self._tracer.sampler
        self._preset = _Preset()
        self._tracer.id_generator = self._preset
        self._tracer.sampler = _Decided()

    @staticmethod
    def fits(provider: Any) -> bool:
        """Whether spans with ids drawn beforehand can be made with this provider."""
        from resilient_executor import telemetry

        tracer = provider.get_tracer(telemetry.SCOPE, telemetry.version())
        return hasattr(tracer, "sampler") and hasattr(tracer, "id_generator")

    def sampled(self, name: str, ids: Ids, parent: SpanContext | None) -> bool:
        """What the provider's sampler says to a new span. Cheap: asked on the path of a step."""
        from opentelemetry.sdk.trace.sampling import Decision

        context = trace.set_span_in_context(NonRecordingSpan(parent)) if parent is not None else None
        decision = self._sampler.should_sample(context, ids.trace_id, name, SpanKind.INTERNAL).decision
        return bool(decision is Decision.RECORD_AND_SAMPLE)

    def build(self, draft: Draft) -> None:
        """Make the span of a draft and end it."""
        context = trace.set_span_in_context(NonRecordingSpan(draft.parent or trace.INVALID_SPAN_CONTEXT))
        self._preset.ids = draft.ids
        attributes = draft.attributes if not draft.error else {**draft.attributes, "error.type": draft.error}
        span = self._tracer.start_span(
            draft.name,
            context=context,
            kind=draft.kind,
            attributes=attributes,
            links=[Link(target, marks) for target, marks in draft.links],
            start_time=draft.start_ns,
        )
        for name, at_ns, marks in draft.events[:MAX_EVENTS]:
            span.add_event(name, marks, at_ns)
        if draft.error:
            span.set_status(Status(StatusCode.ERROR, draft.error_text or draft.error))
        span.end(max(draft.end_ns, draft.start_ns))


def current_parent() -> SpanContext | None:
    """The caller's own span, if it has one."""
    context = trace.get_current_span().get_span_context()
    return context if context.is_valid else None


def parse(headers: Mapping[str, str]) -> SpanContext | None:
    """The span that W3C trace headers name, or None."""
    return parse_traceparent(next((v for k, v in headers.items() if k.lower() == "traceparent"), ""))


def parse_traceparent(text: str) -> SpanContext | None:
    """The span that a ``traceparent`` names, or None where it is none."""
    parts = text.strip().split("-")
    if len(parts) < 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return None
    try:
        flags = _SAMPLED if int(parts[3][:2], 16) & 1 else _DEFAULT
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), is_remote=True, trace_flags=flags)
    except ValueError:
        return None
    return context if context.is_valid else None
