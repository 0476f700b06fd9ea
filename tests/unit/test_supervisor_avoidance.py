"""Which nodes are avoided, over thousands of random histories."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.supervisor.avoidance import Avoidance, Death

AFTER, AVOID_S = 3, 600.0
HISTORIES = st.lists(
    st.tuples(st.floats(0.0, 400.0), st.integers(0, 3), st.sampled_from("abc"), st.sampled_from(["", "0", "1"])),
    max_size=60,
)


def death(at: float, rank: int = 0, node: str = "a", device: str = "0") -> Death:
    return Death(at, rank, node, f"ip-{node}", device)


@settings(max_examples=1500)
@given(HISTORIES, st.floats(0.0, 2000.0))
def test_exactly_those_nodes_are_avoided_where_enough_has_died_lately(
    history: list[tuple[float, int, str, str]], later: float
) -> None:
    it, now, deaths = Avoidance(after=AFTER, avoid_s=AVOID_S), 0.0, list[Death]()
    for pause, rank, node, device in history:
        now += pause
        deaths.append(death(now, rank, node, device))
        line = it.died(deaths[-1])
        assert "\n" not in line
        lately = [d for d in deaths if now - d.at < AVOID_S]
        alike = sum((d.rank, d.node_id, d.device) == (rank, node, device) for d in lately)
        assert (f"rank {rank} has died {alike} times" in line) == (alike >= 2)
        assert ("is avoided" in line) == (node in it.avoided(now))
    now += later
    counts = Counter(d.node_id for d in deaths if now - d.at < AVOID_S)
    assert it.avoided(now) == {node for node, count in counts.items() if count >= AFTER}


def test_what_is_said() -> None:
    it = Avoidance(after=AFTER, avoid_s=AVOID_S)
    assert it.died(death(0.0)) == ""
    assert it.died(death(1.0)) == "rank 0 has died 2 times on device 0 of node ip-a within 600 s"
    assert it.died(death(2.0, rank=1)) == "node ip-a has seen 3 deaths and is avoided for 600 s"
    assert it.avoided(601.9) == {"a"} - {"a"}
    assert it.avoided(599.0) == {"a"}
    it.forgive()
    assert it.avoided(3.0) == frozenset()


def test_it_can_be_switched_off() -> None:
    it = Avoidance(after=0, avoid_s=AVOID_S)
    for i in range(10):
        assert "avoided" not in it.died(death(float(i)))
    assert it.avoided(10.0) == frozenset()


@pytest.mark.parametrize("wrong", [{"after": -1}, {"avoid_s": 0.0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Avoidance(**{"after": 1, "avoid_s": 1.0, **wrong})  # type: ignore[arg-type]  # after is an int
