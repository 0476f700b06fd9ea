"""What telemetry costs: off, on, and in a real step; measured in turns, since a shared machine is never the same twice.

``off_us``: a step through the executor's own code (pipeline, envelope, worker; Ray replaced by a function call), less
the same through copies of that code without any telemetry in it.
``on_us``: what a sampled step adds on the path of the process that pays more, driver or worker, while the background
thread builds the spans and sends them to a backend on this machine.
``on_ratio_10ms``: real steps of 10 ms on real workers, every one sampled, over the same with telemetry off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from resilient_executor import ExecutorConfig, ResilientExecutor, WorkerSpec, protocol
from resilient_executor.inflight import InflightStep, StepFuture
from resilient_executor.measurements import StepFacts
from resilient_executor.pipeline import StepPipeline
from resilient_executor.protocol import RankAssignment, StepKind
from resilient_executor.reference.bench_steps import EchoWorker
from resilient_executor.telemetry.recorder import Telemetry
from resilient_executor.telemetry.setup import open_pipes
from resilient_executor.telemetry.steps import StepTrace
from resilient_executor.worker import WorkerActor

_STEP_S: Final = 0.01
#: Nobody renews the microbenchmark's leases.
_LEASE_S: Final = 3600.0
#: Between two timed steps of the microbenchmark: a real driver waits for its workers most of the time.
_PAUSE_S: Final = 0.001

_SINK: Final = """
import http.server, sys
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class _Engine:
    """An engine's worker that takes no time."""

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        return scheduler_output


def _actor(cls: type[WorkerActor]) -> WorkerActor:
    actor = cls(0, _LEASE_S, _LEASE_S)
    actor._epoch, actor._worker = 1, _Engine()
    actor._assignment = RankAssignment(0, 1, 0, 0, 1, 0, 1, 1, True, True, "")
    return actor


class _BareActor(WorkerActor):
    """``run_step`` without telemetry in it."""

    def run_step(self, message: Any, serialize: bool = False) -> Any:
        request, intermediate = (message, None) if isinstance(message, bytes) else message
        epoch, step_id, kind, _, payload = protocol.decode_request(request)
        if epoch != self._epoch:
            raise AssertionError
        self._step_began = time.monotonic()
        self._step_in_hand = step_id
        try:
            if self._graph_thread != threading.get_ident():
                self._bind_thread()
            result = None
            if kind == StepKind.STEP:
                scheduler_output, grammar_output = pickle.loads(payload)
                result = self._worker.execute_stage(scheduler_output, grammar_output, intermediate)
            assignment = self._assignment
            assert assignment is not None
            return protocol.encode_reply(epoch, step_id, self._rank, result if assignment.wants_output else None)
        finally:
            now = time.monotonic()
            while not self._lease.valid(now):
                raise AssertionError
            self._slowest_step_s = max(self._slowest_step_s, now - self._step_began)
            self._steps_done += 1
            self._last_step = step_id
            self._step_in_hand = -1


class _Graph:
    """Calls the worker in place of Ray's graph, and knows how long that took."""

    by_wire, crosses_nodes = True, False

    def __init__(self, actor: WorkerActor) -> None:
        self._actor = actor
        self.worker_ns = 0

    def submit(self, request: bytes) -> list[Any]:
        began = time.perf_counter_ns()
        reply = self._actor.run_step(request)
        self.worker_ns = time.perf_counter_ns() - began
        return [reply]

    def fetch(self, references: list[Any]) -> list[Any]:
        return references

    def discard(self, references: list[Any]) -> None:
        pass


class _BarePipeline(StepPipeline):
    """Submission and reading without telemetry in them."""

    def submit(
        self,
        value: Any,
        future: StepFuture | None = None,
        kind: StepKind = StepKind.STEP,
        trace: StepTrace | None = None,
    ) -> InflightStep:
        body = protocol.request_body(value)
        step = InflightStep(future, kind, None, len(body))
        while True:
            while len(self._inflight) >= self._limit and not self._condemned:
                raise AssertionError
            with self._submit_lock:
                if self._condemned:
                    raise AssertionError
                if len(self._inflight) >= self._limit:
                    raise AssertionError
                self._send(step, 0, body)
                return step

    def _send(self, step: InflightStep, context_length: int, body: bytes) -> None:
        if self._inflight and self._graph.by_wire:
            raise AssertionError
        try:
            step.step_id = self.sent_step = next(self._step_ids)
            step.references = self._graph.submit(
                protocol.encode_request(self.epoch, step.step_id, step.kind, context_length, body)
            )
        except Exception:  # the real one has a handler here, too, whose cost belongs to both sides
            raise
        self._inflight.append(step)
        if step.future is not None:
            step.future.attach(self, step)
        if self.condemned:
            raise AssertionError

    def _read_next(self) -> InflightStep | None:
        if not self._calm.is_set():
            raise AssertionError
        if self._condemned or not self._inflight:
            raise AssertionError
        step = self._inflight[0]
        error: Exception | None = None
        replies: list[bytes] = []
        try:
            replies = self._graph.fetch(step.references)
            self._check(step, replies)
        except Exception:  # as above
            raise
        if self.condemned:
            raise AssertionError
        self._inflight.popleft()
        step.references = None
        if error is None and step.kind == StepKind.STEP:
            step.output = self._output_of(replies)
        step.error = error
        step.done = True
        return step


