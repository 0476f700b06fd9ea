"""Who has an agent, and who should get another one. Real actors, really killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from resilient_executor.actors import actor_class
from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor import agents as module
from resilient_executor.supervisor.agent import NodeAgent
from resilient_executor.supervisor.agents import Agents

pytestmark = pytest.mark.usefixtures("leak_check")

OWNER = ProcessIdentity(1, 1, "of another node")


def made(agents: Agents) -> int:
    """The agent's pid."""
    pid: int = ray.get(agents.get("here").identity.remote(), timeout=60).pid
    return pid


def after_death(agents: Agents, pid: int) -> list[str]:
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while "here" in agents.handles():
        assert time.monotonic() < deadline, "its death is not known"
        if bereft := agents.take_dead():
            return bereft
        time.sleep(0.05)
    return []


@pytest.mark.parametrize(("brief_s", "bereft"), [(0.0, ["here"]), (600.0, [])])
def test_a_dead_one_is_forgotten_and_replaced_unless_it_died_young(
    monkeypatch: pytest.MonkeyPatch, brief_s: float, bereft: list[str]
) -> None:
    monkeypatch.setattr(module, "_BRIEF_S", brief_s)
    agents = Agents(lambda node_id: actor_class(NodeAgent).options(num_cpus=0).remote(), OWNER)
    assert agents.take_dead() == []
    first = made(agents)
    assert (agents.take_dead(), made(agents)) == ([], first), "one that lives stays"
    assert after_death(agents, first) == bereft
    assert agents.handles() == {}
    second = made(agents)
    assert second != first
    ray.kill(agents.get("here"))


def test_only_the_one_that_is_meant_is_forgotten() -> None:
    agents = Agents(lambda node_id: actor_class(NodeAgent).options(num_cpus=0).remote(), OWNER)
    old = agents.get("here")
    agents.drop("here", old)
    new = agents.get("here")
    agents.drop("here", old)
    assert agents.handles() == {"here": new}
    assert agents.handles(["elsewhere"]) == {}
    for handle in (old, new):
        ray.kill(handle)
