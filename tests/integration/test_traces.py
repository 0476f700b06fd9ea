"""One story told over OTLP: steps, calls, an exception, a kill, and what of it arrives at a backend."""

from __future__ import annotations

import io
import itertools
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import ERROR, Receiver, SeenSpan, receiving
from probe_executor import run_step, serving
from probe_worker import ProbeError

from resilient_executor import RpcPolicy
from resilient_executor.measurements import StepFacts
from resilient_executor.telemetry import LogContext, names

SECRETS = {
    "prompt": "prompt-5e3f81",
    "output": "output-9ac404",
    "environment": "environment-1d77b0",
    "path": "path-c0ffee",
    "argument": "argument-77aa01",
}
REQUESTS = [{"traceparent": f"00-{n:032x}-{n:016x}-01"} for n in (0xA1, 0xA2, 0xA3)]
PHASES = ("fence", "tear_down", "place", "spawn", "rank", "initialise", "load", "replay", "compile", "warm_up")
#: Clocks are read in nanoseconds, events carry seconds in double precision.
ROUNDING_NS = 1000


@dataclass
class Story:
    """What was done, and what arrived."""

    receiver: Receiver
    outputs: list[Any] = field(default_factory=list)
    killed_pid: int = 0
    log: str = ""


def describe(scheduler_output: Any) -> StepFacts:
    return StepFacts(tokens=12, requests=3, trace_headers=REQUESTS)