Path_ = Callable[[int], tuple[int, int]]


def _path(actor: WorkerActor, pipeline_class: type[StepPipeline], telemetry: Telemetry | None, bare: bool) -> Path_:
    """A function that runs one step, and returns the nanoseconds that driver and worker took."""
    config = ExecutorConfig(worker=WorkerSpec("unused"))
    graph = _Graph(actor)
    calm = threading.Event()
    calm.set()
    # Without Ray, and without a judge.
    pipeline = pipeline_class(graph, 1, config, None, itertools.count(), calm)  # type: ignore[arg-type]
    value = ({"requests": list(range(8))}, None)

    class Front:
        """The front door's share, as in ``ResilientExecutor``."""

        _telemetry = telemetry
        _called_ns = 0

    front = Front()

    def traced(number: int) -> tuple[int, int]:
        began = time.perf_counter_ns()
        if front._telemetry is not None:
            front._called_ns = time.time_ns()
        traces = front._telemetry
        trace = traces.begin_step(value, front._called_ns) if traces is not None else None
        pipeline.run(value, trace=trace)
        return time.perf_counter_ns() - began - graph.worker_ns, graph.worker_ns

    def plain(number: int) -> tuple[int, int]:
        began = time.perf_counter_ns()
        pipeline.run(value)
        return time.perf_counter_ns() - began - graph.worker_ns, graph.worker_ns

    return plain if bare else traced


def _micro(telemetry: Telemetry, rounds: int) -> dict[str, float]:
    """The medians of the differences of steps that were timed right after one another, in microseconds."""
    paths = {
        "bare": _path(_actor(_BareActor), _BarePipeline, None, bare=True),
        "off": _path(_actor(WorkerActor), StepPipeline, None, bare=False),
        "on": _path(_actor(WorkerActor), StepPipeline, telemetry, bare=False),
    }
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in paths}
    order = list(paths)
    for number in range(rounds):
        for name in order[number % 3 :] + order[: number % 3]:
            paths[name](number)  # warm: the caches belong to this one now
            times[name].append(paths[name](number))
        time.sleep(_PAUSE_S)

    def median(name: str, part: int) -> float:
        return statistics.median(one[part] for one in times[name]) / 1e3

    def added(name: str, part: int) -> float:
        return median(name, part) - median("bare", part)

    return {
        "off_us": round(added("off", 0) + added("off", 1), 3),
        "on_us": round(max(added("on", 0), added("on", 1)), 2),
        "on_driver_us": round(added("on", 0), 2),
        "on_worker_us": round(added("on", 1), 2),
        "on_driver_p99_us": round(sorted(one[0] for one in times["on"])[int(rounds * 0.99)] / 1e3, 1),
        "bare_us": round(median("bare", 0) + median("bare", 1), 2),
    }


def _real(blocks: int, steps: int) -> dict[str, float]:
    """Steps of 10 ms on two real workers, in turns with telemetry and without."""
    config = ExecutorConfig(
        worker=WorkerSpec(EchoWorker),
        tensor_parallel_size=2,
        address="local",
        describe_step=lambda _: StepFacts(tokens=8, requests=8),
    )
    with ResilientExecutor(config) as executor:
        telemetry = executor._telemetry
        assert telemetry is not None
        medians: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * blocks + 2):
            on = number % 2 == 1
            executor._telemetry = telemetry if on else None
            took = [_timed(executor) for _ in range(steps)]
            if number >= 2:  # the first of each pays for first uses
                medians[on].append(statistics.median(took))
        executor._telemetry = telemetry
        dropped = telemetry.dropped
    ratios = [on / off for on, off in zip(medians[True], medians[False], strict=True)]
    return {
        "on_ratio_10ms": round(statistics.median(ratios), 4),
        "step_off_ms": round(statistics.median(medians[False]) * 1e3, 3),
        "step_on_ms": round(statistics.median(medians[True]) * 1e3, 3),
        "dropped": sum(dropped.values()),
    }


def _timed(executor: ResilientExecutor) -> float:
    began = time.perf_counter()
    executor.execute_model(_STEP_S)
    executor.sample_tokens(None)
    return time.perf_counter() - began


@contextmanager
def _backend() -> Any:
    """A process that takes OTLP and forgets it, named in the environment."""
    with subprocess.Popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{sink.stdout.readline().strip()}"
        try:
            yield
        finally:
            del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
            sink.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What telemetry costs.")
    parser.add_argument("--json", type=Path, default=None, help="where to write the results")
    parser.add_argument("--rounds", type=int, default=3000, help="steps of the microbenchmark")
    parser.add_argument("--blocks", type=int, default=15, help="pairs of blocks of real steps")
    parser.add_argument("--steps", type=int, default=50, help="steps in a block")
    options = parser.parse_args(argv)
    with _backend():
        pipes = open_pipes()
        assert pipes is not None
        telemetry = Telemetry(pipes, ExecutorConfig(worker=WorkerSpec("unused")))
        results = _micro(telemetry, options.rounds)
        telemetry.close(10)
        results |= _real(options.blocks, options.steps)
    for name, value in results.items():
        print(f"{name:18} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
