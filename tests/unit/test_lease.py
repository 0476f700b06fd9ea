"""The lease of a worker, over random histories of heartbeats that are late, stopped and lost (F24, F37)."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.lease import Lease

LEASE, GRACE, INTERVAL, TICK = 3.5, 5.0, 0.5, 0.25


class Worker(Lease):
    """A lease, and how many beats each grantor has sent: each one has heard the answer to the last."""

    def __init__(self) -> None:
        super().__init__(LEASE, GRACE, 0.0)
        self.beats: dict[str, int] = {}


def lease() -> Worker:
    return Worker()


def beat(it: Worker, now: float, grantor: str = "supervisor") -> None:
    heard = it.beats.get(grantor, 0)
    it.beats[grantor] = heard + 1
    it.beat(grantor, heard)
    it.answered(grantor, heard + 1, now)


@settings(max_examples=500)
@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.floats(0.0, 2.0)), min_size=2, max_size=40),
    st.floats(0.0, 100.0),
)
def test_it_ends_before_the_supervisor_can_have_counted_as_much_silence(
    beats: list[tuple[float, float, float]], skew: float
) -> None:
    """Whatever the delays on the way there, on the way back and in between, and whatever the clocks show."""
    it, now, heard = lease(), skew, 0.0
    for there, back, pause in beats:
        now += there
        beat(it, now)
        now += back
        heard = now  # the supervisor's silence begins here
        now += pause
    # The next heartbeat is sent, stays unanswered, and may arrive at any time, or never.
    assert not it.valid(heard + LEASE)
    beat(it, heard + 1000.0)
    assert not it.valid(heard + 1000.0), "a heartbeat that has waited in a stopped process renews nothing"


@settings(max_examples=300)
@given(st.lists(st.floats(0.01, LEASE * 0.99), min_size=2, max_size=100))
def test_it_is_valid_as_long_as_beats_come(gaps: list[float]) -> None:
    it, now = lease(), 0.0
    for gap in gaps:
        beat(it, now)
        assert it.valid(now)
        assert not it.spent(now, TICK)
        now = min(now + gap, now + LEASE - 0.01)


def test_before_the_first_renewal_there_is_no_lease_to_lose() -> None:
    it = lease()
    assert it.valid(1e9)
    beat(it, 0.0)
    assert it.valid(1e9)
    beat(it, 0.5)
    assert not it.valid(3.5)


def test_any_grantor_will_do_but_only_one_that_has_heard_an_answer() -> None:
    it = lease()
    beat(it, 0.0)
    beat(it, 0.5)
    beat(it, 10.0, "executor")
    assert not it.valid(10.0)
    beat(it, 10.5, "executor")
    assert it.valid(13.0)


@given(st.floats(0.0, 1e5))
def test_a_stopped_worker_that_comes_back_has_the_grace_to_be_wanted_again(stopped: float) -> None:
    it = lease()
    beat(it, 0.0)
    beat(it, 0.5)
    now, ticks = 0.5 + stopped, 0
    while not it.spent(now, TICK):
        now += TICK
        ticks += 1
        assert ticks * TICK < LEASE + GRACE + 1
    assert ticks * TICK >= GRACE - 2 * TICK
    assert not it.valid(now)


@settings(max_examples=300)
@given(st.lists(st.floats(0.01, 2.0), min_size=2, max_size=30), st.floats(0.0, 2.0))
def test_a_loop_that_rests_is_as_quick_to_end_as_one_that_does_not(gaps: list[float], behind: float) -> None:
    """Beats come at these gaps and then no more; the loop began ``behind`` the first one."""
    it, now = lease(), -behind
    beats = [sum(gaps[:index]) for index in range(len(gaps))]
    due = list(beats)
    while not it.spent(now, TICK):
        assert now < beats[-1] + LEASE + GRACE + 1
        now += it.rest_s(now, TICK)
        while due and due[0] <= now:
            beat(it, due.pop(0))
    over = beats[-2] + LEASE  # the last proven answer
    assert over + GRACE <= now <= over + GRACE + 2 * TICK


def test_while_beats_come_it_looks_once_a_lease() -> None:
    it, now, looks = lease(), 0.0, 0
    due = [INTERVAL * number for number in range(200)]
    while due:
        assert not it.spent(now, TICK)
        now += it.rest_s(now, TICK)
        looks += 1
        while due and due[0] <= now:
            beat(it, due.pop(0))
    assert looks <= 100 / (LEASE - 2 * INTERVAL) + 2


def test_before_any_lease_it_looks_once_a_second() -> None:
    assert Lease(math.inf, math.inf, 0.0).rest_s(5.0, TICK) == 1.0


def test_a_new_lease_in_time_saves_it() -> None:
    it = lease()
    beat(it, 0.0)
    beat(it, 0.5)
    now = 0.5
    for _ in range(30):
        now += TICK
        assert not it.spent(now, TICK)
    beat(it, now)
    beat(it, now + 0.01)
    assert it.valid(now + 1.0)
    for _ in range(30):
        now += TICK
        assert not it.spent(now, TICK)


@settings(max_examples=500)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_an_answer_that_did_not_arrive_renews_nothing(history: list[tuple[float, bool, bool]]) -> None:
    """Beats and answers get lost on the way through the agent; the lease follows the last answer that was heard."""
    it, now, heard, heard_at = lease(), 0.0, 0, 0.0
    for number, (pause, arrives, answer_arrives) in enumerate(history, start=1):
        now += pause
        if not arrives:
            continue
        it.beat("supervisor", heard)
        it.answered("supervisor", number, now)
        if answer_arrives:
            heard, heard_at = number, now
        assert it._until == math.inf or it._until <= heard_at + LEASE


def test_only_so_many_answers_are_remembered() -> None:
    it = lease()
    for number in range(1, 1000):
        it.answered("supervisor", number, float(number))
    assert len(it._answered) <= 16
    for number in range(1000, 9000, 3):  # numbers are skipped while an answer is owed
        it.answered("supervisor", number, float(number))
    assert len(it._answered) <= 16
