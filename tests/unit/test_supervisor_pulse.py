"""When heartbeats go out: in step, so that they cost little, and never late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.supervisor.pulse import pause_s

TIMES = st.floats(min_value=0.0, max_value=1e6)


@given(first=TIMES, second=TIMES, ranks=st.tuples(st.integers(0, 31), st.integers(0, 31)))
def test_those_of_a_small_group_go_out_together(first: float, second: float, ranks: tuple[int, int]) -> None:
    (one, other), tick = (
        (at + pause_s(0.5, at, at, rank, 32) for at, rank in zip((first, second), ranks, strict=True)),
        0.5,
    )
    apart = abs(one - other) % tick
    assert min(apart, tick - apart) < 1e-6


@given(now=TIMES, took_s=st.floats(min_value=0.0, max_value=3.0), rank=st.integers(0, 1023))
def test_no_two_are_further_apart_than_one_interval_or_the_answer(now: float, took_s: float, rank: int) -> None:
    began = now - took_s
    pause = pause_s(0.5, began, now, rank, 1024)
    assert 0.0 <= pause <= 0.5
    assert now + pause - began <= max(1.0, took_s) + 1e-6
    if took_s > 0.25:
        assert now + pause - began <= max(0.5, took_s) + 1e-6, "a slow one is followed as ever"


@pytest.mark.parametrize("size", [33, 64, 1024])
def test_those_of_a_large_group_take_turns(size: int) -> None:
    phases = [round(pause_s(0.5, 1.0, 1.0, rank, size), 6) for rank in range(size)]
    groups = -(-size // 32)
    assert len(set(phases)) == groups
    assert max(phases.count(phase) for phase in set(phases)) <= 32
