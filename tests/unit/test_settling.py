"""Who has come out of a step that a peer raised in, and what was spoilt: no Ray, no process."""

from __future__ import annotations

import pytest

from resilient_executor.protocol import Phase, Progress
from resilient_executor.settling import Outcome, StepSettling, spoilt

STEP = 7
A, F, R, P = Outcome.AHEAD, Outcome.FINISHED, Outcome.RAISED, Outcome.PASSED_OVER
DONE, RAISED, BEFORE = (7, ()), (7, (7,)), (6, ())
#: Further on: the step is in the past, and later ones raised as well or alone.
ON, ON_RAISED, ON_RAISED_LATER = (9, ()), (9, (7, 9)), (9, (9,))


def progress(*ranks: tuple[int, tuple[int, ...]]) -> dict[int, Progress]:
    return {
        rank: Progress(rank, 1, Phase.SERVING, -1, 0.0, last, failed, "") for rank, (last, failed) in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        pytest.param((2, 1), [RAISED, BEFORE], [R, A], id="between steps it may not have begun this one"),
        pytest.param((2, 1), [RAISED, DONE], [R, F], id="one raised, one finished"),
        pytest.param((2, 1), [RAISED, RAISED], [R, R], id="both raised"),
        pytest.param((2, 1), [ON_RAISED, ON], [R, F], id="both have gone on"),
        pytest.param((2, 1), [RAISED, ON_RAISED_LATER], [R, F], id="it raised in a later step, not in this one"),
        pytest.param((1, 2), [RAISED, BEFORE], [R, P], id="the next stage never sees it"),
        pytest.param((1, 3), [DONE, RAISED, BEFORE], [F, R, P], id="the last stage never sees it"),
        pytest.param(
            (2, 2), [RAISED, DONE, BEFORE, BEFORE], [R, F, P, A], id="one column goes on, into the next stage"
        ),
        pytest.param((2, 2), [RAISED, BEFORE, BEFORE, BEFORE], [R, A, P, A], id="one column has not begun"),
        pytest.param((2, 2), [RAISED, RAISED, BEFORE, BEFORE], [R, R, P, P], id="the whole stage raised"),
        pytest.param((2, 2), [DONE, RAISED, RAISED, BEFORE], [F, R, R, P], id="one in each stage"),
    ],
)
def test_what_each_rank_has_made_of_the_step(
    sizes: tuple[int, int], ranks: list[tuple[int, tuple[int, ...]]], expected: list[Outcome]
) -> None:
    assert StepSettling(STEP, *sizes).outcomes(progress(*ranks)) == expected


def test_a_rank_that_nobody_has_heard_of_is_not_out() -> None:
    known = progress(RAISED, DONE)
    del known[1]
    assert StepSettling(STEP, 2, 1).outcomes(known) == [R, A]


@pytest.mark.parametrize(
    ("sizes", "outcomes", "text"),
    [
        pytest.param((2, 1), [R, R], "", id="all alike"),
        pytest.param((2, 1), [R, F], "ranks [0] raised in step 7, and their peers [1] did not", id="one of two"),
        pytest.param((1, 2), [R, P], "", id="stages have no collectives in common"),
        pytest.param((2, 2), [R, R, P, P], "", id="the whole stage, and so the next"),
        pytest.param((2, 2), [F, F, F, R], "ranks [3] raised in step 7, and their peers [2] did not", id="last stage"),
        pytest.param((2, 3), [F, F, P, F, P, P], "ranks [2] never came to step 7, and their peers [3]", id="between"),
    ],
)
def test_a_stage_must_be_of_one_kind(sizes: tuple[int, int], outcomes: list[Outcome], text: str) -> None:
    why = spoilt(StepSettling(STEP, *sizes), outcomes)
    assert why.startswith(text) if text else not why
