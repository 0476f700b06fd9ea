"""Where spans and metrics go: to the provider that the process has, else to one of ours by the standard variables.

Tracing is on if a provider of the SDK is installed, or an exporter is named (``OTEL_TRACES_EXPORTER``) or an endpoint
(``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``); the same for metrics. Otherwise nothing is
imported and nothing is measured. ``OTEL_SDK_DISABLED=true`` turns all of it off. A provider of ours is private: an
application that installs its own later is not in conflict with it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from resilient_executor.telemetry.spans import SpanBuilder

logger = logging.getLogger(__name__)

_DEFAULT_PROTOCOL: Final = "http/protobuf"
_ENTRY_POINTS: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
#: Spans in one export of ours. Encoding holds the interpreter; with the SDK's 512, for tens of milliseconds.
_BATCH: Final = 64
#: The SDK's own size of the queue.
_QUEUE: Final = 2048
#: A batch is sent after this many milliseconds at the latest; the SDK's 5000 make short runs look empty.
_DELAY_MS: Final = 1000


class Drops(Protocol):
    """Tells how much a pipe of ours has lost so far."""

    def dropped(self) -> int:
        """Items that were not delivered."""


@dataclass
class Pipes:
    """What there is to send with.

    Attributes:
        spans: builds spans; None when tracing is off.
        meter_provider: None when metrics are off.
        own: providers of ours, to be flushed and shut down by us.
        drops: of the exporter of ours, when there is one.
    """

    spans: SpanBuilder | None = None
    meter_provider: Any = None
    own: tuple[Any, ...] = ()
    drops: Drops | None = None


def open_pipes(environ: Mapping[str, str] | None = None) -> Pipes | None:
    """Find or make providers; None when everything is off. Never raises: an engine serves without telemetry, too."""
    environ = os.environ if environ is None else environ
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    pipes = Pipes()
    try:
        _open_tracing(pipes, environ)
        _open_metrics(pipes, environ)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a backend or a package, the engine serves
        logger.warning("telemetry is off: %s: %s", type(error).__name__, error)
        return None
    return pipes if pipes.spans is not None or pipes.meter_provider is not None else None


def _open_tracing(pipes: Pipes, environ: Mapping[str, str]) -> None:
    from opentelemetry import trace

    provider: Any = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        if SpanBuilder.fits(provider):
            pipes.spans = SpanBuilder(provider)
        elif not isinstance(provider, trace.NoOpTracerProvider):
            logger.warning("tracing is off: the installed provider (%s) is not the SDK's", type(provider).__name__)
        return
    exporters = _exporters("traces", environ)
    if not exporters:
        return
    from opentelemetry.sdk.trace import TracerProvider

    from resilient_executor.telemetry.export import CountingProcessor

    own = TracerProvider(resource=_resource(environ), shutdown_on_exit=False)
    for exporter in exporters:
        processor = CountingProcessor(
            exporter,
            queue=int(environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE)),
            batch=int(environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH)),
            delay_ms=float(environ.get("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS)),
        )
        own.add_span_processor(processor)
        pipes.drops = processor
    pipes.spans = SpanBuilder(own)
    pipes.own = (*pipes.own, own)


def _open_metrics(pipes: Pipes, environ: Mapping[str, str]) -> None:
    from opentelemetry import metrics
    from opentelemetry.metrics import _internal

    installed: Any = metrics.get_meter_provider()
    if not isinstance(installed, _internal._ProxyMeterProvider):
        if not isinstance(installed, metrics.NoOpMeterProvider):
            pipes.meter_provider = installed
        return
    readers = [*_readers(environ), *_serve_prometheus(pipes, environ)]
    if not readers:
        return
    from opentelemetry.sdk.metrics import MeterProvider

    own = MeterProvider(metric_readers=readers, resource=_resource(environ), shutdown_on_exit=False)
    pipes.meter_provider = own
    pipes.own = (*pipes.own, own)


def _resource(environ: Mapping[str, str]) -> Any:
    from opentelemetry.sdk.resources import Resource

    named = "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "") or environ.get("OTEL_SERVICE_NAME")
    return Resource.create({} if named else {"service.name": "resilient-executor"})


def _named(signal: str, environ: Mapping[str, str]) -> list[str]:
    """The exporters that the environment asks for."""
    upper = signal.upper()
    names = [name.strip() for name in environ.get(f"OTEL_{upper}_EXPORTER", "").split(",") if name.strip()]
    if not names and (
        environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get(f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT")
    ):
        return ["otlp"]
    return [name for name in names if name != "none"]


def _exporters(signal: str, environ: Mapping[str, str]) -> list[Any]:
    found = []
    for name in _named(signal, environ):
        if name == "prometheus":
            continue
        upper = signal.upper()
        protocol = environ.get(f"OTEL_EXPORTER_OTLP_{upper}_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        entry = _ENTRY_POINTS.get(protocol or _DEFAULT_PROTOCOL, "") if name == "otlp" else name
        [*entries] = importlib.metadata.entry_points(group=f"opentelemetry_{signal}_exporter", name=entry)
        if not entries:
            logger.warning("%s are not sent: no exporter %r; pip install 'resilient-executor[otlp]'", signal, entry)
            continue
        found.append(entries[0].load()())
    return found


@dataclass
class _Scraped:
    """The page for Prometheus."""

    server: Any

    def shutdown(self) -> None:
        """Stop serving it."""
        self.server.shutdown()
        self.server.server_close()


def _readers(environ: Mapping[str, str]) -> list[Any]:
    if not _named("metrics", environ):
        return []
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    from resilient_executor.telemetry.export import QuietMetricExporter

    return [PeriodicExportingMetricReader(QuietMetricExporter(exporter)) for exporter in _exporters("metrics", environ)]


def _serve_prometheus(pipes: Pipes, environ: Mapping[str, str]) -> list[Any]:
    if "prometheus" not in _named("metrics", environ):
        return []
    try:
        import prometheus_client
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
    except ImportError:
        logger.warning("no metrics for Prometheus; pip install 'resilient-executor[prometheus]'")
        return []
    host = environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost")
    port = int(environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464"))
    try:
        server, _ = prometheus_client.start_http_server(port, host)
    except OSError as error:
        logger.warning("no metrics for Prometheus: port %d of %s: %s", port, host, error.strerror)
        return []
    pipes.own = (*pipes.own, _Scraped(server))
    return [PrometheusMetricReader()]
