"""Tokens per second against vLLM's own executor, both engines up at once and measured in turns of less than a second.

The machine's speed changes by a fifth from minute to minute, so that engines measured one after the other say nothing.
Here each measurement has its counterpart right beside it, and what is reported is the median of the pairs' ratios. The
stock engine's processes spin while they have nothing to do; they are stopped (SIGSTOP) while ours is measured. Ours
sleeps by itself; its heartbeats go on while stock is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

READY: Final = "READY"
_RATE: Final = "RATE "
#: Tokens for each request that are generated before each measurement.
_WARM_UP: Final = 16
#: For an engine to start, and for one measurement, in seconds.
_START_S: Final = 180.0
_TURN_S: Final = 60.0


class Contestant:
    """An engine in a process of its own, which measures whenever it is told to.

    Args:
        command: runs :func:`serve` in the end.
        env: of the process.
        spins: whether it must be stopped while another one is measured.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], spins: bool) -> None:
        self._spins = spins
        self.error = ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        if self._read(_START_S) != READY:
            self._fail()
        self._pause()

    def measure(self) -> float | None:
        """Tokens per second of one generation; None once it has failed."""
        if self.error:
            return None
        assert self._process.stdin is not None
        if self._spins:
            os.killpg(self._process.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._read(_TURN_S)
        if not line:
            self._fail()
            return None
        self._pause()
        return float(line)

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.communicate(timeout=_TURN_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _pause(self) -> None:
        if self._spins and not self.error:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def _read(self, timeout_s: float) -> str:
        """The next line that is ours, or "" when there is none in time: it is killed then, which ends the read."""
        assert self._process.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(self._process.pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            for line in self._process.stdout:
                if line.startswith((READY, _RATE)):
                    return line.removeprefix(_RATE).strip()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        return ""

    def _fail(self) -> None:
        assert self._process.stderr is not None
        lines = [line for line in self._process.stderr if "Error" in line]
        self.error = (lines or ["it gave no result"])[-1].strip()[:200]


def serve(generate: Callable[[int], float], requests: int, tokens: int) -> None:
    """In the child: one measurement for each line of the standard input.

    Args:
        generate: runs one generation of so many tokens for each request; returns the seconds that it took.
        requests: of one generation.
        tokens: for each request.
    """
    generate(tokens)
    print(READY, flush=True)
    for _ in sys.stdin:
        generate(_WARM_UP)  # nobody is measured while the caches are still another's
        print(f"{_RATE}{requests * tokens / generate(tokens)}", flush=True)


def compare(stock: Contestant, ours: Contestant, pairs: int, topology: str) -> dict[str, Any]:
    """Measure in turns; the results for the file, under names that end in the topology's."""
    rates: dict[str, list[float]] = {"stock": [], "ours": []}
    ratios: list[float] = []
    contestants = {"stock": stock, "ours": ours}
    for number in range(pairs):
        order = ("stock", "ours") if number % 2 == 0 else ("ours", "stock")
        pair = {name: contestants[name].measure() for name in order}
        for name, rate in pair.items():
            if rate is not None:
                rates[name].append(rate)
        if pair["stock"] is not None and pair["ours"] is not None:
            ratios.append(pair["ours"] / pair["stock"])
        time.sleep(0.05)
    results: dict[str, Any] = {
        f"throughput_{name}_{topology}": round(statistics.median(measured), 1) if measured else None
        for name, measured in rates.items()
    }
    results[f"throughput_ratio_{topology}"] = round(statistics.median(ratios), 3) if ratios else None
    if len(ratios) >= 4:
        lower, _, upper = statistics.quantiles(ratios, n=4)
        results[f"throughput_ratio_{topology}_quartiles"] = [round(lower, 3), round(upper, 3)]
    for name, contestant in contestants.items():
        if contestant.error:
            results[f"throughput_error_{name}_{topology}"] = contestant.error
    return results
