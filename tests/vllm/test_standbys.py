"""Warm standbys under vLLM: a rank dies, its group is there again without an import, and no request notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines import PROMPTS, await_standbys, core_of, dying, kill_standby, offline, standbys, tokens, workers
from test_features import greedy
from test_mixture import ENGINE, everything_at_once

from resilient_executor import ExecutorState

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with offline({"warm_standbys": "every_rank"}, tensor_parallel_size=2, **ENGINE) as engine:
        yield engine


def generate(llm: Any) -> Any:
    return tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))


def compiled(_: Any) -> int:
    """How much a worker's process has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"])


def test_a_rank_that_dies_is_replaced_by_a_standby(llm: Any) -> None:
    core, undisturbed = core_of(llm), generate(llm)
    await_standbys(core, 2)
    waiting = standbys(core)
    assert not set(waiting) & set(workers())
    with dying(llm, 9, index=1):
        assert generate(llm) == undisturbed
    [incident] = core.incidents
    assert incident.standbys == 2
    assert "2 ranks from warm standbys" in incident.headline()
    assert sorted(worker.process.pid for worker in core.workers) == sorted(waiting)
    print(f"outage {incident.duration_s:.2f} s, {incident.phases}")


def test_the_first_step_after_a_death_compiles_nothing(llm: Any) -> None:
    """vLLM compiles when it first needs something, which takes as long as all the rest; standbys do it ahead."""
    core, undisturbed = core_of(llm), generate(llm)
    await_standbys(core, 2)
    before = core.epoch
    os.kill(workers()[0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while core.epoch == before or core.state is not ExecutorState.HEALTHY:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rehearsed = core.collective_rpc(compiled)
    assert all(rehearsed), "nothing was rehearsed"
    assert generate(llm) == undisturbed
    assert core.collective_rpc(compiled) == rehearsed


@pytest.mark.long
def test_everything_at_once_with_some_standbys(llm: Any) -> None:
    """Deaths that find one standby, none, or some that are still being made."""
    core = core_of(llm)
    await_standbys(core, 2)
    incidents, killed = len(core.incidents), kill_standby(core)
    everything_at_once(llm)
    assert core.incidents[incidents:]
    assert killed not in workers()
