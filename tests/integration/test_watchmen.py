"""The watchmen may die, stop or be slow: the supervisor and the node's agent. Workers are not replaced for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import ray
from test_supervision import (
    FROZEN_AFTER_S,
    executor,
    healthy,
    pid_of,
    pid_of_actor,
    recovered,
    start_step,
    step,
    supervisor_and_agents,
    until,
)

from resilient_executor import CauseKind, ExecutorUnhealthy, ResilientExecutor, StepLost
from resilient_executor.heart import Beat

__all__ = ["executor", "healthy"]  # the fixtures


def test_the_supervisor_is_replaced_and_nothing_is_lost(executor: ResilientExecutor) -> None:
    epoch = executor.epoch
    supervisor = supervisor_and_agents(executor)[0]
    future = start_step(executor, do={0: [("sleep", 1.0)]})
    os.kill(pid_of_actor(supervisor), signal.SIGKILL)
    with pytest.raises(ExecutorUnhealthy, match="supervisor"):
        executor.check_health()
    assert future.result()["epoch"] == epoch
    until(lambda: is_healthy(executor))
    assert executor.epoch == epoch
    os.kill(pid_of(executor, 0), signal.SIGKILL)  # the new one watches
    assert recovered(executor, epoch).epoch == epoch


def test_a_supervisor_that_gets_no_processor_is_not_replaced(executor: ResilientExecutor) -> None:
    """F4, among the watchmen: it is slow because the machine is full, and its successor would be slower still."""
    epoch, known = executor.epoch, len(executor.incidents)
    supervision = executor._supervision
    assert supervision is not None
    supervisor = supervisor_and_agents(executor)[0]
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    threads = [int(tid) for tid in os.listdir(f"/proc/{pid_of_actor(supervisor)}/task")]
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    try:
        for thread in threads:
            os.sched_setaffinity(thread, {cpu})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        longest, until_s = 0.0, time.monotonic() + 16.0
        while time.monotonic() < until_s:
            step(executor)
            longest = max(longest, time.monotonic() - supervision._heard_at)
            time.sleep(0.05)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(thread, cpus)
    until(lambda: is_healthy(executor))
    assert supervisor_and_agents(executor)[0] == supervisor
    assert (executor.epoch, len(executor.incidents)) == (epoch, known)
    if longest < 7.0:
        pytest.skip(f"it found a processor after {longest:.1f} s: nobody would have replaced it anyway")


def is_healthy(executor: ResilientExecutor) -> bool:
    try:
        executor.check_health()
    except ExecutorUnhealthy:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_without_its_agent_a_node_is_watched_all_the_same(executor: ResilientExecutor, number: signal.Signals) -> None:
    """F4, F24: heartbeats pass by the agent; without it nobody is suspected, and nobody's lease runs out."""
    epoch, known = executor.epoch, len(executor.incidents)
    agent = pid_of_actor(supervisor_and_agents(executor)[1])
    os.kill(agent, number)
    try:
        until_s = time.monotonic() + 3 * FROZEN_AFTER_S + 5.0  # a worker that nobody wants ends itself 5 s after that
        while time.monotonic() < until_s:
            began = time.monotonic()
            step(executor)
            assert time.monotonic() - began < 1.0, "a step waits for a lease"
            executor.check_health()
            time.sleep(0.02)
    finally:
        if number is signal.SIGSTOP:
            os.kill(agent, signal.SIGCONT)
    assert (executor.epoch, len(executor.incidents)) == (epoch, known)
    if number is signal.SIGSTOP:  # and back again it ends nobody
        time.sleep(FROZEN_AFTER_S)
        assert (executor.epoch, len(executor.incidents)) == (epoch, known)
    else:  # a death is seen without it, too, and brings a new one
        os.kill(pid_of(executor, 1), signal.SIGKILL)
        assert recovered(executor, epoch).cause.rank == 1  # type: ignore[union-attr]  # see recovered


def test_an_agent_asks_the_workers_of_its_node(executor: ResilientExecutor) -> None:
    """Here the supervisor does it itself; on every other node it is done so."""
    step(executor)
    agent, config = supervisor_and_agents(executor)[1], executor._config
    processes = [worker.process for worker in executor.workers]
    stranger = replace(processes[0], start_ticks=1)
    beats = {process: Beat(executor.epoch, "tester", 1, 0) for process in [*processes, stranger]}
    call = agent.beat.remote(beats, 5.0, processes, config.lease_s, config.lease_grace_s)
    took_s, answers = ray.get(call, timeout=20)
    assert 0.0 < took_s < 5.0
    for rank, process in enumerate(processes):
        said = answers[process]
        assert said.progress is not None, said
        assert (said.number, said.progress.rank, said.progress.epoch) == (1, rank, executor.epoch)
    assert (answers[stranger].reachable, answers[stranger].progress) == (False, None)


def test_a_dead_agent_is_replaced_under_its_workers(executor: ResilientExecutor) -> None:
    """Only an agent sees how a process ends, so this one has a successor, which has been told whom to watch."""
    epoch, known = executor.epoch, len(executor.incidents)
    [agent] = supervisor_and_agents(executor)[1:]
    pid = pid_of_actor(agent)
    time.sleep(max(0.0, psutil.Process(pid).create_time() + 12.0 - time.time()))  # one that dies young has none
    os.kill(pid, signal.SIGKILL)
    until(lambda: supervisor_and_agents(executor)[1:] not in ([], [agent]))
    [successor] = supervisor_and_agents(executor)[1:]
    until(lambda: pid_of_actor(successor) > 0)
    for _ in range(10):
        step(executor)
        time.sleep(0.1)
    assert (executor.epoch, len(executor.incidents)) == (epoch, known)
    os.kill(pid_of(executor, 1), signal.SIGKILL)
    cause = recovered(executor, epoch).cause
    assert cause is not None
    assert (cause.rank, cause.signal) == (1, signal.SIGKILL)


@pytest.mark.parametrize("idle", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_supervisor_the_agent_and_a_worker_may_die_together(executor: ResilientExecutor, idle: bool) -> None:
    """Two deaths at once are one incident."""
    epoch, incidents = executor.epoch, len(executor.incidents)
    future = None if idle else start_step(executor, do={0: [("sleep", 5.0)]})
    time.sleep(0.2)
    for handle in supervisor_and_agents(executor):
        os.kill(pid_of_actor(handle), signal.SIGKILL)
    os.kill(pid_of(executor, 1), signal.SIGKILL)
    if future is not None:
        with pytest.raises(StepLost):
            future.result()
    cause = recovered(executor, epoch).cause
    assert cause is not None
    assert cause.rank == 1
    assert len(executor.incidents) == incidents + 1
    until(lambda: is_healthy(executor))


def test_who_died_first_is_known_though_no_agent_saw_it(executor: ResilientExecutor) -> None:
    """The next agent finds two processes gone, and cannot tell in which order. Ray can."""
    epoch = executor.epoch
    future = start_step(executor, do={0: [("sleep", 5.0)], 1: [("sleep", 5.0)]})
    time.sleep(0.2)
    for handle in supervisor_and_agents(executor):
        os.kill(pid_of_actor(handle), signal.SIGKILL)
    os.kill(pid_of(executor, 1), signal.SIGKILL)
    time.sleep(0.4)
    os.kill(pid_of(executor, 0), signal.SIGKILL)
    with pytest.raises(StepLost):
        future.result()
    cause = recovered(executor, epoch).cause
    assert cause is not None
    assert (cause.kind, cause.rank) == (CauseKind.PROCESS_EXIT, 1)
