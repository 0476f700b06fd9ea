"""The restart budget, over thousands of random histories (F26, F27)."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.supervisor.policy import JITTER_FLOOR, RestartBudget

WINDOW = 100.0


def budget(max_restarts: int = 3, seed: int = 0, quiet_s: float | None = None) -> RestartBudget:
    return RestartBudget(
        max_restarts=max_restarts,
        window_s=WINDOW,
        backoff_initial_s=0.5,
        backoff_max_s=8.0,
        quiet_s=quiet_s,
        rng=random.Random(seed),
    )


#: What follows a failure: seconds of rebuilding, whether it worked, and seconds of service if it did.
HISTORIES = st.lists(
    st.tuples(st.floats(0, 150), st.booleans(), st.floats(0, 250) | st.just(WINDOW)), min_size=1, max_size=60
)


@settings(max_examples=1500)
@given(HISTORIES, st.integers(0, 6), st.integers(0, 2**32))
def test_no_history_breaks_the_limits(history: list[tuple[float, bool, float]], allowed: int, seed: int) -> None:
    it = budget(allowed, seed)
    now, rebuilds, since_success, gave_up = 0.0, list[float](), 0, False
    for rebuilding, worked, served in history:
        decision = it.decide(now)
        assert "\n" not in decision.reason
        if gave_up:
            assert decision.action == "give_up"
        if decision.action == "give_up":
            gave_up = True
            assert decision.pause_s == 0.0
            assert it.snapshot().given_up
        else:
            rebuilds.append(now)
            since_success += 1
            assert 0.0 <= decision.pause_s <= 8.0
            assert decision.pause_s == 0.0 or decision.pause_s >= 0.5 * JITTER_FLOOR
        assert since_success <= allowed, "a fault that no rebuild cures must end"
        now += decision.pause_s + rebuilding
        if worked:
            it.note_success(now)
            since_success = 0
            now += served
    for first, later in zip(rebuilds, rebuilds[allowed:], strict=False):
        assert later - first >= WINDOW * (1 - 1e-9), "more than max_restarts rebuilds in a window"


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_pauses_of_one_streak_double_up_to_the_cap(seed: int, length: int) -> None:
    it = budget(max_restarts=length, seed=seed)
    pauses = [it.decide(float(i)).pause_s for i in range(length)]
    assert pauses[0] == 0.0
    for i, pause in enumerate(pauses[1:]):
        full = min(8.0, 0.5 * 2.0**i)
        assert full * JITTER_FLOOR <= pause <= full


def test_pauses_grow_in_expectation_and_use_the_whole_range() -> None:
    runs = []
    for seed in range(1000):
        it = budget(max_restarts=8, seed=seed)
        runs.append([it.decide(0.0).pause_s for _ in range(8)])
    means = [statistics.fmean(column) for column in zip(*runs, strict=True)]
    assert all(later > earlier * 0.97 for earlier, later in itertools.pairwise(means))
    assert means[1] == pytest.approx(0.375, rel=0.05)
    assert means[7] == pytest.approx(6.0, rel=0.05)
    thirds = [run[7] for run in runs]
    assert min(thirds) < 4.1
    assert max(thirds) > 7.9


def test_a_quiet_period_starts_afresh() -> None:
    it = budget(max_restarts=3)
    for i in range(3):
        assert it.decide(float(i)).action == "rebuild"
    it.note_success(3.0)
    assert it.snapshot(3.0).used == 3
    assert it.snapshot(3.0 + WINDOW).used == 0
    assert it.snapshot(3.0 + WINDOW).streak == 0
    decision = it.decide(3.0 + WINDOW)
    assert (decision.action, decision.pause_s) == ("rebuild", 0.0)


def test_a_month_of_single_failures_is_no_reason_to_give_up() -> None:
    it = budget(max_restarts=1)
    now = 0.0
    for _ in range(1000):
        decision = it.decide(now)
        assert (decision.action, decision.pause_s) == ("rebuild", 0.0)
        it.note_success(now + 5)
        now += 5 + WINDOW


@pytest.mark.parametrize("rebuilding_s", [1.0, 10 * WINDOW])
@pytest.mark.parametrize("works_for_a_moment", [True, False])
def test_a_permanent_fault_ends_however_long_its_rebuilds_take(rebuilding_s: float, works_for_a_moment: bool) -> None:
    it, now, rebuilds = budget(max_restarts=3), 0.0, 0
    while it.decide(now).action == "rebuild":
        rebuilds += 1
        now += rebuilding_s
        if works_for_a_moment:
            it.note_success(now)
            now += 0.1
        assert rebuilds <= 3
    assert rebuilds == 3
    assert it.decide(now + 1000 * WINDOW).action == "give_up"
    it.note_success(now + 1000 * WINDOW)
    assert it.decide(now + 9999 * WINDOW).action == "give_up"


def test_a_short_quiet_period_resets_the_pause_but_not_the_intensity() -> None:
    it = budget(max_restarts=2, quiet_s=10.0)
    assert it.decide(0.0).pause_s == 0.0
    it.note_success(1.0)
    assert it.decide(11.0).pause_s == 0.0
    it.note_success(12.0)
    assert it.decide(22.0).action == "give_up"


def test_the_first_success_counts_and_repeating_it_changes_nothing() -> None:
    it = budget(max_restarts=1)
    it.decide(0.0)
    it.note_success(1.0)
    it.note_success(WINDOW)
    assert it.decide(1.0 + WINDOW).action == "rebuild"


def test_no_restart_allowed() -> None:
    decision = budget(max_restarts=0).decide(0.0)
    assert decision.action == "give_up"
    assert "max_restarts is 0" in decision.reason


def test_reasons_say_where_the_budget_stands() -> None:
    it = budget(max_restarts=1)
    assert it.decide(0.0).reason == "rebuild 1 of at most 1 in 100 s of service, at once"
    assert "1 rebuilds within 100 s" in it.decide(1.0).reason


def test_a_very_long_streak_does_not_overflow() -> None:
    it = RestartBudget(max_restarts=3000, window_s=1.0, backoff_initial_s=1e-3, backoff_max_s=30.0)
    assert all(math.isfinite(it.decide(0.0).pause_s) for _ in range(3000))


def test_a_clock_that_steps_back_does_no_harm() -> None:
    it = budget()
    it.note_success(50.0)
    assert it.decide(10.0).action == "rebuild"


@pytest.mark.parametrize(
    "wrong",
    [{"max_restarts": -1}, {"window_s": 0.0}, {"backoff_initial_s": 0.0}, {"backoff_max_s": 0.1}, {"quiet_s": -1.0}],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    good = {"max_restarts": 1, "window_s": 1.0, "backoff_initial_s": 1.0, "backoff_max_s": 1.0}
    with pytest.raises(ValueError, match="must"):
        RestartBudget(**{**good, **wrong})  # type: ignore[arg-type]  # max_restarts is an int in a dict of floats