@pytest.fixture(scope="module")
def story(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.addFilter(LogContext())
    handler.setFormatter(logging.Formatter("%(name)s %(trace_id)s %(span_id)s %(epoch)d %(rank)d %(message)s"))
    logging.getLogger("resilient_executor").addHandler(handler)
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        patch.setenv("RESILIENT_EXECUTOR_TEST_SECRET", SECRETS["environment"])
        result = Story(receiver)
        folder = tmp_path_factory.mktemp(SECRETS["path"])
        with serving(
            {"farewell": str(folder / "left")},
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            describe_step=describe,
            rpc_policies={"nap": RpcPolicy.READ, "echo": RpcPolicy.JOURNAL},
        ) as executor:
            patch.delenv("RESILIENT_EXECUTOR_TEST_SECRET")
            tell(executor, result)
        result.log = log.getvalue()
        yield result
    logging.getLogger("resilient_executor").removeHandler(handler)


def tell(executor: Any, result: Story) -> None:
    command = {"prompt": SECRETS["prompt"], "do": {r: [("sleep", 0.005), ("trace",)] for r in range(4)}}
    result.outputs = [run_step(executor, command) for _ in range(5)]
    executor.collective_rpc("echo", args=(SECRETS["argument"],))
    with pytest.raises(ProbeError):
        executor.collective_rpc("fail", args=("probe", [1]))
    with pytest.raises(ProbeError):
        run_step(executor, {"do": {2: [("raise", SECRETS["output"])]}})
    result.killed_pid = victim = executor.workers[1].process.pid
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    run_step(executor, {"prompt": SECRETS["prompt"], "do": {1: [("sleep", 1.0)]}})
    run_step(executor, command)
    # A call that may be repeated, and whose worker dies under it.
    threading.Timer(0.3, os.kill, (executor.workers[3].process.pid, signal.SIGKILL)).start()
    executor.collective_rpc("nap", args=({3: 1.0},))
    time.sleep(6.5)  # the pulse of the workers, and metrics' next export


def steps(story: Story, outcome: str) -> list[SeenSpan]:
    return [span for span in story.receiver.named(names.STEP_SPAN) if span.get("outcome") == outcome]


def test_every_step_is_one_trace_with_one_span_a_rank_that_nest(story: Story) -> None:
    done = steps(story, "ok")
    assert len(done) == 7
    assert len({span.trace_id for span in done}) == 7
    for step in done:
        ranks = story.receiver.below(step)
        assert sorted(span.get("rank") for span in ranks) == [0, 1, 2, 3]
        assert {span.trace_id for span in ranks} == {step.trace_id}
        assert all(step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns for span in ranks)
        assert {(span.get("rank"), span.get("stage")) for span in ranks} == {(0, 0), (1, 0), (2, 1), (3, 1)}
        by_rank = {span.get("rank"): span for span in ranks}
        for first, second in ((0, 2), (1, 3)):  # a stage begins when the one before has handed over
            assert by_rank[first].end_ns <= by_rank[second].start_ns + ROUNDING_NS
        for span in ranks:
            parts = span.get("rank.compute") + span.get("rank.hand_over")
            assert parts == pytest.approx((span.end_ns - span.start_ns) * 1e-9, abs=1e-4)
            assert span.get("epoch") == step.get("epoch")
            assert span.attributes["process.pid"] > 0
        assert (step.get("step.tokens"), step.get("step.requests")) == (12, 3)
    assert all(span.get("rank.compute") >= 0.005 for step in done[:5] for span in story.receiver.below(step))


def test_a_step_links_to_the_requests_in_it(story: Story) -> None:
    expected = {(headers["traceparent"][3:35], headers["traceparent"][36:52]) for headers in REQUESTS}
    for step in steps(story, "ok"):
        requests = [link for link in step.links if link[2]["resilient_executor.link"] == "request"]
        assert {(trace_id, span_id) for trace_id, span_id, _ in requests} == expected


def test_from_a_request_one_gets_to_its_steps(story: Story) -> None:
    spans = story.receiver.named(names.REQUEST_SPAN)
    assert {(span.trace_id, span.parent_id) for span in spans} == {
        (headers["traceparent"][3:35], headers["traceparent"][36:52]) for headers in REQUESTS
    }
    built = {(step.trace_id, step.span_id) for step in story.receiver.named(names.STEP_SPAN)}
    for number in range(3):
        parent = REQUESTS[number]["traceparent"][36:52]
        linked = {link[:2] for span in spans if span.parent_id == parent for link in span.links}
        assert linked == built


def test_an_engines_own_spans_would_join_the_steps_trace(story: Story) -> None:
    """The context goes through the compiled graph, on every stage."""
    traces = {span.trace_id for span in steps(story, "ok")}
    assert {trace for output in story.outputs for trace in output["traces"]} <= traces
    assert all(len(output["traces"]) == 2 and len(set(output["traces"])) == 1 for output in story.outputs)


def test_a_call_has_a_server_span_a_rank(story: Story) -> None:
    client, server = 3, 2
    for span in story.receiver.named(names.RPC_PREFIX + "echo"):
        if span.kind == client and not span.parent_id:
            below = story.receiver.below(span)
            assert sorted(one.get("rank") for one in below) == [0, 1, 2, 3]
            assert {one.kind for one in below} == {server}
            assert all(span.start_ns <= one.start_ns <= one.end_ns <= span.end_ns for one in below)
            assert span.attributes["rpc.system.name"] == "ray"
            break
    else:
        pytest.fail("no span of the call")
    [failed] = [s for s in story.receiver.named(names.RPC_PREFIX + "fail") if s.kind == client]
    assert (failed.status, failed.attributes["error.type"]) == (ERROR, "ProbeError")
    outcomes = {one.get("rank"): (one.get("outcome"), one.status) for one in story.receiver.below(failed)}
    assert outcomes[1] == ("raised", ERROR)
    assert set(outcomes) == {0, 1, 2, 3}


def test_a_repeated_call_has_its_error_on_the_attempt(story: Story) -> None:
    [call] = [s for s in story.receiver.named(names.RPC_PREFIX + "nap") if s.kind == 3]
    assert (call.status, call.get("attempts")) == (0, 2)
    [attempt] = [s for s in story.receiver.below(call) if s.name == names.ATTEMPT_SPAN]
    assert attempt.status == ERROR
    servers = [s for s in story.receiver.below(call) if s.name == call.name]
    assert sorted(s.get("rank") for s in servers) == [0, 1, 2, 3]
    assert {s.get("epoch") for s in servers} == {3}
    lost = {s.get("rank"): s.get("outcome") for s in story.receiver.below(attempt)}
    assert lost[3] == "no_reply"


def test_an_exception_of_one_rank_is_on_that_rank(story: Story) -> None:
    [step] = steps(story, "raised")
    assert (step.status, step.attributes["error.type"]) == (ERROR, "ProbeError")
    outcomes = {span.get("rank"): span.get("outcome") for span in story.receiver.below(step)}
    assert outcomes == {0: "no_reply", 1: "no_reply", 2: "raised", 3: "no_reply"}


def test_a_killed_workers_step_says_so(story: Story) -> None:
    [step] = steps(story, "lost")
    assert (step.status, step.attributes["error.type"]) == (ERROR, "StepLost")
    ranks = {span.get("rank"): span for span in story.receiver.below(step)}
    assert ranks[1].get("outcome") == "killed"
    assert ranks[1].attributes["error.type"] == "SIGKILL"
    assert ranks[1].attributes["process.pid"] == story.killed_pid
    assert {ranks[rank].get("outcome") for rank in (0, 2, 3)} == {"fenced"}


def test_an_incident_is_one_trace_with_every_phase(story: Story) -> None:
    incident = story.receiver.named(names.INCIDENT_SPAN)[0]
    assert incident.get("cause") == "process_exit"
    assert incident.get("cause.signal") == "SIGKILL"
    assert incident.get("cause.doing").startswith("step ")
    assert (incident.get("rank"), incident.attributes["process.pid"]) == (1, story.killed_pid)
    assert incident.get("outcome") == "recovered"
    assert "supervisor" in {marks[names.SOURCE] for _, _, marks in incident.events}
    below = sorted(story.receiver.below(incident), key=lambda span: span.start_ns)
    expected = [names.DETECTION_SPAN, *(names.PHASE_PREFIX + phase for phase in PHASES)]
    assert [span.name for span in below] == [*expected, names.READMISSION_SPAN, names.FIRST_STEP_SPAN]
    for span in below:
        assert incident.start_ns - ROUNDING_NS <= span.start_ns <= span.end_ns <= incident.end_ns + ROUNDING_NS
    for earlier, later in itertools.pairwise(below):
        assert earlier.end_ns <= later.start_ns + ROUNDING_NS
    phases = {span.name: span for span in below}
    for phase, method in (("initialise", "init_worker"), ("initialise", "init_device"), ("load", "load_model")):
        parent = phases[names.PHASE_PREFIX + phase]
        workers = [s for s in story.receiver.below(parent) if s.name == names.WORKER_PREFIX + method]
        assert sorted(s.get("rank") for s in workers) == [0, 1, 2, 3]
        assert all(parent.start_ns <= s.start_ns <= s.end_ns <= parent.end_ns for s in workers)
    [replayed] = list(story.receiver.below(phases[names.PHASE_PREFIX + "replay"]))
    assert replayed.name == names.RPC_PREFIX + "echo"
    assert len(story.receiver.below(replayed)) == 4


def test_lost_and_resuming_steps_lead_to_the_incident(story: Story) -> None:
    incident = story.receiver.named(names.INCIDENT_SPAN)[0]
    linked = {
        span.get("outcome")
        for span in story.receiver.named(names.STEP_SPAN)
        if any(link[:2] == (incident.trace_id, incident.span_id) for link in span.links)
    }
    assert linked == {"lost", "ok"}
    [first] = [s for s in story.receiver.below(incident) if s.name == names.FIRST_STEP_SPAN]
    assert first.links[0][:2] in {(s.trace_id, s.span_id) for s in steps(story, "ok")}


def test_start_and_shutdown_are_traces(story: Story) -> None:
    [start] = story.receiver.named(names.START_SPAN)
    phases = [span.name.removeprefix(names.PHASE_PREFIX) for span in story.receiver.below(start)]
    assert sorted(phases) == sorted(PHASES[2:])
    [end] = story.receiver.named(names.SHUTDOWN_SPAN)
    assert {span.name for span in story.receiver.below(end)} >= {names.PHASE_PREFIX + "fence"}


def test_no_span_is_an_orphan_and_none_has_what_the_tables_do_not_list(story: Story) -> None:
    known = {span.span_id for span in story.receiver.spans} | {h["traceparent"][36:52] for h in REQUESTS}
    assert [span.name for span in story.receiver.spans if span.parent_id and span.parent_id not in known] == []
    assert [key for key, count in Counter(s.span_id for s in story.receiver.spans).items() if count > 1] == []
    for span in story.receiver.spans:
        row = names.SPANS[names.kind_of_span(span.name)]
        assert set(span.attributes) <= {*row.attributes, names.EXECUTOR, names.ERROR}, span
        assert (span.status == ERROR) == (names.ERROR in span.attributes), span


def test_metrics_arrive_with_their_units(story: Story) -> None:
    rare = {names.DROPPED}
    assert set(names.METRICS) - set(story.receiver.metrics) == rare
    for name, (kind, unit, points) in story.receiver.metrics.items():
        row = names.METRICS[name]
        assert (kind, unit) == ({"counter": "sum"}.get(row.kind, row.kind), row.unit)
        assert all(set(point) <= {*row.attributes, names.EXECUTOR} for point in points)
    causes = {point[names.CAUSE] for point in story.receiver.metrics[names.RESTARTS][2]}
    assert causes == {"process_exit"}
    ranks = {point[names.RANK] for point in story.receiver.metrics[names.RANK_COMPUTE][2]}
    assert ranks == {0, 1, 2, 3}


def test_nothing_secret_leaves(story: Story) -> None:
    """Neither what the engine computes on, nor settings, nor the text of its exceptions."""
    sent = b"\n".join(story.receiver.bodies)
    assert len(sent) > 10_000
    for what, secret in SECRETS.items():
        assert secret.encode() not in sent, what
        assert secret not in story.log, what
    assert str(Path.home()).encode() not in sent
    assert b"site-packages" not in sent


def test_log_lines_say_to_which_trace_they_belong(story: Story) -> None:
    incident = story.receiver.named(names.INCIDENT_SPAN)[0]
    lines = [line.split(" ", 5) for line in story.log.splitlines() if "incident 1" in line]
    assert len(lines) >= 2
    for _, trace_id, span_id, epoch, rank, _ in lines:
        assert (trace_id, span_id) == (incident.trace_id, incident.span_id)
        assert int(epoch) >= 1
        assert rank == "-1"
