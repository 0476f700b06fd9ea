"""Telemetry without Ray: what is sampled and kept, whose provider is used, and what a bad backend costs."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased

from resilient_executor import ExecutorConfig, StepLost, WorkerSpec, measurements, protocol
from resilient_executor.lifecycle import Event, ExecutorState
from resilient_executor.measurements import StepFacts
from resilient_executor.supervisor.incidents import Cause, CauseKind, Incident
from resilient_executor.telemetry import LogContext, logs, names, propagation, recorder
from resilient_executor.telemetry.recorder import Telemetry
from resilient_executor.telemetry.setup import Pipes, open_pipes
from resilient_executor.telemetry.spans import SpanBuilder, parse, parse_traceparent, root_ids
from resilient_executor.telemetry.steps import MAX_LINKS

CONFIG = ExecutorConfig(worker=WorkerSpec("unused"), tensor_parallel_size=2, pipeline_parallel_size=2)


class Bench:
    """A telemetry over the SDK, with an exporter in memory."""

    def __init__(self, sampler: Sampler | None = None, config: ExecutorConfig = CONFIG) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler) if sampler is not None else TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.provider = provider
        self.telemetry = Telemetry(Pipes(spans=SpanBuilder(provider)), config)

    def step(self, number: int, error: Exception | None = None) -> None:
        run_step(self.telemetry, number, error)

    def spans(self) -> list[ReadableSpan]:
        assert self.telemetry.flush()
        return list(self.exporter.get_finished_spans())


def run_step(telemetry: Telemetry, number: int, error: Exception | None = None) -> None:
    """What executor, pipeline and workers do with a step's trace."""
    step = telemetry.begin_step((number, None), time.time_ns())
    step.sent(1, number)
    if error is None:
        now = time.time_ns()
        trails = [b"".join(measurements.encode_timing(r, 0, now, now) for r in (c, c + 2)) for c in (0, 1)]
        step.answered([protocol.encode_reply(1, number, 2 + c, None, trail) for c, trail in enumerate(trails)])
    step.ended(error)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(getattr(request, "param", None))
    yield made
    made.telemetry.close(5)


class TestSampling:
    @pytest.mark.parametrize("bench", [ParentBased(TraceIdRatioBased(0.25))], indirect=True)
    def test_a_ratio_of_the_steps_is_kept_whole(self, bench: Bench) -> None:
        for number in range(400):
            bench.step(number)
        by_trace: dict[int, list[str]] = {}
        for span in bench.spans():
            assert span.context is not None
            by_trace.setdefault(span.context.trace_id, []).append(span.name)
        assert 60 < len(by_trace) < 140
        assert {tuple(sorted(n)) for n in by_trace.values()} == {
            (names.STEP_SPAN, *(f"{names.RANK_PREFIX}{rank}" for rank in range(4)))
        }

    @pytest.mark.parametrize("bench", [ALWAYS_OFF], indirect=True)
    def test_errors_are_always_kept(self, bench: Bench) -> None:
        bench.step(0)
        bench.step(1, ValueError("not a secret"))
        spans = bench.spans()
        assert {span.attributes[names.STEP] for span in spans if span.attributes} == {1}
        assert len(spans) == 5
        assert all(span.status.description != "not a secret" for span in spans)

    @pytest.mark.parametrize("bench", [ParentBased(ALWAYS_OFF)], indirect=True)
    def test_a_step_joins_the_callers_trace_and_its_decision(self, bench: Bench) -> None:
        for flag in (0, 1):
            caller = parse_traceparent(f"00-{7 + flag:032x}-{9:016x}-0{flag}")
            assert caller is not None
            with trace.use_span(trace.NonRecordingSpan(caller)):
                bench.step(flag)
        spans = bench.spans()
        assert {span.attributes[names.STEP] for span in spans if span.attributes} == {1}
        [step] = [span for span in spans if span.name == names.STEP_SPAN]
        assert step.parent is not None
        assert (step.parent.trace_id, step.parent.span_id) == (8, 9)


class TestSteps:
    def test_the_header_in_the_envelope_is_the_span_that_is_built(self, bench: Bench) -> None:
        step = bench.telemetry.begin_step((0, None), time.time_ns())
        step.sent(1, 0)
        step.ended(None)
        [span, *_] = bench.spans()
        assert span.context is not None
        assert step.header == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01".encode()

    def test_links_are_capped_and_the_rest_is_counted(self) -> None:
        headers = [{"traceparent": f"00-{n:032x}-{n:016x}-01"} for n in range(1, 201)]
        config = ExecutorConfig(worker=WorkerSpec("unused"), describe_step=lambda _: StepFacts(200, 200, headers))
        bench = Bench(config=config)
        bench.step(0)
        step = next(span for span in bench.spans() if span.name == names.STEP_SPAN)
        bench.telemetry.close(5)
        assert len(step.links) == MAX_LINKS
        assert step.attributes is not None
        assert step.attributes[names.LINKS_DROPPED] == 200 - MAX_LINKS

    def test_a_lost_step_waits_for_its_cause(self, bench: Bench) -> None:
        bench.step(3, StepLost(1, 3))
        assert bench.spans() == []
        incident = Incident(1, epoch=1, detected_at=time.time())
        bench.telemetry.on_event(Event("incident", time.time(), ExecutorState.RECOVERING, 1, incident=incident))
        bench.telemetry._cause_known(1, Cause(CauseKind.PROCESS_EXIT, rank=2, signal=9))
        steps = [span for span in bench.spans() if span.name.startswith(names.STEP_SPAN)]
        spans = {(span.attributes or {}).get(names.RANK, -1): span for span in steps}
        killed = spans[2].attributes
        assert killed is not None
        assert (killed[names.OUTCOME], killed[names.ERROR]) == ("killed", "SIGKILL")
        assert spans[-1].links[0].context == bench.telemetry._operations.incident(1)

    def test_a_step_that_a_shutdown_has_cut_off_is_of_no_incident(self, bench: Bench) -> None:
        bench.step(3, StepLost(1, 3))
        bench.telemetry.close(5)
        spans = bench.exporter.get_finished_spans()
        assert len(spans) == 5
        assert not any(span.links for span in spans)

    def test_what_describe_step_raises_harms_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken(_: Any) -> StepFacts:
            raise KeyError("no such field")

        bench = Bench(config=ExecutorConfig(worker=WorkerSpec("unused"), describe_step=broken))
        bench.step(0)
        bench.step(1)
        assert bench.spans() == []
        assert bench.telemetry.dropped["work"] == 2
        bench.telemetry.close(5)


