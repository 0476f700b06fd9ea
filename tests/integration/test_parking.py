"""An idle graph costs nothing, wakes at once, and is watched as a busy one is."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from probe_executor import await_epoch, run_step, serving, within

from resilient_executor import CauseKind, ResilientExecutor
from resilient_executor.heart import address_of
from resilient_executor.readers import install

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=[(2, 2)], ids=["tp2pp2"])
def executor(ray_cluster: str, request: pytest.FixtureRequest) -> Iterator[ResilientExecutor]:
    tp, pp = request.param
    with serving(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_restarts=1000,
        backoff_initial_s=0.01,
        backoff_max_s=0.01,
    ) as running:
        yield running


def workers_of(executor: ResilientExecutor) -> list[psutil.Process]:
    return [psutil.Process(worker.process.pid) for worker in executor.workers]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def bells(without: str = "nothing") -> set[str]:
    """The addresses at which something of ours listens on this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.rsplit("@", 1)[-1] for line in lines if "@resilient-executor-" in line and without not in line}


def settle(executor: ResilientExecutor) -> None:
    """Run a step, and let everybody fall asleep."""
    run_step(executor, 0)
    time.sleep(0.2)


def test_rays_reader_is_the_one_that_we_know() -> None:
    assert install(), f"Ray {ray.__version__} reads its channels in another way: idle graphs spin"


def test_an_idle_graph_costs_no_core_and_wakes_at_once(executor: ResilientExecutor) -> None:
    settle(executor)
    processes = [psutil.Process(), *workers_of(executor)]
    before, began = cpu_s(processes), time.monotonic()
    time.sleep(2.0)
    cores = (cpu_s(processes) - before) / (time.monotonic() - began)
    assert cores < 0.3, "a single spinning reader takes all that it gets"
    supervisor = executor._supervision.actor_processes()[0]  # type: ignore[union-attr]  # it has been started
    ranks = ray.get(supervisor.roster.remote(), timeout=30)["status"]["ranks"]
    assert [rank["doing"].split(" after ")[0] for rank in ranks] == ["asleep"] * 4
    times = []
    for number in range(20):
        time.sleep(random.uniform(0.0, 0.1))
        began = time.monotonic()
        run_step(executor, number)
        times.append(time.monotonic() - began)
    assert statistics.median(times) < 0.1, "a lost wake-up costs half a second"


def test_nobody_spins_while_one_stage_works(executor: ResilientExecutor) -> None:
    settle(executor)
    processes = [psutil.Process(), *workers_of(executor)]
    before = cpu_s(processes)
    run_step(executor, {"do": {2: [("sleep", 2.0)]}})
    assert cpu_s(processes) - before < 0.6


def test_steps_that_arrive_at_the_very_moment_of_falling_asleep(executor: ResilientExecutor) -> None:
    chance = random.Random(5)
    began, count = time.monotonic(), 400
    futures = []
    for number in range(count):
        time.sleep(chance.choice((0.0, 0.0, chance.random() * 1e-3, chance.random() * 5e-3)))
        executor.execute_model(number)
        futures.append(executor.sample_tokens(None, non_block=True))
        if chance.random() < 0.4:
            futures[chance.randrange(len(futures))].result(30)
    assert [future.result(30)["scheduler"] for future in futures] == list(range(count))
    assert time.monotonic() - began < 60.0, "every lost wake-up costs half a second"


@pytest.mark.parametrize(
    "rank", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3]
)
def test_a_sleeper_that_is_killed_is_found_and_replaced(executor: ResilientExecutor, rank: int) -> None:
    settle(executor)
    # Of other executors on this machine, only hearts are left in the same place.
    epoch, old = executor.epoch, bells(without="-heart-")
    old |= {address_of(worker.process)[1:].decode() for worker in executor.workers}
    at = time.time()
    os.kill(executor.workers[rank].process.pid, signal.SIGKILL)
    await_epoch(executor, epoch + 1)
    incident = executor.incidents[-1]
    assert incident.cause is not None
    assert (incident.cause.rank, incident.cause.kind) == (rank, CauseKind.PROCESS_EXIT)
    assert incident.detected_at - at < 2.0
    assert run_step(executor, 7)["scheduler"] == 7
    assert not old & bells(), "bells of the old epoch"


def test_a_sleeper_that_is_stopped_is_found_as_frozen(executor: ResilientExecutor) -> None:
    settle(executor)
    epoch, at = executor.epoch, time.time()
    os.kill(executor.workers[1].process.pid, signal.SIGSTOP)
    await_epoch(executor, epoch + 1)
    incident = executor.incidents[-1]
    assert incident.cause is not None
    assert (incident.cause.rank, incident.cause.kind) == (1, CauseKind.FROZEN)
    assert incident.detected_at - at < 8.0
    assert run_step(executor, 8)["scheduler"] == 8


def oversleep(worker: object) -> None:
    """Whatever it is rung, it sleeps on."""
    from resilient_executor.doorbell import Doorbell

    assert Doorbell.of_worker is not None
    Doorbell.of_worker.sleep = lambda *_: time.sleep(1000.0)  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    "deaf", [pytest.param((0,), id="one", marks=pytest.mark.long), pytest.param((0, 1), id="a whole stage")]
)
def test_a_sleeper_that_does_not_wake_is_a_stall(executor: ResilientExecutor, deaf: tuple[int, ...]) -> None:
    for number in range(6):
        run_step(executor, number)
    epoch = executor.epoch
    handles = executor._lifecycle.serving.group.handles  # type: ignore[union-attr]  # it serves
    ray.get([handles[rank].__ray_call__.remote(oversleep) for rank in deaf], timeout=30)
    time.sleep(1.0)
    assert run_step(executor, 9)["scheduler"] == 9, "made again by the next epoch"
    await_epoch(executor, epoch + 1)
    cause = executor.incidents[-1].cause
    assert cause is not None
    assert cause.kind is CauseKind.STALLED
    assert "not reached all ranks" in cause.text


def test_asleep_it_is_shut_down_and_leaves_no_bell(ray_cluster: str) -> None:
    before = bells()
    with serving() as executor:
        settle(executor)
        names = sorted(bell.split("-")[2] for bell in bells() - before)
        assert names.count("heart") == 1, "the worker's"
        assert names.count("wire") == 2, "the driver's to the worker, and the worker's to the driver"
        assert len(names) == 5, "the driver's bell, and the worker's"
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    within(5.0, lambda: bells() <= before, "bells are gone")


def test_it_can_be_switched_off(ray_cluster: str) -> None:
    before = bells(without="-heart-")
    with serving(parking=False, wires=False) as executor:
        assert run_step(executor, 1)["scheduler"] == 1
        assert bells(without="-heart-") <= before


def test_over_rays_own_channels_readers_are_rung(ray_cluster: str) -> None:
    """What is used where Ray's code is not as known: nobody spins, nobody oversleeps, deaths are found."""
    before = bells()
    with serving(tensor_parallel_size=2, pipeline_parallel_size=2, wires=False, backoff_initial_s=0.01) as executor:
        assert not any("-wire-" in bell for bell in bells() - before)
        test_an_idle_graph_costs_no_core_and_wakes_at_once(executor)
        test_nobody_spins_while_one_stage_works(executor)
        test_steps_that_arrive_at_the_very_moment_of_falling_asleep(executor)
        for rank in (0, 3):
            settle(executor)
            epoch = executor.epoch
            os.kill(executor.workers[rank].process.pid, signal.SIGKILL)
            await_epoch(executor, epoch + 1)
            assert run_step(executor, rank)["scheduler"] == rank
