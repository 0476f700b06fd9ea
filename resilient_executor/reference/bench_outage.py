"""How long a death is felt: cold, and with warm standbys, in turns."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from resilient_executor import ExecutorConfig, ResilientExecutor, WorkerSpec
from resilient_executor.reference.engine import ReferenceEngine
from resilient_executor.reference.request import SamplingParams

#: For all standbys to be there before the next death, in seconds.
_STANDBYS_S: Final = 120.0


def measure_outage(
    configure: Callable[..., ExecutorConfig],
    worker: WorkerSpec,
    kills: int,
    starts: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Cold starts of the reference workers, and deaths under their engine: cold and with standbys, in turns.

    Args:
        configure: makes the settings for a worker.
        worker: the reference engine's worker.
        kills: deaths of each kind, in all.
        starts: executors of each kind.
        progress: is told of each figure.
    """
    starts_s: list[float] = []
    start_phases: dict[str, list[float]] = {}
    outages: dict[str, list[float]] = {"cold": [], "warm": []}
    phases: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    for start in range(starts):
        for kind in ("cold", "warm") if start % 2 == 0 else ("warm", "cold"):
            with ResilientExecutor(configure(worker, warm_standbys=0 if kind == "cold" else "every_rank")) as executor:
                starts_s.append(sum(executor.start_phases.values()))
                for name, seconds in executor.start_phases.items():
                    start_phases.setdefault(name, []).append(seconds)
                progress(f"start {len(starts_s)} of {2 * starts}: {starts_s[-1]:.2f} s")
                engine, world_size = ReferenceEngine(executor), len(executor.workers)
                for number in range(kills // starts):
                    if kind == "warm":
                        _await_standbys(executor, world_size)
                    outages[kind].append(_outage(executor, engine, rank=number % world_size))
                    incident = executor.incidents[-1]
                    for name, seconds in incident.phases.items():
                        phases[kind].setdefault(name, []).append(seconds)
                    progress(
                        f"{kind} outage {len(outages[kind])} of {kills}: {outages[kind][-1]:.2f} s from death to "
                        f"the next token, {incident.standbys} ranks from standbys"
                    )
    start_s = statistics.median(starts_s)
    cold_s, warm_s = statistics.median(outages["cold"]), statistics.median(outages["warm"])
    return {
        "cold_start_s": start_s,
        "cold_start_phases_s": _medians(start_phases),
        "outage_p50_s": cold_s,
        "outage_max_s": max(outages["cold"]),
        "outage_over_cold_start": cold_s / start_s,
        "outage_phases_s": _medians(phases["cold"]),
        "outage_warm_p50_s": warm_s,
        "outage_warm_max_s": max(outages["warm"]),
        "outage_warm_phases_s": _medians(phases["warm"]),
        "outage_warm_over_cold": warm_s / cold_s,
    }


def _medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def _await_standbys(executor: ResilientExecutor, number: int) -> None:
    deadline = time.monotonic() + _STANDBYS_S
    while executor.standbys["ready"] < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not {number} warm standbys within {_STANDBYS_S:g} s: {executor.standbys}")
        time.sleep(0.1)


def _outage(executor: ResilientExecutor, engine: ReferenceEngine, rank: int) -> float:
    """Seconds from the kill of a serving worker to the next token that reaches the engine's caller."""
    engine.add_request("It was a fine evening, and", SamplingParams(max_tokens=200, ignore_eos=True))
    killed: float | None = None
    epoch = executor.epoch
    took: float | None = None
    for tokens, event in enumerate(engine.stream(), start=1):
        if event.error is not None:
            raise event.error
        if tokens == 20:
            killed = time.monotonic()
            os.kill(executor.workers[rank].process.pid, signal.SIGKILL)
        if killed is not None and took is None and executor.epoch > epoch:
            took = time.monotonic() - killed
            engine.abort(event.request_id)
    if took is None:
        raise RuntimeError("the kill was not felt: the request ended before it")
    return took


# -- what standbys cost -----------------------------------------------------------------------------------------------

#: Before a standby is lost, steps are timed for so many seconds.
_BEFORE_S: Final = 4.0


def measure_standbys(
    configure: Callable[..., ExecutorConfig], worker: WorkerSpec, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Memory of a warm standby, and the steps of a serving engine while a lost one is replaced, over those before.

    Args:
        configure: makes the settings for a worker.
        worker: the reference engine's worker.
        rounds: standbys to lose.
        progress: is told of each figure.
    """
    import psutil  # of the test tools

    took_s: list[float] = []
    medians: list[float] = []
    tails: list[float] = []
    with ResilientExecutor(configure(worker, warm_standbys="every_rank")) as executor:
        engine, number = ReferenceEngine(executor), len(executor.workers)
        _await_standbys(executor, number)
        assert executor._recovery is not None
        standbys = executor._recovery.standbys
        memory = [
            psutil.Process(standby.process.pid).memory_full_info() for standby in standbys._standbys if standby.process
        ]
        for _ in range(rounds):
            _await_standbys(executor, number)
            before = _gaps(engine, _after(_BEFORE_S))
            lost = standbys._standbys[0].process
            assert lost is not None
            began = time.monotonic()
            os.kill(lost.pid, signal.SIGKILL)
            while executor.standbys["ready"] == number:
                time.sleep(0.01)
            during = _gaps(engine, lambda: executor.standbys["ready"] == number)
            took_s.append(time.monotonic() - began)
            medians.append(statistics.median(during) / statistics.median(before))
            tails.append(_p99(during) / _p99(before))
            progress(f"refill: {took_s[-1]:.1f} s; steps x {medians[-1]:.2f}, their p99 x {tails[-1]:.2f}")
    return {
        "standby_rss_mb": statistics.mean(one.rss for one in memory) / 1e6,
        "standby_own_mb": statistics.mean(one.uss for one in memory) / 1e6,
        "refill_s": statistics.median(took_s),
        "refill_step_ratio": statistics.median(medians),
        "refill_step_ratio_max": max(medians),
        "refill_step_p99_ratio": statistics.median(tails),
    }


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _gaps(engine: ReferenceEngine, over: Callable[[], bool]) -> list[float]:
    """Seconds between tokens of one request after the other, until it is over."""
    gaps: list[float] = []
    while not over():
        engine.add_request("It was a fine evening, and", SamplingParams(max_tokens=50, ignore_eos=True))
        last: float | None = None
        for event in engine.stream():
            if event.error is not None:
                raise event.error
            now = time.monotonic()
            gaps += [now - last] if last is not None else []
            last = now
    return gaps


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]
