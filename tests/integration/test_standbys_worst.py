"""Standbys that are not what they seem at the moment when a rank needs one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import leaks
import pytest
from probe_executor import ExecutorFactory, await_epoch, run_step, within
from test_standbys import pids_of_standbys, ready

from resilient_executor import ResilientExecutor, standbys

pytestmark = pytest.mark.timeout(120)


def kill(executor: ResilientExecutor) -> None:
    os.kill(executor.workers[0].process.pid, signal.SIGKILL)


def test_a_frozen_one_is_passed_over_and_ended(make_executor: ExecutorFactory) -> None:
    """Without a look at it, the rebuild would wait for it as long as it may take: an hour under vLLM."""
    executor = make_executor(warm_standbys=1, start_timeout_s=60.0)
    ready(executor, 1)
    [frozen] = pids_of_standbys(executor)
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    kill(executor)
    await_epoch(executor, 2)
    assert time.monotonic() - began < 30
    assert executor.epoch == 2
    assert executor.incidents[-1].standbys == 0
    within(10.0, lambda: leaks.alive([frozen]) == [], "Ray's own kill does not end a frozen process")


def test_one_whose_devices_cannot_be_held_does_not_serve(
    make_executor: ExecutorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a worker without a device, without a lease, and with no rank."""

    class Doomed:
        def devices(self) -> tuple[str, ...]:
            os._exit(3)

    executor = make_executor(device_key="GPU", warm_standbys=1)
    ready(executor, 1)
    monkeypatch.setattr(standbys, "DeviceHolder", Doomed)
    kill(executor)
    await_epoch(executor, 3)
    assert executor.incidents[-1].epochs_tried == [2, 3]
    assert run_step(executor, {"x": 1})
    [worker] = executor.workers
    assert (worker.created_rank, len(worker.device_ids)) == (0, 1)


def _threads(_: Any) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"devices_per_worker": 4.0}, marks=pytest.mark.long),
        {"devices_per_worker": 0.5},
        pytest.param({"device_key": "GPU"}, marks=pytest.mark.long),
    ],
)
def test_it_has_as_many_threads_as_a_cold_one(make_executor: ExecutorFactory, settings: dict[str, Any]) -> None:
    """Another number would add up in another order, and change tokens."""
    executor = make_executor(warm_standbys=1, **settings)
    cold = executor.collective_rpc(_threads)
    ready(executor, 1)
    kill(executor)
    await_epoch(executor, 2)
    assert executor.incidents[-1].standbys == 1
    assert executor.collective_rpc(_threads) == cold
