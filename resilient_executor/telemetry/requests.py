"""The way back: a span in each request's own trace that links to the steps that served it.

A step links to its requests, but in most backends a link leads one way only. So when no step has served a request for a
while, a span that covers its steps is made in the request's trace. Belongs to the recorder's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanContext

from resilient_executor.telemetry import names
from resilient_executor.telemetry.spans import Draft, Ids, root_ids
from resilient_executor.telemetry.steps import MAX_LINKS

#: Seconds without a step after which a request is taken for finished; one that goes on gets another span.
QUIET_S: Final = 5.0
#: Requests that are followed at once; more are not.
MAX_REQUESTS: Final = 4096


@dataclass
class _Served:
    request: SpanContext
    start_ns: int
    end_ns: int
    last: float
    count: int = 0
    steps: list[SpanContext] = field(default_factory=list)


class Requests:
    """Follows the requests that have a span of their own, by the steps that link to them."""

    def __init__(self, executor: str) -> None:
        self._executor = executor
        #: By trace and span id: the SDK's context cannot be hashed.
        self._served: dict[tuple[int, int], _Served] = {}

    def served(self, step: Draft, now: float) -> None:
        """A step whose span is built has served the requests that it links to."""
        for request, marks in step.links:
            if marks.get(names.LINK) != "request" or not request.trace_flags.sampled:
                continue
            key = request.trace_id, request.span_id
            entry = self._served.get(key)
            if entry is None:
                if len(self._served) >= MAX_REQUESTS:
                    continue
                entry = self._served[key] = _Served(request, step.start_ns, step.end_ns, now)
            entry.end_ns, entry.last = max(entry.end_ns, step.end_ns), now
            entry.count += 1
            if len(entry.steps) < MAX_LINKS:
                entry.steps.append(step.ids.context())

    def ended(self, now: float) -> list[Draft]:
        """The spans of requests that have been quiet; at infinity, of all."""
        quiet = [key for key, entry in self._served.items() if now - entry.last >= QUIET_S]
        return [self._draft(self._served.pop(key)) for key in quiet]

    def _draft(self, entry: _Served) -> Draft:
        request = entry.request
        ids = Ids(request.trace_id, root_ids(True).span_id, True)
        draft = Draft(names.REQUEST_SPAN, ids, request, entry.start_ns, entry.end_ns)
        draft.attributes = {names.EXECUTOR: self._executor, names.STEPS: entry.count}
        draft.links = [(step, {names.LINK: "step"}) for step in entry.steps]
        return draft