@pytest.mark.parametrize("text", ["", "junk", "00-zz-11-01", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-1-2-3-4"])
def test_what_is_no_traceparent_is_no_parent(text: str) -> None:
    assert parse({"TraceParent": text}) is None


class TestProviders:
    def test_nothing_configured_is_off(self) -> None:
        assert open_pipes({}) is None

    def test_disabled_is_off(self) -> None:
        assert open_pipes({"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "console"}) is None

    def test_off_does_not_load_the_sdk(self) -> None:
        code = (
            "import sys; from resilient_executor.telemetry.setup import open_pipes; assert open_pipes({}) is None;"
            "print([n for n in sys.modules if n.startswith('opentelemetry.sdk')])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "[]"

    def test_an_installed_provider_is_used_and_left_alone(self) -> None:
        code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
provider = TracerProvider()
trace.set_tracer_provider(provider)
from resilient_executor.telemetry.setup import open_pipes
pipes = open_pipes({"OTEL_TRACES_EXPORTER": "console"})
assert pipes.own == () and pipes.spans is not None
mine = provider.get_tracer("application")
assert mine.sampler is provider.sampler and type(mine.id_generator).__name__ == "RandomIdGenerator"
print("ok")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.strip() == "ok", done.stderr

    def test_two_executors_share_a_provider_and_its_sampler(self) -> None:
        provider = TracerProvider(sampler=ALWAYS_OFF)
        first, second = SpanBuilder(provider), SpanBuilder(provider)
        for builder in (first, second):
            assert not builder.sampled(names.STEP_SPAN, root_ids(False), None)
        assert first._preset is not second._preset
        assert first._tracer.id_generator is first._preset

    def test_prometheus_gets_a_page(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        environ = {
            "OTEL_METRICS_EXPORTER": "prometheus",
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
            "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
        }
        pipes = open_pipes(environ)
        assert pipes is not None
        assert pipes.spans is None
        telemetry = Telemetry(pipes, CONFIG)
        run_step(telemetry, 0)
        assert telemetry.flush()
        assert open_pipes(environ) is None  # somebody has the port: a warning, and the engine serves
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
        telemetry.close(5)
        assert 'resilient_executor_state="STARTING"} 1.0' in text
        assert "resilient_executor_worker_step_duration_seconds_count" in text
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)

    def test_an_exporter_that_does_not_exist_is_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        assert open_pipes({"OTEL_TRACES_EXPORTER": "carrier-pigeon"}) is None
        assert "carrier-pigeon" in caplog.text


class TestBadBackends:
    @pytest.mark.parametrize("how", ["gone", "mute"])
    def test_no_step_waits_and_drops_are_counted(
        self, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            port = server.getsockname()[1]
            if how == "gone":
                server.close()
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}/v1/traces")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
            monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "128")
            pipes = open_pipes()
            assert pipes is not None
            telemetry = Telemetry(pipes, CONFIG)
            longest = 0.0
            for number in range(400):
                began = time.perf_counter()
                run_step(telemetry, number)
                longest = max(longest, time.perf_counter() - began)
                time.sleep(0.001)
            assert longest < 0.5
            deadline = time.monotonic() + 20
            while telemetry.dropped["trace"] == 0 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert 0 < telemetry.dropped["trace"] <= 2000
            began = time.monotonic()
            telemetry.close(2.0)
            assert time.monotonic() - began < 4
        assert sum("does not take spans" in record.message for record in caplog.records) <= 1

    def test_work_that_cannot_be_kept_up_with_is_dropped_and_counted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recorder, "QUEUE_LIMIT", 10)
        monkeypatch.setattr(recorder, "_BREATH_S", 0.05)
        for number in range(100):
            bench.step(number)
        assert 50 < bench.telemetry.dropped["work"] < 100


def test_what_runs_in_a_worker_logs_its_trace() -> None:
    def fields() -> tuple[str, str]:
        record = logging.LogRecord("x", logging.INFO, "f", 1, "m", None, None)
        LogContext().filter(record)
        return record.trace_id, record.span_id  # type: ignore[attr-defined]

    for flag in (0, 1):  # sampled, an engine's spans join it; else there are only the log's fields
        token = propagation.attach(f"00-{5:032x}-{6:016x}-0{flag}".encode())
        assert fields() == (f"{5:032x}", f"{6:016x}")
        assert trace.get_current_span().get_span_context().is_valid == bool(flag)
        propagation.detach(token)
        assert fields() == ("", "")


def test_records_have_the_fields_even_without_a_trace() -> None:
    logs.set_trace(b"")
    record = logging.LogRecord("x", logging.INFO, "f", 1, "m", None, None)
    assert LogContext().filter(record)
    assert (record.trace_id, record.span_id) == ("", "")  # type: ignore[attr-defined]
