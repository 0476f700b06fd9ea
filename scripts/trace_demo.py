"""The demo against a real trace backend: Arize Phoenix on this machine takes the spans, and is asked what it has.

A worker is killed meanwhile. Then every trace is read back over Phoenix's REST interface and judged: for each sampled
step one trace, one span a rank, right parents, times that nest; for the kill one incident with every phase. Exit code 0
if all of it is so. With ``--pictures`` a headless Chromium photographs one step and the incident.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from resilient_executor.telemetry import names

HERE: Final = Path(__file__).resolve().parent
PROJECT: Final = "trace-demo"
PHASES: Final = ("fence", "tear_down", "place", "spawn", "rank", "initialise", "load", "replay", "compile", "warm_up")
#: Phoenix keeps microseconds.
ROUNDING_S: Final = 2e-6
START_S: Final = 150.0
ARRIVAL_S: Final = 60.0


@dataclass
class Span:
    """A span as the backend has it. Times are seconds since the Unix epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: float
    end: float
    error: bool
    attributes: dict[str, Any]

    def get(self, name: str) -> Any:
        return self.attributes.get(name)


class Phoenix:
    """A Phoenix of our own, on a free port of the loopback interface."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: Any) -> Any:
        asked = {key: value for key, value in query.items() if value is not None}
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(asked)}", timeout=30) as answer:
            return json.load(answer)

    def spans(self, project: str = PROJECT) -> list[Span]:
        """All spans of a project; empty while it does not exist yet."""
        found: list[Span] = []
        cursor = None
        while True:
            try:
                page = self.get(f"/v1/projects/{project}/spans", limit=500, cursor=cursor)
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return []
                raise
            found += map(read_span, page["data"])
            cursor = page.get("next_cursor")
            if not cursor:
                return found

    def await_end(self, project: str = PROJECT) -> list[Span]:
        """All spans, once the executor's last one has come and nothing follows."""
        deadline, before = time.monotonic() + ARRIVAL_S, -1
        while time.monotonic() < deadline:
            spans = self.spans(project)
            if len(spans) == before and any(span.name == names.SHUTDOWN_SPAN for span in spans):
                return spans
            before = len(spans)
            time.sleep(1.5)
        raise SystemExit(f"trace-demo: the executor's last span has not come within {ARRIVAL_S:g} s")

    def project_id(self, project: str = PROJECT) -> str:
        return str(self.get(f"/v1/projects/{project}")["data"]["id"])


