"""The moments that everything periodic shares."""

from __future__ import annotations

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.supervisor.ticks import last_tick, rest_s, until_tick

PERIODS = st.floats(0.01, 60.0)
TIMES = st.floats(0.0, 1e6)


@given(PERIODS, TIMES)
def test_the_next_one_is_never_now_and_never_far(period: float, now: float) -> None:
    left = until_tick(period, now)
    assert 0.98 * period * 0.01 < left <= 1.011 * period


@given(PERIODS, TIMES, TIMES)
def test_all_who_wait_from_one_moment_to_the_next_wait_for_the_same(period: float, now: float, part: float) -> None:
    first = now + until_tick(period, now)
    other = now + part / 1e6 * max(0.0, first - now - 0.011 * period)
    assert abs(other + until_tick(period, other) - first) < 1e-6 * (1 + now)


@given(PERIODS, TIMES)
def test_a_timer_that_fires_early_does_not_fire_twice(period: float, now: float) -> None:
    woken = now + until_tick(period, now) - 0.001 * period
    assert until_tick(period, woken) > 0.9 * period


@given(PERIODS, TIMES, st.floats(0.0, 10.0))
def test_the_last_one_before_a_deadline(period: float, now: float, timeout: float) -> None:
    until = now + timeout
    last = last_tick(period, now, until)
    assert now <= last <= until + 1e-6 * (1 + now)
    if timeout > 1.02 * period:
        assert last > until - 1.02 * period
        assert last > now


@given(PERIODS, TIMES, st.floats(0.0, 100.0))
def test_a_round_that_took_long_is_followed_at_once_and_none_rests_longer_than_a_period(
    period: float, began: float, took: float
) -> None:
    rest = rest_s(period, began, began + took)
    assert 0.0 <= rest <= period
    if took >= period:
        assert rest <= 1e-6 * (1 + began)


def test_two_loops_wake_together() -> None:
    woken: list[list[float]] = [[], []]

    async def loop(mine: list[float], behind: float) -> None:
        await asyncio.sleep(behind)
        for _ in range(8):
            await asyncio.sleep(until_tick(0.05, time.monotonic()))
            mine.append(time.monotonic())

    async def work() -> None:
        await asyncio.gather(loop(woken[0], 0.0), loop(woken[1], 0.013))

    asyncio.run(work())
    apart = sorted(min(abs(a - b) for b in woken[1]) for a in woken[0])
    assert apart[len(apart) // 2] < 0.005
