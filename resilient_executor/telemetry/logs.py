"""Fields for log records that join logs with traces: ``trace_id``, ``span_id``, ``epoch``, ``rank``.

Our own loggers have the filter from the start. To have the fields on all records of a handler, give it one::

    handler.addFilter(resilient_executor.telemetry.LogContext())

Values are lower-case hexadecimal, as in the backend; empty or -1 where there is none.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Final

_PACKAGE: Final = "resilient_executor"


class _Where(threading.local):
    """What an unsampled step in this thread belongs to."""

    traceparent: bytes = b""


_where = _Where()


class _Identity:
    """Who this process is. A driver has no rank; its epoch is the newest."""

    epoch = -1
    rank = -1


identity: Final = _Identity()


def identify(epoch: int, rank: int = -1) -> None:
    """Say of which epoch and rank this process's records are from now on."""
    identity.epoch, identity.rank = epoch, rank


def set_trace(traceparent: bytes) -> None:
    """Say to which trace this thread's records belong, where no span is current."""
    _where.traceparent = traceparent


class LogContext(logging.Filter):
    """Adds the fields; lets every record pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See :class:`logging.Filter`."""
        if not hasattr(record, "trace_id"):
            record.trace_id, record.span_id = _current()
            record.epoch, record.rank = identity.epoch, identity.rank
        return True


_CONTEXT: Final = LogContext()


def install() -> None:
    """Put the fields on the records of all loggers that this package has made so far."""
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == _PACKAGE or name.startswith(_PACKAGE + ".")):
            logger.addFilter(_CONTEXT)


def _current() -> tuple[str, str]:
    # A process that has not loaded the API has no span either.
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import trace

        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return f"{context.trace_id:032x}", f"{context.span_id:016x}"
    parts = _where.traceparent.decode("ascii", "replace").split("-")
    return (parts[1], parts[2]) if len(parts) == 4 else ("", "")
