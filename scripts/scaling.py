"""What grows with the number of workers: measured from 8 to 1,024, printed as a table, drawn as an SVG.

Three ways to have many workers on a small machine:

* pure logic (ranks, who rings whom, the detectors' pass) runs on made-up facts;
* the real supervisor watches simulated workers, many in each of a few Ray actors, which answer heartbeats and calls;
* with ``--real``, real executors of up to so many real workers that do nothing; with ``--at-rest``, those of up to so
  many that never take a step.

    python scripts/scaling.py --json build/scaling.json --svg docs/img/scaling.svg --real 32 --at-rest 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from rich.console import Console
from rich.table import Table
from scaling_plot import SIZES, plot

from resilient_executor import (
    ExecutorConfig,
    ResilientExecutor,
    ResilientExecutorError,
    WorkerSpec,
    doorbell,
    measurements,
    protocol,
    ranks,
)
from resilient_executor.heart import Answer, Beat
from resilient_executor.processes import identify
from resilient_executor.protocol import Phase, ProcessIdentity, Progress, RpcEnvelope, WorkerInfo
from resilient_executor.reference.bench import Idle, config_for
from resilient_executor.reference.bench_steps import EchoWorker
from resilient_executor.supervisor.actor import Member, SupervisorActor
from resilient_executor.supervisor.progress import DriverView
from resilient_executor.supervisor.status import News, prometheus, status
from resilient_executor.supervisor.watch import Watch, WatchSettings

#: Workers on a node, and in a pipeline stage, of a made-up cluster.
_NODE: Final = 8
_HIVES: Final = 2


def made_up(size: int) -> list[WorkerInfo]:
    """Workers of nodes with eight devices each."""
    return [
        WorkerInfo(
            created_rank=rank,
            process=ProcessIdentity(1000 + rank, 1, f"node-{rank // _NODE:04d}"),
            node_ip=f"10.0.{rank // _NODE // 250}.{rank // _NODE % 250 + 1}",
            device_ids=(str(rank % _NODE),),
            actor_id=f"{rank:032x}",
        )
        for rank in range(size)
    ]


def config_of(size: int) -> ExecutorConfig:
    """TP within a node, PP over the nodes."""
    return ExecutorConfig(
        worker=WorkerSpec("unused"), tensor_parallel_size=_NODE, pipeline_parallel_size=size // _NODE, device_key="GPU"
    )


def progress_of(rank: int, epoch: int, steps: int = 100) -> Progress:
    """A worker's answer between two steps."""
    return Progress(rank, epoch, Phase.SERVING, -1, 0.0, steps, (), "", 1.0, steps, 0.01)


def milliseconds(work: Callable[[], object], least_s: float = 0.2) -> float:
    """The median time of ``work``."""
    times: list[float] = []
    end = time.perf_counter() + least_s
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def pure(size: int) -> dict[str, float]:
    """What needs no process: ranks, bells, detectors, the status page."""
    infos, config = made_up(size), config_of(size)

    def rank() -> None:
        ordered = ranks.order_ranks(infos, "node-0000")
        ranks.check_topology(infos, size)
        ranks.assignments(ordered, config=config, epoch=1, init_method="tcp://10.0.0.1:1234")

    settings = WatchSettings.from_config(config)
    watch = Watch(1, [(i.process, i.node_ip) for i in infos], settings, settings.step_deadline(), 0.0)
    clock = [0.0]

    def beat() -> None:
        clock[0] += settings.heartbeat_interval_s
        for number in range(size):
            watch.heard(progress_of(number, 1), clock[0], 0.001)

    def judge() -> None:
        assert watch.judge(clock[0] + 0.01) == ([], [])

    for _ in range(10):
        beat()
        judge()
    news = News("scaling", "HEALTHY", 1, "", 1, size, _NODE)
    devices = {info.created_rank: info.device_ids for info in infos}
    return {
        "ranks_ms": milliseconds(rank),
        "bells_ms": milliseconds(lambda: doorbell.plan(config, [i.process.node_id for i in infos], "node-0000")),
        "heard_ms": milliseconds(beat),
        "judge_ms": milliseconds(judge),
        "status_ms": milliseconds(lambda: prometheus(status(news, 0.0, watch, devices, clock[0]))),
    }


# -- a real supervisor over simulated workers -------------------------------------------------------------------------


