"""What a driver keeps: memory and file descriptors over many steps, and over many recoveries."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from resilient_executor import ExecutorConfig, ResilientExecutor, StepLost, WorkerSpec
from resilient_executor.reference.bench_steps import EchoWorker

#: Before the first look: what is loaded and filled once belongs to nobody's growth.
_STEPS_BEFORE: Final = 500
_RECOVERIES_BEFORE: Final = 2
_REBUILD_S: Final = 180.0


def measure_memory(
    configure: Callable[..., ExecutorConfig], steps: int, recoveries: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Growth of the driver's resident memory and of its descriptors.

    Args:
        configure: makes the settings for a worker.
        steps: to run.
        recoveries: workers to kill, one after the other.
        progress: is told of each figure.
    """
    import psutil  # of the test tools

    process = psutil.Process()

    def held() -> tuple[float, int, int, float]:
        gc.collect()
        memory = process.memory_info()
        return memory.rss / 1e6, process.num_fds(), process.num_threads(), memory.shared / 1e6

    with ResilientExecutor(configure(WorkerSpec(EchoWorker))) as executor:
        _run(executor, _STEPS_BEFORE)
        first = held()
        _run(executor, steps)
        second = held()
        progress(f"{steps} steps: {second[0] - first[0]:+.2f} MB, {second[1] - first[1]:+d} descriptors")
        for number in range(_RECOVERIES_BEFORE):
            _recover(executor, number)
        third = held()
        for number in range(recoveries):
            _recover(executor, number)
            if number % 10 == 9:
                now = held()
                progress(
                    f"{number + 1} recoveries: {now[0] - third[0]:+.2f} MB, of it {now[3] - third[3]:+.2f} MB shared, "
                    f"{now[1] - third[1]:+d} descriptors"
                )
        fourth = held()
    return {
        f"driver_rss_growth_{_short(steps)}_steps_mb": second[0] - first[0],
        f"driver_fds_growth_{_short(steps)}_steps": second[1] - first[1],
        f"driver_rss_growth_{recoveries}_recoveries_mb": fourth[0] - third[0],
        # What Ray keeps of the channels of dead epochs is in its object store: see docs/architecture.md.
        f"driver_shared_growth_{recoveries}_recoveries_mb": fourth[3] - third[3],
        f"driver_fds_growth_{recoveries}_recoveries": fourth[1] - third[1],
        f"driver_threads_growth_{recoveries}_recoveries": fourth[2] - third[2],
    }


def _short(number: int) -> str:
    return f"{number // 1000}k" if number % 1000 == 0 else str(number)


def _run(executor: ResilientExecutor, steps: int) -> None:
    for number in range(steps):
        executor.execute_model(number)
        executor.sample_tokens(None)


def _recover(executor: ResilientExecutor, number: int) -> None:
    epoch, deadline = executor.epoch, time.monotonic() + _REBUILD_S
    os.kill(executor.workers[number % len(executor.workers)].process.pid, signal.SIGKILL)
    while executor.epoch == epoch:
        if time.monotonic() > deadline:
            raise RuntimeError("a killed worker was not noticed")
        time.sleep(0.01)
    while True:
        try:
            _run(executor, 5)
            return
        except StepLost:
            continue
