"""Liveness from heartbeats (F2, F4, F5, F6)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.supervisor.detectors import Detector, HeartbeatHistory, Liveness, LivenessDetector

INTERVAL = 0.5
TIMEOUT = 10.0


def detector(timeout_s: float = TIMEOUT, earliest_s: float | None = None) -> LivenessDetector:
    return LivenessDetector(interval_s=INTERVAL, timeout_s=timeout_s, now=0.0, earliest_s=earliest_s)


def passes(it: Detector, start: float, end: float, step: float = INTERVAL) -> list[Liveness]:
    count = round((end - start) / step)
    return [it.evaluate(start + step * i).state for i in range(1, count + 1)]


def test_silence_is_first_suspect_then_dead() -> None:
    states = passes(detector(), 0.0, 11.0)
    assert states == sorted(states, key=list(Liveness).index), "it only ever gets worse"
    at = {state: (states.index(state) + 1) * INTERVAL for state in Liveness}
    assert at == {Liveness.ALIVE: 0.5, Liveness.SUSPECT: 1.5, Liveness.DEAD: TIMEOUT}


def test_reasons_are_empty_while_alive_and_name_the_silence_after() -> None:
    it = detector()
    assert it.evaluate(0.5).reason == ""
    passes(it, 0.5, 9.5)
    assert it.evaluate(9.9).reason == "no heartbeat for 9.9 s (dead at 10 s, suspicion 300)"
    assert it.evaluate(10.2).reason == "no heartbeat for 10.2 s (limit 10 s, suspicion 300)"


def test_a_suspect_that_answers_is_alive_again() -> None:
    it = detector()
    assert passes(it, 0.0, 5.0)[-1] is Liveness.SUSPECT
    it.heard(5.1)
    assert it.evaluate(5.5).state is Liveness.ALIVE


@settings(max_examples=500)
@given(st.lists(st.booleans(), max_size=60), st.floats(1e-3, TIMEOUT))
def test_single_misses_change_nothing(lost: list[bool], timeout_s: float) -> None:
    """Whatever the timeout: no two beats in a row are lost here, so nobody is even suspect."""
    it = detector(timeout_s)
    previous_lost = False
    for beat, miss in enumerate(lost, start=1):
        miss = miss and not previous_lost  # noqa: PLW2901 - turns any list into one without two in a row
        assert it.evaluate(beat * INTERVAL).state is Liveness.ALIVE
        if not miss:
            it.heard(beat * INTERVAL)
        previous_lost = miss


@settings(max_examples=500)
@given(st.lists(st.tuples(st.floats(0.01, INTERVAL * 1.9), st.booleans()), max_size=80))
def test_only_real_silence_convicts(history: list[tuple[float, bool]]) -> None:
    it, now, heard_at = detector(), 0.0, 0.0
    for gap, beat in history:
        now += gap
        if beat:
            it.heard(now)
            heard_at = now
        verdict = it.evaluate(now)
        assert (verdict.state is Liveness.DEAD) == (now - heard_at >= TIMEOUT)
        assert it.silence_s(now) == pytest.approx(now - heard_at)


@settings(max_examples=500)
@given(st.floats(0, 9.4), st.floats(INTERVAL * 2 + 0.01, 1e6))
def test_a_detector_that_was_paused_convicts_nobody(silent_before: float, pause: float) -> None:
    it = detector()
    passes(it, 0.0, silent_before)
    now = round(silent_before / INTERVAL) * INTERVAL + pause
    assert it.evaluate(now).state is Liveness.ALIVE
    after = [it.evaluate(now + i * INTERVAL).state for i in range(1, 19)]
    assert Liveness.DEAD not in after, "the clock starts anew"
    last = [it.evaluate(now + 9.0 + i * INTERVAL).state for i in range(1, 4)]
    assert last[-1] is Liveness.DEAD, "and a worker that is really gone is still found"


def test_a_pause_is_forgiven_again_once_the_worker_has_answered() -> None:
    it = detector()
    for round_ in range(5):
        now = round_ * 1000.0 + 999.0
        assert it.tick(now)
        it.heard(now + 0.1)
        assert it.evaluate(now + 0.4).state is Liveness.ALIVE


@settings(max_examples=300)
@given(st.lists(st.floats(INTERVAL * 2 + 0.01, 100.0), min_size=1, max_size=100))
def test_no_single_late_pass_adds_more_silence_than_one_interval(gaps: list[float]) -> None:
    it, now = detector(), 0.0
    for gap in gaps:
        before = it.silence_s(now)
        now += gap
        assert it.tick(now)
        assert it.silence_s(now) <= before + INTERVAL + 1e-6


@given(st.floats(INTERVAL * 2 + 0.01, 50.0))
def test_a_loop_that_is_always_late_still_finds_a_frozen_worker(gap: float) -> None:
    it = detector()
    needed = math.ceil(TIMEOUT / INTERVAL) + 3
    assert any(it.evaluate(i * gap).state is Liveness.DEAD for i in range(1, needed + 1))


def test_a_heartbeat_that_arrives_out_of_order_changes_nothing() -> None:
    it = detector()
    it.heard(3.0)
    it.heard(1.0)
    assert it.silence_s(4.0) == 1.0


# -- suspicion that accrues -------------------------------------------------------------------------------------------


def test_phi_is_the_number_of_nines() -> None:
    """Against the normal distribution: mean 0.5, deviation 0.25; one chance in a thousand is 3.09 deviations away."""
    history = HeartbeatHistory(INTERVAL)
    assert history.phi(INTERVAL) == pytest.approx(math.log10(2))
    assert history.phi(INTERVAL + 3.0902 * 0.25) == pytest.approx(3.0, abs=1e-3)


@settings(max_examples=300)
@given(
    st.lists(st.floats(0.01, 5.0), max_size=200),
    st.lists(st.floats(0.0, 1e4), min_size=2, max_size=20).map(sorted),
)
def test_suspicion_only_grows_with_silence(gaps: list[float], silences: list[float]) -> None:
    history = HeartbeatHistory(INTERVAL)
    for gap in gaps:
        history.add(gap)
    phis = [history.phi(silence) for silence in silences]
    assert phis == sorted(phis)
    assert all(0.0 <= phi <= 300.0 for phi in phis)


def frozen_after(gaps: list[float], stopped: bool = False) -> float:
    """Seconds from the last beat of this history to the conviction, where 4 s are the earliest and 5 s the limit."""
    it, now = detector(5.0, earliest_s=4.0), 0.0
    for gap in gaps:
        for _ in range(int(gap / INTERVAL)):
            now += INTERVAL
            assert it.evaluate(now).state is not Liveness.DEAD
        now += gap % INTERVAL
        it.heard(now)
    last = now
    while it.evaluate(now, stopped).state is not Liveness.DEAD:
        now += 0.1
        assert now < last + 60.0
    return now - last


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0.05, 3.9), max_size=120), st.booleans())
def test_whatever_the_history_a_freeze_is_convicted_between_the_earliest_moment_and_the_limit(
    gaps: list[float], stopped: bool
) -> None:
    """And nobody is convicted while beats come within the earliest moment."""
    limit = 5.0 if stopped or all(gap < 1.0 for gap in gaps) else 10.0
    assert 4.0 - 1e-6 <= frozen_after(gaps, stopped) <= limit + 0.1 + 1e-6


def test_steady_hearts_are_convicted_sooner_than_irregular_ones() -> None:
    assert frozen_after([0.5] * 60) == pytest.approx(4.0, abs=0.11)
    assert frozen_after([0.2, 1.8] * 30) == pytest.approx(5.0, abs=0.11)
    assert frozen_after([0.1, 3.9] * 30) == pytest.approx(7.9, abs=0.2)
    assert frozen_after([0.1, 3.9] * 30, stopped=True) == pytest.approx(5.0, abs=0.11)


@settings(max_examples=300)
@given(st.lists(st.floats(0.05, INTERVAL * 1.9), min_size=1, max_size=200))
def test_a_silent_process_that_runs_is_suspect_and_never_frozen(gaps: list[float]) -> None:
    """F4: something in it holds Python's lock. When it stops running, it is frozen."""
    it, now = detector(5.0, earliest_s=4.0), 0.0
    for gap in gaps:
        now += gap
        it.ran(now)
        assert it.evaluate(now).state is not Liveness.DEAD
    assert it.silence_s(now) == pytest.approx(now)
    if now > 2.0:
        assert it.evaluate(now).state is Liveness.SUSPECT
    assert passes(it, now, now + 6.0)[-1] is Liveness.DEAD


@pytest.mark.parametrize(("interval_s", "timeout_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_durations_must_be_positive(interval_s: float, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        LivenessDetector(interval_s=interval_s, timeout_s=timeout_s, now=0.0)
