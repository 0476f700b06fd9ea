"""What vLLM knows of a request's trace, for the links between steps and requests.

vLLM carries the W3C headers of a request up to its scheduler, and not into the steps. So the scheduler, which lives in
the executor's process, notes them here. Where ``--otlp-traces-endpoint`` is set, vLLM has a tracer provider in the
engine's process, and the executor uses that one; workers get theirs below, as in vLLM's own worker processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from resilient_executor.measurements import StepFacts

if TYPE_CHECKING:
    from resilient_executor.vllm.messages import Step

#: Requests whose headers are kept; the oldest go first. A step is looked at a moment after it has ended.
_KEPT: Final = 16384


class TraceHeaders:
    """Request id -> its trace headers. Written in the engine's thread, read in the one that builds spans."""

    def __init__(self) -> None:
        self._headers: OrderedDict[str, Mapping[str, str]] = OrderedDict()

    def note(self, request: Any) -> None:
        """A request has come to the scheduler."""
        headers = getattr(request, "trace_headers", None)
        if headers:
            self._headers[request.request_id] = headers
            if len(self._headers) > _KEPT:
                self._headers.popitem(last=False)

    def describe(self, step: Step) -> StepFacts:
        """What telemetry says of a step; for ``ExecutorConfig.describe_step``."""
        output = step.scheduler_output
        found = [self._headers[one] for one in list(output.num_scheduled_tokens) if one in self._headers]
        return StepFacts(output.total_num_scheduled_tokens, len(output.num_scheduled_tokens), found)


def trace_worker(rank: int) -> None:
    """Have vLLM's own spans (loading, warm-up) sent from this worker; they join the trace of the start or rebuild."""
    try:
        from vllm.tracing import maybe_init_worker_tracer
    except ImportError:  # before 0.15
        return
    maybe_init_worker_tracer("vllm.worker", "worker", f"Worker_{rank}")
