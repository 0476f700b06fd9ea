"""Life and progress weighed together, for one epoch's workers on a simulated clock (F2, F4, F6)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.config import ExecutorConfig
from resilient_executor.protocol import Phase, ProcessIdentity, Progress, Vitals, WorkerSpec
from resilient_executor.supervisor.incidents import CauseKind
from resilient_executor.supervisor.watch import Conviction, Watch, WatchSettings

SETTINGS = WatchSettings.from_config(ExecutorConfig(worker=WorkerSpec("unused"), tensor_parallel_size=2))
STOPPED, SLEEPS, RUNS = Vitals("T", 100, False), Vitals("S", 100, False), Vitals("R", 100, True)
TICK = SETTINGS.heartbeat_interval_s


def watch() -> Watch:
    deadline = SETTINGS.step_deadline()
    deadline.learn(0.01, 5)
    processes = [(ProcessIdentity(10 + rank, 1, "node"), "10.0.0.1") for rank in range(2)]
    return Watch(1, processes, SETTINGS, deadline, 0.0)


def idle(rank: int, **changes: object) -> Progress:
    progress = Progress(rank, 1, Phase.SERVING, -1, 0.0, 9, (), "", 1.0, 10, 0.01)
    return dataclasses.replace(progress, **changes)  # type: ignore[arg-type]  # the fields' own types


def first_conviction(it: Watch, seen: Vitals | None, phase: Phase = Phase.SERVING) -> tuple[float, Conviction]:
    """Rank 0 goes silent at 10 s and its agent sees this of it; rank 1 is well. Seconds until the verdict."""
    now = 0.0
    while now < 1000.0:
        now += TICK
        it.heard(idle(1), now, 0.001)
        if now <= 10.0:
            it.heard(idle(0, phase=phase, phase_age_s=now), now, 0.001)
        convictions, suspects = it.judge(now)
        assert 1 not in suspects
        if convictions:
            return now - 10.0, convictions[0]
        if suspects and seen is not None:
            it.saw(0, seen, now)
    raise AssertionError("nobody was convicted")


def test_a_stopped_process_is_frozen_within_five_seconds() -> None:
    after, conviction = first_conviction(watch(), STOPPED)
    assert (conviction.kind, conviction.ranks) == (CauseKind.FROZEN, (0,))
    assert SETTINGS.lease_s < after <= 5.0


def test_one_that_neither_answers_nor_runs_too() -> None:
    after, conviction = first_conviction(watch(), SLEEPS)
    assert conviction.kind is CauseKind.FROZEN
    assert SETTINGS.lease_s < after <= 5.0


def test_one_that_runs_has_until_the_deadline_of_its_step() -> None:
    after, conviction = first_conviction(watch(), RUNS)
    assert conviction.kind is CauseKind.STALLED
    assert 8.0 < after <= 9.0


def test_where_nobody_can_look_it_takes_twice_as_long() -> None:
    """Its agent is silent as well: the node is busy, or gone."""
    after, conviction = first_conviction(watch(), None)
    assert conviction.kind is CauseKind.FROZEN
    assert 10.0 <= after <= 10.5


@pytest.mark.parametrize(("seen", "kind", "least"), [(STOPPED, "frozen", 4.0), (SLEEPS, "stalled", 500.0)])
def test_a_start_may_wait_for_its_disk_but_not_stand_still(seen: Vitals, kind: str, least: float) -> None:
    """F4: a load that holds the lock for a minute, most of it waiting."""
    after, conviction = first_conviction(watch(), seen, Phase.LOADING)
    assert conviction.kind.value == kind
    assert least <= after <= least + 100


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans()), min_size=1, max_size=40))
def test_a_supervisor_that_was_stopped_convicts_nobody(pauses: list[tuple[float, bool]]) -> None:
    """However often and for how long: all workers answer as soon as it asks again."""
    it, now = watch(), 0.0
    for pause, answers_first in pauses:
        now += TICK + pause
        if answers_first:
            for rank in (0, 1):
                it.heard(idle(rank), now, pause)
        assert it.judge(now)[0] == []
        now += 0.01
        for rank in (0, 1):
            it.heard(idle(rank), now, pause)


def test_an_epoch_has_one_stall() -> None:
    it, now, found = watch(), 0.0, []
    for _ in range(100):
        now += TICK
        for rank in (0, 1):
            it.heard(idle(rank, step_in_hand=10, step_age_s=now), now, 0.001)
        found += it.judge(now)[0]
    assert [one.kind for one in found] == [CauseKind.STALLED]
    assert found[0].ranks == (0, 1)


def test_a_report_says_what_is_known() -> None:
    it = watch()
    it.heard(idle(1), 1.0, 0.001)
    assert it.report(1, 3.0, SLEEPS, "stack").doing() == "idle after step 9"
    assert it.report(0, 3.0).doing() == "has not said anything"
    assert it.report(1, 3.0, SLEEPS).process == "sleeps"
    assert it.silence_s(1, 3.0) == 2.0
    it.heard(idle(1, asleep=True), 3.0, 0.001)
    assert it.report(1, 3.0).doing() == "asleep after step 9"


@pytest.mark.parametrize("every_s", [2.0, 5.0, 8.0])
def test_an_agent_that_is_slow_to_look_again_proves_nothing(every_s: float) -> None:
    """It loads with the lock held, and its agent has to wait for a busy processor before each look."""
    it, now, looked = watch(), 0.0, 0.0
    it.heard(idle(0, phase=Phase.LOADING), 0.5, 0.001)
    while now < 100.0:
        now += TICK
        it.heard(idle(1), now, 0.001)
        assert it.judge(now)[0] == []
        if now - looked >= every_s:
            looked = now
            it.saw(0, SLEEPS, now)


@given(gaps=st.lists(st.floats(0.5, 9.0), min_size=1, max_size=6))
@settings(deadline=None)
def test_nobody_is_convicted_unseen_however_irregular_it_was(gaps: list[float]) -> None:
    """What is looked at before it may be convicted, and runs, is not frozen (it may be long in its phase)."""
    it, now = watch(), 0.0
    for gap in gaps:
        now += gap
        for rank in range(2):
            it.heard(idle(rank, phase=Phase.LOADING), now, 0.001)
        it.judge(now)
    end = now + 60.0
    while now < end:
        now += TICK
        it.heard(idle(1), now, 0.001)
        convictions, suspects = it.judge(now)
        assert convictions == []
        if suspects:
            it.saw(0, SLEEPS, now)
