"""A collector for tests: takes OTLP over HTTP, and keeps what came."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: The protocol's number of a status that says error.
ERROR = 2


@dataclass
class SeenSpan:
    """A span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    links: list[tuple[str, str, dict[str, Any]]]
    events: list[tuple[str, int, dict[str, Any]]]

    def get(self, name: str) -> Any:
        """An attribute of ours, without the prefix."""
        return self.attributes.get(f"resilient_executor.{name}")


@dataclass
class Receiver:
    """What has arrived so far."""

    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    metrics: dict[str, tuple[str, str, list[dict[str, Any]]]] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        self.bodies.append(body)
        if path.endswith("/v1/traces"):
            spans = ExportTraceServiceRequest.FromString(body)
            self.spans += [_span(s) for r in spans.resource_spans for scope in r.scope_spans for s in scope.spans]
        elif path.endswith("/v1/metrics"):
            metrics = ExportMetricsServiceRequest.FromString(body)
            for resource in metrics.resource_metrics:
                for scope in resource.scope_metrics:
                    for one in scope.metrics:
                        kind = one.WhichOneof("data")
                        points = [_values(p.attributes) for p in getattr(one, kind).data_points]
                        self.metrics[one.name] = (kind, one.unit, points)

    def wait_for(self, seconds: float, count: int, name: str) -> list[SeenSpan]:
        """Wait until ``count`` spans of this name have come."""
        deadline = time.monotonic() + seconds
        while len(found := self.named(name)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} spans {name} after {seconds:g} s"
            time.sleep(0.05)
        return found

    def named(self, name: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: SeenSpan) -> list[SeenSpan]:
        return [s for s in self.spans if s.parent_id == parent.span_id and s.trace_id == parent.trace_id]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            receiver.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _span(span: Any) -> SeenSpan:
    return SeenSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        _values(span.attributes),
        [(link.trace_id.hex(), link.span_id.hex(), _values(link.attributes)) for link in span.links],
        [(event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
