"""With vLLM's own tracing on: from a request to the steps that served it, and back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))
REQUESTS = {f"{number:032x}": f"{number:016x}" for number in (0xB1, 0xB2, 0xB3)}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def traced() -> Iterator[Any]:
    """What a collector has got of one run, in a process of its own: a tracer provider is for the life of a process."""
    from otlp_receiver import receiving

    with receiving() as receiver:
        environ = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "tracing_main.py"), receiver.url],
            env=environ, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip().splitlines()[-1] == '["recovered"]'
        yield receiver


def test_three_requests_in_a_step_are_three_links(traced: Any) -> None:
    full = [step for step in traced.named("executor.step") if step.get("step.requests") == 3]
    assert len(full) >= 8
    for step in full:
        links = {link[0]: link[1] for link in step.links if link[2]["resilient_executor.link"] == "request"}
        assert links == REQUESTS
        assert sorted(span.get("rank") for span in traced.below(step)) == [0, 1]


def test_vllms_request_span_and_the_steps_are_reached_from_one_another(traced: Any) -> None:
    steps = {(step.trace_id, step.span_id) for step in traced.named("executor.step")}
    for trace_id, client in REQUESTS.items():
        [request] = [span for span in traced.named("llm_request") if span.trace_id == trace_id]
        ours = [span for span in traced.named("executor.request") if span.trace_id == trace_id]
        assert {request.parent_id, *(span.parent_id for span in ours)} == {client}
        linked = {link[:2] for span in ours for link in span.links}
        assert len(linked) >= 8
        assert linked <= steps


def test_a_lost_step_and_the_incident_are_there(traced: Any) -> None:
    [incident] = traced.named("executor.incident")
    assert incident.get("cause.signal") == "SIGKILL"
    lost = [step for step in traced.named("executor.step") if step.get("outcome") == "lost"]
    lost = [step for step in lost if step.get("epoch") == 1]  # the last one is cut off by the end of the engine
    assert lost
    assert all(any(link[:2] == (incident.trace_id, incident.span_id) for link in step.links) for step in lost)


def test_vllms_own_spans_in_the_workers_join_the_start_and_the_rebuild(traced: Any) -> None:
    traces = {span.trace_id for name in ("executor.start", "executor.incident") for span in traced.named(name)}
    loading = [span for span in traced.spans if span.name.startswith(("Worker init", "Loading"))]
    assert {span.trace_id for span in loading} == traces
