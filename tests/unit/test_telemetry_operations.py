"""Starts, incidents and shutdowns as the lifecycle tells them, and the spans that come of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from resilient_executor import Cause, CauseKind, Evidence, ExecutorConfig, ExecutorState, Incident, WorkerSpec
from resilient_executor.lifecycle import Generation, Lifecycle
from resilient_executor.telemetry import names
from resilient_executor.telemetry.recorder import Telemetry
from resilient_executor.telemetry.setup import Pipes
from resilient_executor.telemetry.spans import SpanBuilder


class Told:
    """A lifecycle, and a telemetry that listens to it. Nothing is sampled: what comes is kept for what it is."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ALWAYS_OFF)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(
            Pipes(spans=SpanBuilder(provider)), ExecutorConfig(worker=WorkerSpec("unused"), name="told")
        )
        self.lifecycle = Lifecycle()
        self.lifecycle.add_listener(self.telemetry.on_event)

    def phases(self, epoch: int, incident: Incident | None, *phases: str, fails: str = "") -> None:
        self.lifecycle.current = Generation(epoch)
        for phase in phases:
            try:
                with self.lifecycle.in_phase(phase, incident, {}):
                    if phase == fails:
                        raise TimeoutError("a text that nobody must see")
            except TimeoutError:
                return

    def incident(self, number: int = 1) -> Incident:
        incident = Incident(number, epoch=1, detected_at=time.time())
        incident.add(Evidence(incident.detected_at, "supervisor", 0, "a text that nobody must see", CauseKind.FROZEN))
        self.lifecycle.emit("incident", incident=incident)
        return incident

    def end(self) -> dict[str, list[ReadableSpan]]:
        self.telemetry.close(5)
        spans: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            spans.setdefault(span.name, []).append(span)
        return spans


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.telemetry.close(5)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_rebuild_of_two_attempts_shows_both(told: Told) -> None:
    incident = told.incident()
    incident.cause = Cause(CauseKind.FROZEN, rank=0, text="a text that nobody must see")
    told.phases(1, incident, "fence", "tear_down")
    told.phases(2, incident, "place", "spawn", fails="spawn")
    told.phases(3, incident, "place", "spawn")
    incident.epochs_tried[:] = [2, 3]
    incident.resolve("recovered", time.time())
    told.lifecycle.emit("recovered", incident=incident)
    spans = told.end()
    [root] = spans[names.INCIDENT_SPAN]
    assert attributes(root)[names.ATTEMPTS] == 2
    assert attributes(root)[names.ERROR] == "frozen"
    spawns = {attributes(span)[names.EPOCH]: span for span in spans[names.PHASE_PREFIX + "spawn"]}
    assert attributes(spawns[2])[names.ERROR] == "TimeoutError"
    assert names.ERROR not in attributes(spawns[3])
    every = [span for group in spans.values() for span in group]
    assert root.context is not None
    assert {span.parent.span_id for span in every if span.parent is not None} == {root.context.span_id}
    assert "nobody must see" not in "".join(span.to_json() for span in every)


def test_an_executor_that_fails_ends_its_incident_at_once(told: Told) -> None:
    incident = told.incident()
    incident.resolve("failed", time.time())
    told.lifecycle.emit("failed", incident=incident)
    assert told.telemetry.flush()
    [root] = [span for span in told.exporter.get_finished_spans() if span.name == names.INCIDENT_SPAN]
    assert attributes(root)[names.OUTCOME] == "failed"


def test_an_idle_engines_incident_does_not_wait_for_ever(told: Told) -> None:
    incident = told.incident()
    incident.resolve("recovered", time.time())
    told.lifecycle.emit("recovered", incident=incident)
    deadline = time.monotonic() + 15
    while not any(span.name == names.INCIDENT_SPAN for span in told.exporter.get_finished_spans()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_was_suspected_first_is_part_of_the_incident(told: Told) -> None:
    told.lifecycle.move(ExecutorState.SUSPECT)
    time.sleep(0.05)
    incident = told.incident()
    incident.resolve("recovered", time.time())
    told.lifecycle.emit("recovered", incident=incident)
    spans = told.end()
    [root], [suspect] = spans[names.INCIDENT_SPAN], spans[names.SUSPECT_SPAN]
    assert root.start_time == suspect.start_time
    assert suspect.start_time is not None
    assert suspect.end_time is not None
    assert suspect.end_time - suspect.start_time >= 50_000_000


def test_a_start_that_fails_says_where(told: Told) -> None:
    def start() -> None:
        with told.telemetry.operation(names.START_SPAN, lambda: 1):
            told.phases(1, None, "place", "spawn", fails="spawn")
            raise TimeoutError

    with pytest.raises(TimeoutError):
        start()
    spans = told.end()
    [started], [spawn] = spans[names.START_SPAN], spans[names.PHASE_PREFIX + "spawn"]
    assert attributes(started)[names.ERROR] == attributes(spawn)[names.ERROR] == "TimeoutError"


def test_a_graph_that_is_built_at_the_first_step_has_a_trace(told: Told) -> None:
    told.phases(1, None, "compile", "warm_up")
    spans = told.end()
    assert {name for name, group in spans.items() for span in group if span.parent is None} == {
        names.PHASE_PREFIX + "compile",
        names.PHASE_PREFIX + "warm_up",
    }
