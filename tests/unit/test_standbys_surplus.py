"""How many standbys are too many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.standbys import surplus


@given(st.lists(st.sampled_from("abc")), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)))
def test_only_the_surplus_goes(nodes: list[str], wanted: dict[str, int]) -> None:
    left = list(nodes)
    for place in surplus(nodes, wanted):
        left.pop(place)
    assert Counter(left) == Counter({n: min(c, wanted.get(n, 0)) for n, c in Counter(nodes).items()})
