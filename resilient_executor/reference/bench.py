"""The benchmark: what the executor costs, how fast it sees a death, and how long a death is felt.

One command prints a table and writes JSON. Everything is measured here and now, on an embedded Ray; what is compared is
measured in one run, in turns, because a shared machine is never the same for two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import ray
from rich.console import Console
from rich.table import Table

from resilient_executor import (
    ExecutorConfig,
    ExecutorUnhealthy,
    ResilientExecutor,
    ResilientExecutorError,
    RpcPolicy,
    StepLost,
    WorkerSpec,
)
from resilient_executor.reference import WORKER
from resilient_executor.reference.bench_memory import measure_memory
from resilient_executor.reference.bench_outage import measure_outage, measure_standbys
from resilient_executor.reference.bench_steps import EchoWorker, measure_step, own_graph

#: Calls of the reference engine that new workers must get again.
JOURNALLED: Final = dict.fromkeys(("determine_kv_capacity", "initialize_kv_cache"), RpcPolicy.JOURNAL)
_TP: Final = 2
_PP: Final = 2
#: Before a step that finds everybody asleep, in seconds; how often the graphs take turns; steps that nobody times.
_PAUSE_S: Final = 0.1
_TURNS: Final = 6
_STEPS_BEFORE: Final = 50
_PARTS: Final = ("steps", "idle", "supervision", "memory", "detection", "outage", "standbys")


def config_for(worker: WorkerSpec, **settings: Any) -> ExecutorConfig:
    """PP=2 x TP=2 on an embedded Ray, with a budget that the benchmark cannot spend."""
    defaults: dict[str, Any] = {
        "tensor_parallel_size": _TP,
        "pipeline_parallel_size": _PP,
        "address": "local",
        "max_restarts": 100_000,
        "backoff_initial_s": 0.001,
        "backoff_max_s": 0.001,
    }
    return ExecutorConfig(worker=worker, **{**defaults, **settings})


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by the nearest rank: of 30 values, p99 is the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


# -- the cost of doing nothing ----------------------------------------------------------------------------------------


def measure_idle(wakes: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """CPU of workers and driver without a graph and with an idle one; and steps after a pause, over steps in a row.

    The first step after a pause is slow in any case: nothing is in the processors' caches any more. So it is also
    measured over a graph whose readers never sleep, in turns.
    """
    import psutil  # of the test tools

    with ResilientExecutor(config_for(WorkerSpec(EchoWorker), eager_graph=False)) as executor:
        processes = [psutil.Process(), *(psutil.Process(worker.process.pid) for worker in executor.workers)]
        without = _cores(processes)
        _run_through(executor)
        time.sleep(1.0)
        idle = _cores(processes) - without
        paused: dict[bool, list[float]] = {True: [], False: []}
        row: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(_TURNS):
            for parking in (True, False) if turn % 2 == 0 else (False, True):
                with own_graph(executor, parking=parking) as step:
                    for _ in range(_STEPS_BEFORE):
                        step(0)
                    for number in range(wakes // _TURNS):
                        time.sleep(_PAUSE_S)
                        for samples in (paused[parking], row[parking]):
                            began = time.perf_counter()
                            step(number)
                            samples.append(time.perf_counter() - began)
    wakes_ms = {
        parking: [(took - statistics.median(row[parking])) * 1e3 for took in samples]
        for parking, samples in paused.items()
    }
    medians = {parking: statistics.median(samples) for parking, samples in wakes_ms.items()}
    progress(
        f"idle: {idle:.3f} cores more than without a graph; a step after {_PAUSE_S:g} s takes {medians[True]:.2f} ms "
        f"more than the next one, and {medians[False]:.2f} ms over a graph that spins"
    )
    return {
        "idle_cores": idle,
        "idle_cores_without_graph": without,
        "wake_p50_ms": medians[True],
        "wake_p99_ms": quantile(wakes_ms[True], 0.99),
        "wake_spinning_p50_ms": medians[False],
        "wake_spinning_p99_ms": quantile(wakes_ms[False], 0.99),
        "wake_added_p50_ms": (statistics.median(paused[True]) - statistics.median(paused[False])) * 1e3,
    }


def _cores(processes: Sequence[Any], seconds: float = 5.0) -> float:
    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - began)


class Idle:
    """An actor that does nothing, as a measure of what Ray itself does in each."""

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()


def measure_supervision(progress: Callable[[str], None], seconds: float = 20.0) -> dict[str, Any]:
    """Processor share of the supervisor and of the node's agent at rest, and of an actor that does nothing."""
    import psutil  # of the test tools

    with ResilientExecutor(config_for(WorkerSpec(EchoWorker))) as executor:
        _run_through(executor)
        assert executor._supervision is not None
        supervisor, agent = executor._supervision.actor_processes()
        idle = ray.remote(num_cpus=0, max_concurrency=1000)(Idle).remote()
        pids = {
            "supervisor": ray.get(supervisor.roster.remote(), timeout=60)["supervisor"].pid,
            "agent": ray.get(agent.identity.remote(), timeout=60).pid,
            "idle_actor": ray.get(idle.pid.remote(), timeout=60),
        }
        time.sleep(5.0)
        before, began = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}, time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        used = {name: sum(psutil.Process(pid).cpu_times()[:2]) - before[name] for name, pid in pids.items()}
    progress(", ".join(f"{name} {100 * cpu_s / took:.2f} % of a core" for name, cpu_s in used.items()))
    return {f"{name}_core_percent": 100 * cpu_s / took for name, cpu_s in used.items()}


