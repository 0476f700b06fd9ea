"""The worker's half: the envelope's context becomes the current one, so that an engine's own spans join the trace.

Workers make no spans of ours: they measure, and what they measure goes back with the reply. So a worker needs no SDK
and no connection to a backend, a replacement starts no slower, and a killed worker takes no finished span with it.
"""

from __future__ import annotations

from typing import Any

from resilient_executor.telemetry import logs


def attach(traceparent: bytes) -> Any:
    """Make the context of an envelope the current one of this thread. Returns what :func:`detach` takes, or None."""
    if not traceparent.endswith(b"1"):  # not sampled: an engine's spans would be dropped anyway
        logs.set_trace(traceparent)
        return None
    from opentelemetry import context, trace

    from resilient_executor.telemetry.spans import parse_traceparent

    parent = parse_traceparent(traceparent.decode("ascii", "replace"))
    if parent is None:
        return None
    return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))


def detach(token: Any) -> None:
    """Undo :func:`attach`."""
    if token is None:
        logs.set_trace(b"")
        return
    from opentelemetry import context

    context.detach(token)
