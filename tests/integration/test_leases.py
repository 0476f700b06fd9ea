"""A worker that was given up does not come back, whatever could not reach it (F24, F37)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import leaks
import psutil
import pytest
import ray
from probe_executor import await_epoch, run_step, serving, within

from resilient_executor import CauseKind, ExecutorState, ResilientExecutor, StepLost
from resilient_executor.placement import Reservation
from resilient_executor.processes import ProcessHandle, identify
from resilient_executor.protocol import LEASE_EXIT_CODE, ProcessIdentity
from resilient_executor.supervisor.agent import Fenced, NodeAgent
from resilient_executor.worker_group import WorkerGroup

#: Short, so that the tests are: a lease of 1.75 s, convictions after 2 to 2.5 s, and 5 s of grace.
LIMITS: dict[str, Any] = {"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 2.5}
LEASE_S, GRACE_S = 1.75, 5.0

OutOfReach = Callable[[ResilientExecutor], AbstractContextManager[None]]

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def out_of_reach() -> OutOfReach:
    """Cut an executor off from its workers' nodes, as a pulled cable does: nothing that would end them arrives."""

    @contextmanager
    def cut(executor: ResilientExecutor) -> Iterator[None]:
        supervision = executor._supervision
        assert supervision is not None

        def declared_dead(processes: list[ProcessIdentity]) -> list[Fenced]:
            return [Fenced(process, gone=True, exit=None) for process in processes]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervision, "fence", declared_dead)
            patch.setattr(supervision, "kill", lambda process: None)
            patch.setattr(WorkerGroup, "kill", lambda group: None)
            patch.setattr(Reservation, "release", lambda reservation: None)
            yield
        for group in leaks.placement_groups():
            if f"{executor._config.name}-epoch-1-" in group:
                ray.util.remove_placement_group(ray.util.get_placement_group(group.split()[1]))

    return cut


@pytest.mark.timeout(180)
@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_zombie_says_nothing_that_counts_and_ends(out_of_reach: OutOfReach, comes_back: bool) -> None:
    """Stopped in a step, and continued when it has been given up: it ends itself. If it is not, its agent ends it."""
    with serving(tensor_parallel_size=2, **LIMITS) as executor:
        assert run_step(executor, 1)["epoch"] == 1
        time.sleep(1.0)
        old = [ProcessHandle(worker.process) for worker in executor.workers]
        zombie = old[1].identity.pid
        executor.execute_model({"do": {1: [("sleep", 1.0)]}})
        future = executor.sample_tokens(None, non_block=True)
        time.sleep(0.5)
        with out_of_reach(executor):
            os.kill(zombie, signal.SIGSTOP)
            within(10.0, lambda: executor.state is ExecutorState.RECOVERING, "it is given up")
            assert leaks.alive([zombie]), "this test is about one that could not be fenced"
            given_up = time.monotonic()
            if comes_back:
                os.kill(zombie, signal.SIGCONT)
            with pytest.raises(StepLost):
                future.result()
            await_epoch(executor, 2)
            served = 0
            while served < 20 or not all(handle.wait(0.0) for handle in old):
                assert run_step(executor, served)["epoch"] == 2
                served += 1
                assert time.monotonic() - given_up < LEASE_S + GRACE_S + 20.0, "it lives on"
        statuses = [handle.exit_status() for handle in old]
        if comes_back:
            assert [status.exit_code for status in statuses] == [LEASE_EXIT_CODE] * 2
        else:
            assert statuses[1].signal == signal.SIGKILL
        assert [incident.cause.kind for incident in executor.incidents if incident.cause] == [CauseKind.FROZEN]
        for handle in old:
            handle.close()


def test_an_agent_ends_the_workers_that_nobody_wants(tmp_path: Any) -> None:
    """Those included that cannot end themselves: this one is stopped."""
    agent = ray.remote(num_cpus=0)(NodeAgent).remote()
    child = subprocess.Popen(["sleep", "600"])
    try:
        node_id = ray.get(agent.identity.remote()).node_id
        identity = identify(child.pid, node_id)
        ray.get(agent.watch.remote([identity]))
        os.kill(child.pid, signal.SIGSTOP)
        for _ in range(20):
            ray.get(agent.renew.remote([identity], 0.5, 0.5))
            time.sleep(0.25)
        assert child.poll() is None, "it was wanted all the time"
        time.sleep(1.5)
        assert child.poll() is None, "it has the grace to be wanted again"
        within(10.0, lambda: child.poll() is not None, "the agent ends it")
        assert child.returncode == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
        ray.kill(agent)


@pytest.fixture
def executor() -> Iterator[ResilientExecutor]:
    with serving(tensor_parallel_size=2, **LIMITS) as running:
        yield running


def supervisor_pid(executor: ResilientExecutor) -> int:
    assert executor._supervision is not None
    pid = ray._private.state.actors(executor._supervision.actor_processes()[0]._actor_id.hex())["Pid"]
    assert isinstance(pid, int)
    return pid


@pytest.mark.parametrize("number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.long), signal.SIGKILL])
def test_the_supervisors_end_costs_no_worker_its_life(executor: ResilientExecutor, number: signal.Signals) -> None:
    """Leases are much shorter than a replacement takes. The executor stands in, and steps go on meanwhile."""
    pids = [worker.process.pid for worker in executor.workers]
    assert run_step(executor, 0)["epoch"] == 1
    time.sleep(1.0)
    lost = supervisor_pid(executor)
    os.kill(lost, number)
    began, longest = time.monotonic(), 0.0
    while time.monotonic() - began < LEASE_S + GRACE_S + 5.0:
        before = time.monotonic()
        assert run_step(executor, 1)["epoch"] == 1
        longest = max(longest, time.monotonic() - before)
    print(f"longest step {longest:.2f} s")
    assert longest < GRACE_S
    assert [worker.process.pid for worker in executor.workers] == pids
    assert executor.incidents == ()
    assert not psutil.pid_exists(lost), "stopped, it would hold its port and its memory for ever"
    executor.check_health()
