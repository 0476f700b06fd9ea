"""The draw of a token depends on the logits, the seed and the position, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_executor.reference.messages import Draw
from resilient_executor.reference.sampling import choose, uniform


def draw(index: int = 0, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 1) -> Draw:
    return Draw(index, temperature, top_k, top_p, seed)


def test_random_numbers_never_change() -> None:
    """A change here would change what every seeded request answers: a new release must not do that by accident."""
    assert [uniform(7, n) for n in range(3)] == [0.6416851058787302, 0.23046942676340265, 0.7270685511978118]


def test_random_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(3, n) for n in range(4000)], [uniform(s, 3) for s in range(4000)]):
        counts = torch.histc(torch.tensor(numbers), bins=10, min=0.0, max=1.0)
        # Chi square with 9 degrees of freedom: 27.9 is exceeded once in a thousand; the numbers are fixed.
        assert float(((counts - 400) ** 2 / 400).sum()) < 27.9


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(50)
    logits[[31, 12, 44]] = 2.5
    assert choose(logits, draw(temperature=0.0)) == 12


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    temperature, rounds = 0.7, 4000
    counts = torch.zeros(4)
    for index in range(rounds):
        counts[choose(logits, draw(index, temperature=temperature))] += 1
    assert torch.allclose(counts / rounds, torch.softmax(logits / temperature, 0), atol=0.02)


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    seen = {choose(logits, draw(index, top_p=0.7)) for index in range(200)}
    assert seen == {0, 1}
    assert {choose(logits, draw(index, top_p=1e-9)) for index in range(50)} == {0}


@given(
    values=st.lists(st.floats(-20, 20), min_size=1, max_size=40),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.05, 5.0),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2000),
)
@settings(max_examples=200, deadline=None)
def test_choice_is_allowed_and_reproducible(
    values: list[float], top_k: int, top_p: float, temperature: float, seed: int, index: int
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    how = Draw(index, temperature, top_k, top_p, seed)
    token = choose(logits, how)
    assert token == choose(logits.clone(), how)
    better = sum(value > values[token] for value in values)
    assert better < (top_k or len(values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_an_error(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="position 5"):
        choose(torch.tensor([0.0, bad]), draw(5, temperature=0.0))
