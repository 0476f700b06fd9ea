"""What the driver says of its group, against old words of workers: who is excused, and who no longer is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_supervisor_progress import FIRST, FLOOR, INTERVAL, LIMITS, busy, detector, feed, idle, step_deadline

from resilient_executor.protocol import Phase, Progress
from resilient_executor.supervisor.progress import DriverView

SERVES = DriverView(serving=True)


@settings(max_examples=300)
@given(st.sampled_from([*LIMITS]), st.floats(0.0, 20.0), st.floats(0.0, 90.0))
def test_one_that_falls_silent_as_it_begins_to_serve_is_not_taken_for_one_that_loads(
    phase: Phase, loads: float, serves: float
) -> None:
    """Its last word was that it loads, and that may take ten minutes."""
    deadline, now = step_deadline(), 0.0
    it = detector(2, deadline)
    feed(it, idle(0), idle(1, phase=phase, phase_age_s=1.0))
    while now < loads + serves:
        now += INTERVAL
        if now % 1.0 == 0.0:
            it.told(SERVES if now >= loads else DriverView(), now)
        it.heard(idle(0))
        stall = it.evaluate(now, {1: now})
        begun = math.ceil(max(loads, 1.0))
        if now > begun + deadline.seconds:
            assert stall is not None
            assert stall.ranks == (1,)
            return
        assert stall is None, "what it was silent for while it loaded does not count"


def test_what_a_worker_says_after_the_driver_is_newer() -> None:
    """A graph that is built with the first step is compiled in a group that serves."""
    it = detector(1)
    it.told(SERVES, 0.0)
    it.heard(idle(0, phase=Phase.COMPILING))
    assert it.phase_of(0, 0.5) is Phase.COMPILING
    assert it.evaluate(0.5, {0: 50.0}) is None


def test_a_driver_that_has_not_spoken_for_a_while_says_nothing_of_now() -> None:
    it = detector(1)
    it.heard(idle(0, phase=Phase.LOADING))
    it.told(SERVES, 0.0)
    assert [it.phase_of(0, now) for now in (1.0, 2.9, 3.1)] == [Phase.SERVING, Phase.SERVING, Phase.LOADING]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("known", [[], [idle(0)], [busy(0, 10, 0.1)]])
def test_a_call_that_holds_the_lock_from_its_first_moment_convicts_nobody(
    known: list[Progress], in_flight: bool
) -> None:
    """No heartbeat has seen it in the call; but one that was in a step may be stuck there."""
    it = detector(1)
    feed(it, *known)
    for beat in range(1, 100):
        now = beat * INTERVAL
        step = 10 if in_flight else -1
        it.told(DriverView(step, step, 0, "add_lora", now, serving=True), now)
        stall = it.evaluate(now, {0: now})
        assert (stall is not None) == (in_flight and known == [busy(0, 10, 0.1)] and now > FLOOR)


def silent_with(last: Progress, view: Callable[[float], DriverView], seconds: int = 60) -> list[float]:
    """When a rank is convicted that falls silent at 0 with this last word, and this view of the driver."""
    it, found = detector(1, deadline := step_deadline()), []
    deadline.learn(0.01, 10)
    feed(it, idle(0), last)
    for beat in range(1, 2 * seconds):
        now = beat * INTERVAL
        if beat % 2:
            it.told(view(now), now)
        if it.evaluate(now, {0: now}) is not None:
            found.append(now)
    return found


@pytest.mark.parametrize("last", [idle(0, rpc_in_hand="load"), idle(0, phase=Phase.LOADING, rpc_in_hand="load")])
def test_a_call_that_is_over_excuses_nobody(last: Progress) -> None:
    """F3: replayed or not, it is the last that was heard; in service the driver knows that there is none."""
    assert silent_with(last, lambda now: SERVES)[0] <= FLOOR + 2 * INTERVAL + 0.5
    assert silent_with(last, lambda now: DriverView()) == [], "in a start it goes on"


def test_a_call_excuses_only_a_silence_that_it_has_begun() -> None:
    """One that came later can never return, and must not hide that."""

    def called_at(began: float) -> Callable[[float], DriverView]:
        def view(now: float) -> DriverView:
            called = now >= began
            return DriverView(7, 7, 0, "read" if called else "", now - began if called else 0.0, serving=True)

        return view

    late = silent_with(idle(0), called_at(6.0))
    assert FLOOR < late[0] <= FLOOR + 1.0
    assert silent_with(idle(0), called_at(0.5)) == []


def test_a_call_in_flight_of_which_the_driver_is_silent_is_not_forgotten() -> None:
    def view(now: float) -> DriverView:
        return DriverView(rpc="load", rpc_age_s=now, serving=True)

    it = detector(1, deadline := step_deadline())
    deadline.learn(0.01, 10)
    feed(it, idle(0), idle(0))
    it.told(view(0.5), 0.5)
    assert all(it.evaluate(beat * INTERVAL, {0: beat * INTERVAL}) is None for beat in range(2, 100))


def test_last_words_that_differ_by_a_step_lose_no_step_while_there_is_a_call() -> None:
    it = detector(2)
    feed(it, idle(0, 9), idle(1, 10))
    for beat in range(1, 100):
        it.told(DriverView(rpc="load", rpc_age_s=beat * INTERVAL, serving=True), beat * INTERVAL)
        assert it.evaluate(beat * INTERVAL, {0: beat * INTERVAL, 1: beat * INTERVAL}) is None


@pytest.mark.parametrize("told", [False, True])
def test_one_of_which_nothing_was_heard_may_load_as_long_as_that_may_take(told: bool) -> None:
    """A new supervisor finds it with the lock; where the driver is silent, a step's deadline must do."""
    it, found = detector(1, step_deadline()), []
    for beat in range(1, 1400):
        now = beat * INTERVAL
        if told:
            it.told(DriverView(), now)
        if it.evaluate(now, {0: now}) is not None:
            found.append(now)
    assert found[0] == (max(LIMITS.values()) if told else FIRST) + INTERVAL


