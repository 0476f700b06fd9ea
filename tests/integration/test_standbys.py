"""Warm standbys take the place of the dead, are no incident when they die, and are gone with the executor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import leaks
import pytest
import ray
from probe_executor import ExecutorFactory, await_epoch, probe_config, run_step, serving, within
from probe_worker import ProbeWorker

from resilient_executor import ConfigError, ExecutorConfig, ExecutorState, ResilientExecutor, WorkerSpec
from resilient_executor.reference import ReferenceEngine, SamplingParams
from resilient_executor.reference.bench import JOURNALLED
from resilient_executor.standbys import Standbys

PROMPTS = ["It was a fine evening, and", "My dear Emma,"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


def standbys_of(executor: ResilientExecutor) -> Standbys:
    assert executor._recovery is not None
    return executor._recovery.standbys


def ready(executor: ResilientExecutor, number: int) -> None:
    within(60.0, lambda: standbys_of(executor).counts() == {"ready": number, "preparing": 0}, f"{number} standbys")


def pids_of_standbys(executor: ResilientExecutor) -> list[int]:
    handles = [standby.handle for standby in standbys_of(executor)._standbys]
    return [int(ray._private.state.actors(handle._actor_id.hex())["Pid"]) for handle in handles]


@pytest.fixture(scope="module")
def executor(ray_cluster: str) -> Iterator[ResilientExecutor]:
    config = ExecutorConfig(
        worker=WorkerSpec("resilient_executor.reference.worker:ReferenceWorker"),
        tensor_parallel_size=2,
        rpc_policies=JOURNALLED,
        max_restarts=1000,
        backoff_initial_s=0.01,
        backoff_max_s=0.01,
        warm_standbys="every_rank",
        name="standbys",
    )
    with ResilientExecutor(config) as running:
        yield running


@pytest.fixture(scope="module")
def engine(executor: ResilientExecutor) -> ReferenceEngine:
    return ReferenceEngine(executor, poison_crashes=0)


@pytest.fixture(scope="module")
def undisturbed(engine: ReferenceEngine) -> list[tuple[int, ...]]:
    return tokens(engine)


def tokens(engine: ReferenceEngine) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


def kill_in_a_step(executor: ResilientExecutor, *pids: int) -> None:
    """The next step loses these processes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_standbys_take_the_place_of_the_dead(
    executor: ResilientExecutor, engine: ReferenceEngine, undisturbed: list[tuple[int, ...]]
) -> None:
    for rank in range(2):
        ready(executor, 2)
        waiting, before = pids_of_standbys(executor), executor.epoch
        kill_in_a_step(executor, executor.workers[rank].process.pid)
        assert tokens(engine) == undisturbed
        assert executor.epoch == before + 1
        assert {worker.process.pid for worker in executor.workers} == set(waiting)
        incident = executor.incidents[-1]
        assert incident.standbys == 2
        assert "2 ranks from warm standbys" in incident.headline()
        print(f"outage {incident.duration_s:.2f} s, {incident.phases}")


def test_a_kill_while_they_are_made_is_survived(
    executor: ResilientExecutor, engine: ReferenceEngine, undisturbed: list[tuple[int, ...]]
) -> None:
    ready(executor, 2)
    for _ in range(3):  # no pause: the second and third come before there are standbys again
        kill_in_a_step(executor, executor.workers[1].process.pid)
        assert tokens(engine) == undisturbed


def test_a_rank_and_a_standby_die_at_once(
    executor: ResilientExecutor, engine: ReferenceEngine, undisturbed: list[tuple[int, ...]]
) -> None:
    ready(executor, 2)
    kill_in_a_step(executor, pids_of_standbys(executor)[0], executor.workers[0].process.pid)
    assert tokens(engine) == undisturbed


def test_a_standby_that_dies_is_replaced_and_is_no_incident(executor: ResilientExecutor) -> None:
    ready(executor, 2)
    incidents, old = len(executor.incidents), pids_of_standbys(executor)
    os.kill(old[0], signal.SIGKILL)
    within(30.0, lambda: leaks.alive(old[:1]) == [] and standbys_of(executor).counts() != {"ready": 2, "preparing": 0},
           "its death is noticed")  # fmt: skip
    ready(executor, 2)
    assert old[0] not in pids_of_standbys(executor)
    assert (len(executor.incidents), executor.state) == (incidents, ExecutorState.HEALTHY)


def test_nothing_is_left_of_them(ray_cluster: str) -> None:
    with serving(warm_standbys=2) as running:
        ready(running, 2)
        pids = pids_of_standbys(running)
        running.shutdown()
        assert leaks.alive(pids) == []


def test_a_standby_that_is_taken_gets_the_devices_of_its_bundle(make_executor: ExecutorFactory) -> None:
    executor = make_executor(device_key="GPU", warm_standbys=2, tensor_parallel_size=2)
    ready(executor, 2)
    waiting = set(pids_of_standbys(executor))
    kill_in_a_step(executor, executor.workers[0].process.pid)
    await_epoch(executor, 2)
    assert {worker.process.pid for worker in executor.workers} == waiting
    seen = executor.collective_rpc(_visible)
    assert [",".join(worker.device_ids) for worker in executor.workers] == seen
    assert len(set(seen)) == 2
    assert all(seen)


def _visible(_: Any) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_class_that_cannot_be_imported_ahead_costs_the_standbys_only(
    leak_check: None, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(ProbeWorker):
        @staticmethod
        def preload(**_: Any) -> None:
            raise RuntimeError("not without a rank")

    with ResilientExecutor(ExecutorConfig(worker=WorkerSpec(Stubborn), name="stubborn", warm_standbys=1)) as running:
        within(30.0, lambda: not standbys_of(running).enabled, "they are given up")
        assert "not without a rank" in caplog.text
        os.kill(running.workers[0].process.pid, signal.SIGKILL)
        await_epoch(running, 2)
        assert run_step(running, {"x": 1})
        time.sleep(1.0)
        assert standbys_of(running).counts() == {"ready": 0, "preparing": 0}


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "all", "1.5"])
def test_numbers_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="warm_standbys"):
        probe_config(warm_standbys=wrong)


def test_they_can_be_set_in_the_environment() -> None:
    for text, value in (("2", 2), ("every_rank", "every_rank")):
        environ = {"RESILIENT_EXECUTOR_WARM_STANDBYS": text}
        assert ExecutorConfig.from_env(WorkerSpec("unused"), environ).warm_standbys == value
