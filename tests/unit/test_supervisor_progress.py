"""Progress of steps and phases (F3, F4, F6), on a simulated clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.protocol import Phase, Progress
from resilient_executor.supervisor.progress import DriverView, ProgressDetector, StepDeadline

INTERVAL = 0.5
FLOOR, CEILING, FIRST, FACTOR = 8.0, 300.0, 60.0, 5.0
LIMITS = {Phase.STARTING: 30.0, Phase.LOADING: 600.0, Phase.COMPILING: 120.0}


def step_deadline() -> StepDeadline:
    return StepDeadline(floor_s=FLOOR, ceiling_s=CEILING, first_s=FIRST, factor=FACTOR)


def used_to_short_steps() -> StepDeadline:
    it = step_deadline()
    it.learn(0.01, 5)
    return it


def detector(ranks: int = 2, deadline: StepDeadline | None = None) -> ProgressDetector:
    return ProgressDetector(
        range(ranks), deadline=deadline or used_to_short_steps(), phase_limits=LIMITS, interval_s=INTERVAL, now=0.0
    )


def idle(rank: int, last_step: int = 9, **changes: object) -> Progress:
    progress = Progress(rank, 1, Phase.SERVING, -1, 0.0, last_step, (), "", 1.0, last_step + 1, 0.01)
    return dataclasses.replace(progress, **changes)  # type: ignore[arg-type]  # the fields' own types


def busy(rank: int, step: int, age_s: float) -> Progress:
    return idle(rank, step - 1, step_in_hand=step, step_age_s=age_s)


def feed(it: ProgressDetector, *progress: Progress) -> None:
    for one in progress:
        it.heard(one)


# -- the deadline -----------------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(st.lists(st.tuples(st.floats(0.0, 1000.0), st.integers(0, 20)), max_size=400))
def test_the_deadline_is_a_multiple_of_the_slowest_recent_step_between_floor_and_ceiling(
    history: list[tuple[float, int]],
) -> None:
    it = step_deadline()
    for slowest, steps in history:
        it.learn(slowest, steps)
    known = [slowest for slowest, _ in history if slowest > 0]
    if sum(steps for _, steps in history) < 5:
        assert it.seconds == FIRST
    else:
        assert it.seconds == min(CEILING, max(FLOOR, FACTOR * max(known[-256:], default=0.0)))


@settings(max_examples=300)
@given(st.floats(0.001, 60.0), st.floats(0.2, 1.0), st.integers(1, 100))
def test_steps_that_slow_down_gradually_are_never_convicted(first: float, share: float, count: int) -> None:
    """F4: each step may take up to five times the slowest one before it."""
    deadline, longest = step_deadline(), first
    deadline.learn(first, 5)
    it = detector(1, deadline)
    for number in range(count):
        took = min(longest * FACTOR * share, CEILING)
        it.heard(busy(0, number + 5, took * 0.999))
        assert it.evaluate(number * INTERVAL) is None
        it.heard(idle(0, number + 5, slowest_step_s=took))
        longest = max(longest, took)


def test_a_group_that_is_only_slow_is_not_rebuilt_in_a_circle() -> None:
    """Convictions without a finished step in between come twice as late each time, up to the ceiling."""
    it = step_deadline()
    it.learn(0.01, 5)
    seen = []
    for _ in range(3000):
        seen.append(it.seconds)
        it.convicted()
    assert seen[:6] == [8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert set(seen[6:]) == {CEILING}
    it.learn(0.01, 1)
    assert it.seconds == FLOOR


# -- the group --------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.data())
def test_nobody_is_convicted_while_steps_end_in_time(data: st.DataObject) -> None:
    """F4, F6: any mixture of steps below the deadline, seen at any age, by a loop that may be late by any time."""
    it, now = detector(2), 0.0
    for step in range(data.draw(st.integers(1, 30))):
        for rank in (0, 1):
            age = data.draw(st.floats(0.0, FLOOR))
            it.heard(dataclasses.replace(busy(rank, step, age), steps_done=step))
        now += data.draw(st.floats(0.01, 100.0))
        assert it.evaluate(now) is None
        feed(it, idle(0, step, steps_done=step + 1), idle(1, step, steps_done=step + 1))
        assert it.evaluate(now) is None


@settings(max_examples=300)
@given(st.integers(0, 3), st.floats(0.0, INTERVAL), st.floats(0.001, 1.5))
def test_a_step_that_never_ends_on_one_rank_is_found_within_the_bound(guilty: int, phase: float, usual: float) -> None:
    """F3: with short steps within 10 s, named by step and rank; the others have finished it."""
    it = detector(4)
    for rank in range(4):
        it.heard(idle(rank, 0))
        it.heard(idle(rank, 9, slowest_step_s=usual))
    now, began = 0.0, phase
    while True:
        now += INTERVAL
        for rank in range(4):
            stuck = rank == guilty and now > began
            it.heard(busy(rank, 10, now - began) if stuck else idle(rank, 10 if now > began else 9))
        stall = it.evaluate(now)
        if stall is not None:
            break
        assert now < 60.0
    assert stall.ranks == (guilty,)
    assert now - began <= max(FLOOR, FACTOR * usual) + 2 * INTERVAL <= 10.0
    assert "step 10 is" in stall.text
    assert "learnt from the steps before" in stall.text


def test_all_ranks_that_have_not_finished_the_step_are_named() -> None:
    it = detector(4)
    feed(it, *(idle(rank, 0) for rank in range(4)), *(idle(rank) for rank in range(4)))
    feed(it, busy(0, 10, 9.0), busy(1, 10, 9.0), idle(2), idle(3))
    stall = it.evaluate(0.5)
    assert stall is not None
    assert stall.ranks == (0, 1)


def test_who_does_not_answer_may_be_in_the_step_too() -> None:
    it = detector(2)
    feed(it, idle(0), idle(1))
    it.heard(busy(0, 10, 9.0))
    stall = it.evaluate(0.5, {1: 7.9})
    assert stall is not None
    assert stall.ranks == (0, 1)


def test_a_step_that_is_lost_between_two_ranks_is_found() -> None:
    it = detector(2)
    states = []
    for beat in range(1, 21):
        feed(it, idle(0, 10), idle(1, 9))
        states.append(it.evaluate(beat * INTERVAL))
    first = next(stall for stall in states if stall is not None)
    assert first.ranks == (1,)
    assert first.text.endswith("it has not reached all ranks")
    assert 15 < states.index(first) <= 18


def test_a_step_that_the_driver_waits_for_and_nobody_has_begun_is_found() -> None:
    it = detector(2)
    states = []
    for beat in range(1, 21):
        feed(it, idle(0, 9), idle(1, 9))
        it.told(DriverView(10), beat * INTERVAL)
        states.append(it.evaluate(beat * INTERVAL))
    first = next(stall for stall in states if stall is not None)
    assert first.ranks == (0, 1)
    assert 15 < states.index(first) <= 18


@pytest.mark.parametrize("awaited", [-1, 3, 9])
def test_a_driver_that_waits_for_nothing_new_convicts_nobody(awaited: int) -> None:
    it = detector(2)
    for beat in range(1, 100):
        feed(it, idle(0, 9), idle(1, 9))
        it.told(DriverView(awaited), beat * INTERVAL)
        assert it.evaluate(beat * INTERVAL) is None


def test_steps_that_come_and_go_faster_than_heartbeats_are_not_lost() -> None:
    """The driver is always a step ahead of what the workers last said."""
    it = detector(2)
    for beat in range(1, 100):
        feed(it, idle(0, 10 * beat), idle(1, 10 * beat))
        it.told(DriverView(10 * beat + 7), beat * INTERVAL)
        assert it.evaluate(beat * INTERVAL) is None


def test_a_step_that_was_raised_in_is_lost_to_nobody() -> None:
    """The stages behind it never see it."""
    it = detector(2)
    for beat in range(1, 100):
        feed(it, idle(0, 10, failed_steps=(10,)), idle(1, 9))
        assert it.evaluate(beat * INTERVAL) is None


def test_a_pause_of_the_detector_is_not_held_against_a_step_on_its_way() -> None:
    it = detector(2)
    for beat in range(10):
        feed(it, idle(0, 10), idle(1, 9))
        assert it.evaluate(beat * 100.0) is None


# -- phases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(LIMITS))
def test_each_phase_has_a_deadline_of_its_own(phase: Phase) -> None:
    """F4: a load of 60 s is a load; the deadline of steps does not apply to a warm-up."""
    it, limit = detector(1), LIMITS[phase]
    it.heard(idle(0, phase=phase, phase_age_s=limit - 1, step_in_hand=0, step_age_s=limit - 1))
    assert it.evaluate(0.5) is None
    it.heard(idle(0, phase=phase, phase_age_s=limit + 1))
    stall = it.evaluate(1.0)
    assert stall is not None
    assert stall.text == f"{phase.value} for {limit + 1:.1f} s (limit {limit:g} s, {phase.value}_timeout_s)"


def test_the_warm_up_teaches_nothing_about_steps() -> None:
    deadline = step_deadline()
    detector(1, deadline).heard(idle(0, phase=Phase.COMPILING, steps_done=100))
    assert not deadline.learnt


# -- who runs and does not answer -------------------------------------------------------------------------------------

WHEN: list[tuple[Progress, Callable[[float], bool]]] = [
    (idle(0), lambda silence: silence > FLOOR),
    (busy(0, 10, 0.1), lambda silence: silence > FLOOR),
    (idle(0, rpc_in_hand="save"), lambda silence: False),
    (idle(0, phase=Phase.LOADING, phase_age_s=500.0), lambda silence: silence > 100.0),
    (idle(0, phase=Phase.STOPPING), lambda silence: False),
]


@settings(max_examples=300)
@given(st.sampled_from(WHEN), st.floats(0.0, 300.0))
def test_a_deaf_worker_has_until_the_deadline_of_what_it_does(
    case: tuple[Progress, Callable[[float], bool]], silence: float
) -> None:
    it = detector(1)
    it.heard(idle(0))
    progress, guilty = case
    it.heard(progress)
    stall = it.evaluate(0.5, {0: silence})
    assert (stall is not None) == guilty(silence)
    if stall is not None:
        assert stall.ranks == (0,)
        assert "Python's lock" in stall.text


@pytest.mark.parametrize("wrong", [{"floor_s": 0.0}, {"ceiling_s": -1.0}, {"first_s": 0.0}, {"factor": 0.5}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        StepDeadline(**{"floor_s": 1.0, "ceiling_s": 1.0, "first_s": 1.0, "factor": 1.0, **wrong})
