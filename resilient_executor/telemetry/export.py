"""The SDK's batch processor, with a count of what did not arrive."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

#: The exporters' own complaints, one or more a batch; ours is one line for each time that the backend goes away.
_NOISY: Final = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")


class CountingExporter(SpanExporter):
    """Passes spans on, and counts those that the backend has not taken."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seen = 0
        self.failed = 0
        self._down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See the SDK. Never raises."""
        try:
            result: SpanExportResult = self._inner.export(spans)
        except Exception:  # noqa: BLE001 - the backend's own affair, whatever it is
            result = SpanExportResult.FAILURE
        self.seen += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._down = False
            return result
        self.failed += len(spans)
        if not self._down:
            self._down = True
            logger.warning("the trace backend does not take spans; they are dropped and counted until it does")
        return result

    def shutdown(self) -> None:
        """See the SDK."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See the SDK."""
        return bool(self._inner.force_flush(timeout_millis))


class QuietMetricExporter(MetricExporter):
    """Passes measurements on; a backend that is gone is one line in the log, and the next export brings them all."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self._inner = inner
        self._down = False
        self._closed = False
        _hush()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """See the SDK. Never raises."""
        if self._closed:  # the SDK starts its thread anew in a forked child, for one more export
            return MetricExportResult.FAILURE
        try:
            result: MetricExportResult = self._inner.export(metrics_data, timeout_millis, **kwargs)
        except Exception:  # noqa: BLE001 - the backend's own affair, whatever it is
            result = MetricExportResult.FAILURE
        if result is MetricExportResult.FAILURE and not self._down:
            logger.warning("the metrics backend does not answer; it is tried again and again")
        self._down = result is MetricExportResult.FAILURE
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """See the SDK."""
        return bool(self._inner.force_flush(timeout_millis))

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """See the SDK."""
        self._closed = True
        self._inner.shutdown(timeout_millis, **kwargs)


def _hush() -> None:
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)


class CountingProcessor(BatchSpanProcessor):
    """Drops spans when its queue is full, as the SDK's does; one can ask how many."""

    def __init__(self, exporter: SpanExporter, *, queue: int, batch: int, delay_ms: float) -> None:
        self._counting = CountingExporter(exporter)
        _hush()
        super().__init__(
            self._counting, max_queue_size=queue, max_export_batch_size=batch, schedule_delay_millis=delay_ms
        )
        self._capacity = queue + batch
        self._ended = 0
        self._overflowed = 0

    def on_end(self, span: ReadableSpan) -> None:
        """See the SDK."""
        self._ended += 1
        super().on_end(span)

    def dropped(self) -> int:
        """Spans that were not delivered, at least: what is neither exported nor can be in the queue is gone."""
        self._overflowed = max(self._overflowed, self._ended - self._counting.seen - self._capacity)
        return self._overflowed + self._counting.failed

    def unsent(self) -> int:
        """Spans that were not delivered, and those that still wait. After a shutdown nothing waits any more."""
        return self._ended - self._counting.seen + self._counting.failed