def read_span(data: dict[str, Any]) -> Span:
    return Span(
        data["name"],
        data["context"]["trace_id"],
        data["context"]["span_id"],
        data["parent_id"],
        datetime.fromisoformat(data["start_time"]).timestamp(),
        datetime.fromisoformat(data["end_time"]).timestamp(),
        data["status_code"] == "ERROR",
        data["attributes"],
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def phoenix(program: Path) -> Iterator[Phoenix]:
    """Start Phoenix, wait until it answers, and end it."""
    if not program.exists():
        raise SystemExit(f"trace-demo: {program} is missing; make trace-demo installs it")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        environ |= {
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(port),
            "PHOENIX_GRPC_PORT": str(free_port()),
            "PHOENIX_WORKING_DIR": folder,
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }
        log = Path(folder) / "phoenix.log"
        with log.open("wb") as output:
            process = subprocess.Popen([program, "serve"], env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            await_answer(f"http://127.0.0.1:{port}/healthz", process, log)
            yield Phoenix(port)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def await_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"trace-demo: Phoenix did not start within {START_S:g} s:\n{log.read_text()[-2000:]}")


def run_demo(backend: Phoenix, options: argparse.Namespace) -> None:
    """The packaged demo, as a user would run it, with the standard variables set."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    environ |= {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{backend.url}/v1/traces",
        "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={PROJECT}",
        "OTEL_SERVICE_NAME": "resilient-executor-demo",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(options.ratio),
    }
    size = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", str(options.ranks // 2)]
    load = ["--kills", "1", "--requests", "3", "--max-tokens", "40", "--seed", "3", "--plain"]
    command = [sys.executable, "-m", "resilient_executor", "demo", *size, *load]
    done = subprocess.run(command, env=environ, timeout=options.demo_timeout, check=False)
    if done.returncode != 0:
        raise SystemExit(f"trace-demo: the demo ended with {done.returncode}")


class Judge:
    """Says what is wrong with the traces of one run."""

    def __init__(self, spans: list[Span], ranks: int) -> None:
        self.spans = spans
        self.ranks = ranks
        self.complaints: list[str] = []
        self._below: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in spans:
            if span.parent_id:
                self._below[span.trace_id, span.parent_id].append(span)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def below(self, span: Span) -> list[Span]:
        return sorted(self._below[span.trace_id, span.span_id], key=lambda one: one.start)

    def expect(self, truth: object, complaint: str) -> None:
        if not truth:
            self.complaints.append(complaint)

    def judge(self, steps: int = 10, foreign: Container[str | None] = ()) -> list[str]:
        """Look at everything: at least so many steps; parents of some spans may be ``foreign``, a client's."""
        known = {span.span_id for span in self.spans}
        orphans = [
            span.name
            for span in self.spans
            if span.parent_id and span.parent_id not in known and span.parent_id not in foreign
        ]
        self.expect(not orphans, f"spans without their parents: {orphans}")
        for span in self.spans:
            for one in self.below(span):
                inside = span.start - ROUNDING_S <= one.start <= one.end <= span.end + ROUNDING_S
                self.expect(inside, f"{one.name} is not within {span.name} (trace {span.trace_id})")
        self._steps(steps)
        self._incident()
        for name in (names.START_SPAN, names.SHUTDOWN_SPAN):
            self.expect(len(self.named(name)) == 1, f"{len(self.named(name))} spans {name}")
        return self.complaints

    def _steps(self, least: int) -> None:
        steps = self.named(names.STEP_SPAN)
        self.expect(len(steps) >= least, f"only {len(steps)} steps were sampled")
        traces = {span.trace_id for span in steps}
        self.expect(len(traces) == len(steps), f"{len(steps)} steps are in {len(traces)} traces")
        for step in steps:
            if step.get(names.OUTCOME) == "not_sent":
                continue
            ranks = [span.get(names.RANK) for span in self.below(step)]
            right = sorted(ranks) == list(range(self.ranks))
            self.expect(right, f"step {step.get(names.STEP)} has spans of ranks {ranks}")
        lost = [step for step in steps if step.get(names.OUTCOME) == "lost"]
        killed = [s for step in lost for s in self.below(step) if s.get(names.OUTCOME) == "killed"]
        self.expect(not lost or killed, "no lost step says which rank was killed")

    def _incident(self) -> None:
        incidents = self.named(names.INCIDENT_SPAN)
        self.expect(len(incidents) == 1, f"{len(incidents)} incidents")
        for incident in incidents:
            self.expect(incident.get(names.CAUSE_SIGNAL) == "SIGKILL", f"the cause is {incident.get(names.CAUSE)}")
            found = [span.name for span in self.below(incident)]
            wanted = [names.DETECTION_SPAN, *(names.PHASE_PREFIX + phase for phase in PHASES), names.READMISSION_SPAN]
            self.expect(found == [*wanted, names.FIRST_STEP_SPAN], f"the incident's spans are {found}")
            for phase in self.below(incident):
                if phase.name == names.PHASE_PREFIX + "load":
                    ours = [span for span in self.below(phase) if span.name == names.WORKER_PREFIX + "load_model"]
                    loads = sorted(span.get(names.RANK) for span in ours)
                    self.expect(loads == list(range(self.ranks)), f"load_model ran on ranks {loads}")


def run_vllm(backend: Phoenix, python: Path) -> list[str]:
    """Three requests on a vLLM engine with its own tracing on, a worker killed under them; returns complaints."""
    project = "trace-demo-vllm"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    environ |= {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={project}",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "tests" / "vllm"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = HERE.parent / "tests" / "vllm" / "tracing_main.py"
    done = subprocess.run([python, script, backend.url], env=environ, timeout=400, check=False, capture_output=True)
    if done.returncode != 0:
        return [f"the vLLM run ended with {done.returncode}: {done.stderr.decode()[-2000:]}"]
    judge = Judge(backend.await_end(project), 2)
    requests = judge.named("llm_request")
    judge.expect(len(requests) == 3, f"{len(requests)} request spans of vLLM's")
    for request in requests:
        ours = [span for span in judge.named(names.REQUEST_SPAN) if span.trace_id == request.trace_id]
        beside = ours and {span.parent_id for span in ours} == {request.parent_id}
        judge.expect(beside, f"no span of ours beside vLLM's in trace {request.trace_id}")
    clients = {request.parent_id for request in requests}
    judge.judge(steps=5, foreign=clients)
    print(f"vLLM: {len(judge.spans)} spans, {len(judge.named(names.STEP_SPAN))} steps, {len(requests)} requests")
    return judge.complaints


def take_pictures(backend: Phoenix, judge: Judge, folder: Path) -> None:
    """Photograph the page of one step's trace, and the incident's."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("trace-demo: no Chromium; apt-get install chromium")
    done = [step for step in judge.named(names.STEP_SPAN) if step.get(names.OUTCOME) == "ok"]
    usual = sorted(done, key=lambda step: step.end - step.start)[len(done) // 2]
    folder.mkdir(parents=True, exist_ok=True)
    project = backend.project_id()
    # A rank's page shows its attributes beside the tree of the whole trace.
    incident = judge.named(names.INCIDENT_SPAN)[0]
    for name, span, height in (("trace-step", judge.below(usual)[0], 900), ("trace-incident", incident, 2100)):
        url = f"{backend.url}/projects/{project}/traces/{span.trace_id}?selectedSpanNodeId={node_id(backend, span)}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size=1500,{height}"]
        flags += ["--virtual-time-budget=20000", f"--screenshot={(folder / name).resolve()}.png", url]
        subprocess.run([browser, *flags], timeout=120, check=True, capture_output=True)
        print(f"picture: {folder / name}.png")


def node_id(backend: Phoenix, span: Span) -> str:
    """Phoenix's own id of a span."""
    page = backend.get(f"/v1/projects/{PROJECT}/spans", limit=1, span_id=span.span_id)
    return str(page["data"][0]["id"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--phoenix", type=Path, default=Path(".venv-phoenix/bin/phoenix"), help="the program")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4), help="worker processes")
    parser.add_argument("--ratio", type=float, default=0.3, help="share of steps that are sampled")
    parser.add_argument("--vllm", type=Path, default=None, help="a Python with vLLM, for a run of vLLM, too")
    parser.add_argument("--pictures", type=Path, default=None, help="folder for pictures")
    parser.add_argument("--demo-timeout", type=float, default=300.0, help="seconds for the demo")
    options = parser.parse_args(argv)
    began = time.monotonic()
    with phoenix(options.phoenix) as backend:
        print(f"Phoenix takes spans after {time.monotonic() - began:.0f} s", flush=True)
        run_demo(backend, options)
        judge = Judge(backend.await_end(), options.ranks)
        complaints = judge.judge()
        if options.vllm is not None:
            complaints += run_vllm(backend, options.vllm)
        if options.pictures is not None and not complaints:
            take_pictures(backend, judge, options.pictures)
    steps = judge.named(names.STEP_SPAN)
    print(f"{len(judge.spans)} spans: {len(steps)} steps, {len(judge.named(names.INCIDENT_SPAN))} incident")
    for complaint in complaints:
        print(f"  {complaint}")
    print(f"trace-demo {'FAILED' if complaints else 'passed'} after {time.monotonic() - began:.0f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