class Hive:
    """Many workers in one process: answers for each of them, at once."""

    async def who(self) -> ProcessIdentity:
        """This process."""
        return identify(os.getpid(), ray.get_runtime_context().get_node_id())

    async def heartbeat(self, rank: int, epoch: int, grantor: str = "", number: int = 0, heard: int = 0) -> Progress:
        """As a worker between two steps."""
        return progress_of(rank, epoch)

    async def beat(
        self, beats: Mapping[ProcessIdentity, Beat], wait_s: float, *_: object
    ) -> tuple[float, dict[ProcessIdentity, Answer]]:
        """As the agent of a node, for workers whose pid is their rank."""
        answers = {p: Answer(beat.number, beat.grantor, progress_of(p.pid, beat.epoch)) for p, beat in beats.items()}
        return 0.0, answers

    async def exits(self, processes: Sequence[ProcessIdentity], known: int, timeout_s: float) -> list[object]:
        """As an agent's: nobody ends."""
        await asyncio.sleep(timeout_s)
        return []

    async def door(self) -> tuple[str, int]:
        """As an agent's."""
        return "127.0.0.1", 1

    async def silent(self, peers: object) -> list[str]:
        """As an agent's: all answer."""
        return []

    async def sentinel(self, rank: int) -> None:
        """Never returns."""
        await asyncio.Event().wait()

    async def run_rpc(self, rank: int, envelope: RpcEnvelope) -> bytes:
        """A call without work."""
        return measurements.encode_rpc_reply(0, 0, protocol.dumps(rank))


class _Method:
    def __init__(self, hive: Any, name: str, rank: int) -> None:
        self._hive, self._name, self._rank = hive, name, rank

    def remote(self, *arguments: Any) -> Any:
        return getattr(self._hive, self._name).remote(self._rank, *arguments)


class SimulatedHandle:
    """What the supervisor calls in place of a worker's actor handle."""

    def __init__(self, hive: Any, rank: int) -> None:
        self.heartbeat = _Method(hive, "heartbeat", rank)
        self.sentinel = _Method(hive, "sentinel", rank)
        self.run_rpc = _Method(hive, "run_rpc", rank)