# -- how fast a death is seen -----------------------------------------------------------------------------------------


def measure_detection(kills: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Kill a worker of an idle executor, then one in the middle of a step, ``kills`` times each."""
    idle, inflight = [], []
    with ResilientExecutor(config_for(WorkerSpec(EchoWorker))) as executor:
        for number in range(kills):
            rank = number % (_TP * _PP)
            _await_healthy(executor)
            began = _kill(executor, rank)
            while True:
                try:
                    executor.check_health()
                except ExecutorUnhealthy:
                    break
            idle.append(time.monotonic() - began)
            _await_healthy(executor)
            _run_through(executor)
            executor.execute_model(1.0)
            future: Future[Any] = executor.sample_tokens(None, non_block=True)
            time.sleep(0.05)
            began = _kill(executor, rank)
            try:
                future.result(60)
            except StepLost:
                inflight.append(time.monotonic() - began)
            else:
                raise RuntimeError(f"a step of 1 s survived the death of rank {rank}")
            progress(
                f"kill {number + 1} of {kills}: rank {rank}, idle {idle[-1] * 1e3:.0f} ms, in flight "
                f"{inflight[-1] * 1e3:.0f} ms"
            )
    return {
        "kills_each": kills,
        "detect_idle_p50_s": statistics.median(idle),
        "detect_idle_p99_s": quantile(idle, 0.99),
        "detect_inflight_p50_s": statistics.median(inflight),
        "detect_inflight_p99_s": quantile(inflight, 0.99),
    }


def _kill(executor: ResilientExecutor, rank: int) -> float:
    began = time.monotonic()
    os.kill(executor.workers[rank].process.pid, signal.SIGKILL)
    return began


def _await_healthy(executor: ResilientExecutor) -> None:
    executor._lifecycle.await_serving(120.0)
    executor.check_health()


def _run_through(executor: ResilientExecutor) -> None:
    """Let the engine's side learn of the loss, if it has not yet."""
    for _ in range(2):
        try:
            executor.execute_model(0)
            executor.sample_tokens(None)
            return
        except StepLost:
            continue


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), help="result file (default: %(default)s)"
    )
    parser.add_argument("--kills", type=int, default=30, help="kills, idle and in flight each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of raw graph and executor (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps in one round of either (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=3, help="cold starts (default: %(default)s)")
    parser.add_argument("--outages", type=int, default=9, help="deaths under the engine (default: %(default)s)")
    parser.add_argument("--recoveries", type=int, default=50, help="kills under memory (default: %(default)s)")
    parser.add_argument("--only", default=",".join(_PARTS), help="parts to run, comma-separated (default: %(default)s)")
    options = parser.parse_args(argv)
    parts = options.only.split(",")
    if unknown := set(parts) - set(_PARTS):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    if min(options.kills, options.rounds, options.starts) < 1 or options.outages < options.starts or options.steps < 10:
        parser.error("counts must be at least 1, --steps at least 10, and --outages at least --starts")
    console = Console()

    def progress(text: str) -> None:
        console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False)

    def configure(worker: WorkerSpec, **settings: Any) -> ExecutorConfig:
        return config_for(worker, rpc_policies=JOURNALLED, **settings)

    began = time.monotonic()
    measure: dict[str, Callable[[], dict[str, Any]]] = {
        "steps": lambda: measure_step(config_for, options.rounds, options.steps, progress),
        "idle": lambda: measure_idle(120, progress),
        "supervision": lambda: measure_supervision(progress),
        "memory": lambda: measure_memory(config_for, 10_000, options.recoveries, progress),
        "detection": lambda: measure_detection(options.kills, progress),
        "outage": lambda: measure_outage(configure, WorkerSpec(WORKER), options.outages, options.starts, progress),
    }
    measure["standbys"] = lambda: measure_standbys(configure, WorkerSpec(WORKER), options.starts, progress)
    results: dict[str, Any] = {}
    try:
        for part in _PARTS:
            if part in parts:
                results |= measure[part]()
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except ResilientExecutorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results |= {
        "python": platform.python_version(),
        "ray": ray.__version__,
        "cores": os.cpu_count(),
        "load_average_1m": os.getloadavg()[0],
        "took_s": time.monotonic() - began,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    console.print(_table(results))
    console.print(f"written to {options.json}")
    return 0


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="Reference executor, PP=2 x TP=2")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for key, value in results.items():
        if isinstance(value, dict):
            for name, part in value.items():
                table.add_row(f"{key}: {name}", f"{part:.3f}")
        else:
            table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
    return table


if __name__ == "__main__":
    sys.exit(main())