def test_steps_count_when_the_driver_has_read_them() -> None:
    """Not when a rank has run them, that may be a step ahead of the one that hangs; nor by who is heard first."""
    deadline = step_deadline()
    deadline.learn(0.01, 10)
    deadline.convicted()
    it = detector(2, deadline)
    it.told(DriverView(), 0.0)
    feed(it, *(idle(rank, phase=Phase.COMPILING, steps_done=0) for rank in (0, 1)), idle(1, 3, steps_done=3))
    it.told(DriverView(7, 7, 0, serving=True), 1.0)
    assert deadline.seconds == 2 * FLOOR
    it.told(DriverView(8, 8, 1, serving=True), 2.0)
    assert deadline.seconds == FLOOR


def test_a_new_supervisor_has_not_learnt_from_steps_that_it_has_not_seen() -> None:
    deadline = step_deadline()
    it = detector(1, deadline)
    it.told(DriverView(steps_read=1000, serving=True), 0.0)
    assert not deadline.learnt
    it.told(DriverView(steps_read=1005, serving=True), 1.0)
    assert deadline.learnt


@pytest.mark.parametrize("after", [DriverView(serving=True), DriverView(rpc="another", rpc_age_s=0.1, serving=True)])
def test_what_a_call_excused_does_not_count_when_it_is_over(after: DriverView) -> None:
    """The news that it has ended may come before the answer of the rank that it has ended on."""
    it, deadline, now = detector(1), 60.0, 0.0
    feed(it, idle(0), idle(0))
    convicted: list[float] = []
    while not convicted and now < 100.0:
        now += INTERVAL
        view = DriverView(rpc="load", rpc_age_s=now, serving=True) if now <= deadline else after
        it.told(view if view is not after else dataclasses.replace(after, rpc_age_s=now - deadline), now)
        if it.evaluate(now, {0: now}) is not None:
            convicted.append(now)
    assert convicted == ([] if after.rpc else [deadline + FLOOR + INTERVAL])


def test_a_lost_step_is_found_while_a_call_goes_on_that_everyone_answers_in() -> None:
    it = detector(2)
    for beat in range(1, 40):
        now = beat * INTERVAL
        it.told(DriverView(10, 10, rpc="save", rpc_age_s=now, serving=True), now)
        feed(it, idle(0, 9), idle(1, 9))
        if it.evaluate(now) is not None:
            assert now <= FLOOR + 2.0
            return
    pytest.fail("nobody has found it")