def simulated(size: int, seconds: float) -> dict[str, float]:
    """The supervisor's processor time and its heartbeats' round trips; and a call to all workers."""
    make = {"num_cpus": 0, "max_concurrency": 10_000}
    hives = [ray.remote(**make)(Hive).remote() for _ in range(_HIVES)]
    here = ray.get(hives[0].who.remote(), timeout=120).node_id
    nodes = [here, *(f"node-{number:04}" for number in range(1, math.ceil(size / _NODE)))]
    agents = {node: hives[number % _HIVES] for number, node in enumerate(nodes)}
    supervisor = ray.remote(**make)(SupervisorActor).remote(WatchSettings.from_config(config_of(size)))
    members = [
        Member(
            rank,
            SimulatedHandle(hives[rank % _HIVES], rank),
            ProcessIdentity(rank, 1, nodes[rank // _NODE]),
            "127.0.0.1",
        )
        for rank in range(size)
    ]
    try:
        began = time.monotonic()
        own = psutil.Process(ray.get(supervisor.adopt.remote(1, members, agents), timeout=120).pid)
        adopt_s = time.monotonic() - began
        time.sleep(2.0)
        ray.get(supervisor.pulse.remote(), timeout=60)
        before, at = sum(own.cpu_times()[:2]), time.monotonic()
        trips: list[float] = []
        silences: list[float] = []
        while time.monotonic() < at + seconds:
            time.sleep(1.0)
            for some, silence_s, _ in ray.get(supervisor.pulse.remote(), timeout=60).values():
                trips += some
                silences.append(silence_s)
        took = time.monotonic() - at
        used = sum(own.cpu_times()[:2]) - before
        findings = ray.get(supervisor.findings.remote(1, 0, 0.0, DriverView()), timeout=60)
        arguments = protocol.dumps(((), {}))

        def call() -> None:
            handles = [member.handle for member in members]
            replies = [handle.run_rpc.remote(RpcEnvelope(1, 1, "nothing", arguments)) for handle in handles]
            for reply in ray.get(replies, timeout=60):
                measurements.rpc_reply_result(reply)

        return {
            "adopt_s": adopt_s,
            "beats_per_s": len(trips) / took,
            "beats_wanted_per_s": 2.0 * size,
            "supervisor_core_percent": 100 * used / took,
            "supervisor_us_per_beat": 1e6 * used / max(1, len(trips)),
            "supervisor_core_needed_percent": 100 * used / max(1, len(trips)) * 2.0 * size,
            "round_trip_p50_ms": 1e3 * statistics.median(trips),
            "round_trip_p99_ms": 1e3 * sorted(trips)[int(0.99 * len(trips))],
            "longest_silence_s": max(silences),
            "false_findings": float(len(findings)),
            "rpc_ms": milliseconds(call, 1.0),
        }
    finally:
        for actor in (supervisor, *hives):
            ray.kill(actor, no_restart=True)


# -- real executors ---------------------------------------------------------------------------------------------------


def doing_nothing(size: int, **settings: Any) -> ExecutorConfig:
    """Of an executor with so many workers that do nothing, as a square as far as that goes."""
    tp = 2 ** (size.bit_length() // 2)
    return config_for(
        WorkerSpec(EchoWorker),
        tensor_parallel_size=tp,
        pipeline_parallel_size=size // tp,
        starting_timeout_s=600.0,
        start_timeout_s=900.0,
        compiling_timeout_s=600.0,
        # Dozens of processes that start on two cores leave the supervisor none for many seconds.
        heartbeat_timeout_s=60.0,
        step_deadline_first_s=600.0,
        step_timeout_s=600.0,
        stage_buffer_bytes=1 << 14,  # PP + 1 of them for each rank: 64 ranks with 1 MiB each fill an embedded store
        **settings,
    )


def resting(executor: ResilientExecutor, seconds: float) -> dict[str, float]:
    """Processor shares of supervision, of a worker, and of an actor that does nothing; all of them at rest."""
    supervision = executor._supervision
    assert supervision is not None
    supervisor, agent = supervision.actor_processes()
    idle = ray.remote(num_cpus=0, max_concurrency=1000)(Idle).remote()
    node_agent = psutil.Process(ray.get(agent.identity.remote(), timeout=60).pid)
    watcher = psutil.Process(ray.get(supervisor.roster.remote(), timeout=60)["supervisor"].pid)
    nobody = psutil.Process(ray.get(idle.pid.remote(), timeout=60))
    workers = [psutil.Process(worker.process.pid) for worker in executor.workers]
    time.sleep(5.0)
    before = {process: sum(process.cpu_times()[:2]) for process in (watcher, node_agent, nobody, *workers)}
    at = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - at
    used = {process: sum(process.cpu_times()[:2]) - before[process] for process in before}
    ray.kill(idle)
    return {
        "supervisor_core_percent": 100 * used[watcher] / took,
        "agent_core_percent": 100 * used[node_agent] / took,
        "idle_actor_core_percent": 100 * used[nobody] / took,
        "worker_core_percent": 100 * statistics.mean(used[process] for process in workers) / took,
        "worker_rss_mb": statistics.mean(process.memory_info().rss for process in workers) / 1e6,
        "driver_rss_mb": psutil.Process().memory_info().rss / 1e6,
        "incidents": float(len(executor.incidents)),
    }


def at_rest(size: int) -> dict[str, float]:
    """Without a graph; leases are long here (``doing_nothing``), so that hardly one is renewed meanwhile."""
    with ResilientExecutor(doing_nothing(size, eager_graph=False)) as executor:
        return {"start_s": executor.start_seconds, **resting(executor, 20.0)}


def real(size: int) -> dict[str, float]:
    """An executor whose graph runs."""
    with ResilientExecutor(doing_nothing(size)) as executor:

        def step() -> None:
            executor.execute_model(0)
            executor.sample_tokens(None)

        return {
            "start_s": executor.start_seconds,
            **{f"start_{name}_s": seconds for name, seconds in executor.start_phases.items()},
            "step_ms": milliseconds(step, 2.0),
            "rpc_ms": milliseconds(lambda: executor.collective_rpc("nothing"), 2.0),
            **resting(executor, 10.0),
        }


# -- what is shown ----------------------------------------------------------------------------------------------------


def show(title: str, rows: Sequence[dict[str, float]]) -> None:
    """A table with a column for each size."""
    table = Table(title=title)
    table.add_column("what")
    for row in rows:
        table.add_column(f"{row['workers']:.0f}", justify="right")
    for key in rows[0]:
        if key != "workers":
            table.add_row(key, *(f"{row[key]:.3g}" if key in row else "" for row in rows))
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What grows with the number of workers.")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    parser.add_argument("--seconds", type=float, default=8.0, help="of watching, for each size (default: %(default)s)")
    parser.add_argument("--real", type=int, default=0, help="largest real executor; 0 for none (default: %(default)s)")
    parser.add_argument("--at-rest", type=int, default=0, help="the same, which only rest (default: %(default)s)")
    parser.add_argument("--only-real", action="store_true", help="nothing that is made up or simulated")
    options = parser.parse_args(argv)
    if options.only_real and options.svg is not None:
        parser.error("--svg is the plot of what is simulated, which --only-real leaves out")
    failed = False
    results: dict[str, Any] = {"cores": os.cpu_count(), "load_average_1m": os.getloadavg()[0]}

    def write() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=2) + "\n")

    if not options.only_real:
        rows = results["simulated"] = [{"workers": size, **pure(size)} for size in SIZES]
        ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False, logging_level="ERROR")
        try:
            for row in rows:
                row.update(simulated(int(row["workers"]), options.seconds))
        finally:
            ray.shutdown()
        show("made-up workers (ranks, bells, detectors) and simulated ones (supervisor, calls)", rows)
        if options.svg is not None:
            options.svg.write_text(plot(rows))
        write()
    for key, largest, measure, title in (
        ("at_rest", options.at_rest, at_rest, "real executors of workers without a graph"),
        ("real", options.real, real, "real executors of workers that do nothing"),
    ):
        results[key] = measured = []
        for size in (4, *SIZES):
            if size > largest:
                break
            try:
                measured.append({"workers": size, **measure(size)})
            except ResilientExecutorError as error:
                print(f"an executor of {size} workers: {error}", file=sys.stderr)
                failed = True
                break
            show(title, measured)
            write()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
