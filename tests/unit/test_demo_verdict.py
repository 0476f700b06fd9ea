"""The demo's judge: nothing that goes wrong with a token gets past it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.reference import FinishReason, TokenEvent, demo
from resilient_executor.reference.demo import DemoOptions
from resilient_executor.reference.demo.plan import draw_requests
from resilient_executor.reference.demo.report import Outcome
from resilient_executor.reference.demo.story import Story
from resilient_executor.reference.demo.verdict import Answer, Comparison, compare, reasons

#: Few different tokens: texts that repeat themselves are where a judge goes wrong.
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def answer(token_ids: list[int], **other: object) -> Answer:
    complete = Answer(
        token_ids, list(range(len(token_ids))), "".join(f"{token} " for token in token_ids), finish="length"
    )
    return dataclasses.replace(complete, **other)  # type: ignore[arg-type]


def counts(want: list[int], got: list[int]) -> tuple[int, int, int]:
    one = compare([answer(want)], [[answer(got)]])
    return one.lost, one.repeated, one.changed


@given(TOKENS)
def test_what_is_equal_passes(tokens: list[int]) -> None:
    comparison = compare([answer(tokens), answer(tokens)], [[answer(tokens), answer(tokens)]] * 3)

    assert comparison.differences == ()
    assert (comparison.answers, comparison.identical, comparison.tokens) == (6, 6, 6 * len(tokens))


@given(TOKENS, st.data())
def test_one_lost_token_is_found(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))

    assert counts(tokens, tokens[:at] + tokens[at + 1 :]) == (1, 0, 0)


@given(TOKENS, st.data())
def test_one_repeated_token_is_found(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))

    assert counts(tokens, tokens[: at + 1] + tokens[at:]) == (0, 1, 0)


@given(TOKENS, st.data())
def test_one_changed_token_is_found(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))

    assert counts(tokens, [*tokens[:at], tokens[at] + 4, *tokens[at + 1 :]]) == (0, 0, 1)


@given(TOKENS, st.lists(st.integers(0, 3), max_size=30))
def test_whatever_differs_is_counted(want: list[int], got: list[int]) -> None:
    lost, repeated, changed = counts(want, got)

    assert (lost + repeated + changed == 0) == (want == got)
    assert len(got) == len(want) - lost + repeated


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"finish": ""}, "it ended with nothing, not length"),
        ({"finish": "error", "error": "PoisonRequest: given up"}, "PoisonRequest: given up"),
        ({"positions": [0, 2, 1]}, "numbered its tokens wrongly"),
        ({"text": "another"}, "its text differs"),
    ],
    ids=str,
)
def test_equal_tokens_are_not_enough(other: dict[str, object], note: str) -> None:
    comparison = compare([answer([1, 2, 3])], [[answer([1, 2, 3], **other)]])

    [difference] = comparison.differences
    assert note in difference.describe()
    assert comparison.identical == 0


def test_the_difference_names_round_request_and_place() -> None:
    want = [answer([1, 2, 3]), answer([4, 5, 6])]
    comparison = compare(want, [want, [want[0], answer([4, 9, 6])]])

    [difference] = comparison.differences
    assert difference.describe() == "request 2 in round 2: 1 changed, first at token 1"


GOOD = compare([answer([1, 2])], [[answer([1, 2])]])


@pytest.mark.parametrize(
    ("comparison", "delivered", "left", "trouble", "why"),
    [
        (GOOD, 2, [], "", []),
        (compare([answer([1, 2])], [[answer([1])]]), 2, [], "", ["1 tokens lost"]),
        (GOOD, 1, [], "", ["only 1 of 2 planned kills"]),
        (GOOD, 2, ["ray::WorkerActor (pid 7)"], "", ["left behind", "pid 7"]),
        (GOOD, 2, [], "the executor has failed for good", ["failed for good"]),
        (Comparison(0, 0, ()), 2, [], "", ["no token was compared"]),
    ],
)
def test_only_a_run_without_any_fault_passes(
    comparison: Comparison, delivered: int, left: list[str], trouble: str, why: list[str]
) -> None:
    found = reasons(comparison, kills_planned=2, kills_delivered=delivered, left_behind=left, trouble=trouble)

    assert len(found) == min(1, len(why))
    assert all(text in found[0] for text in why)


def options(json_path: Path | None = None) -> DemoOptions:
    return DemoOptions(2, 2, 0, 7, 2, 6, "mixed", True, json_path, "local")


def told(asked: DemoOptions, fault: str) -> Story:
    """The story of an undisturbed round and another one, in which one token meets ``fault``."""
    story = Story(asked, draw_requests(asked), lambda: "")
    for disturbed in (False, True):
        for number, one in enumerate(story.begin_round(disturbed=disturbed)):
            events = [TokenEvent("id", i, 10 * number + i, f"{i} ") for i in range(asked.max_tokens)]
            if disturbed and number == 1:
                planted = {
                    "none": events[3:4],
                    "lost": [],
                    "repeated": [events[3], events[3]],
                    "changed": [dataclasses.replace(events[3], token_id=99)],
                }
                events[3:4] = planted[fault]
            for event in [*events[:-1], dataclasses.replace(events[-1], finish_reason=FinishReason.LENGTH)]:
                story.token(one, event)
    return story


@pytest.mark.parametrize(("fault", "code"), [("none", 0), ("lost", 1), ("repeated", 1), ("changed", 1)])
def test_a_planted_fault_gives_exit_code_1_and_is_named(
    fault: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = options(tmp_path / "report.json")
    story = told(asked, fault)
    comparison = compare(story.expected, story.rounds)
    why = reasons(comparison, kills_planned=0, kills_delivered=0, left_behind=[])
    outcome = Outcome(asked, story, (), comparison, 1.0, 1.0, [], why, 2.0)
    monkeypatch.setattr("resilient_executor.reference.demo._Demo.run", lambda *_: outcome)

    assert demo.run(asked) == code

    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] == (code == 0)
    assert os.listdir(tmp_path) == ["report.json"]
    if code:
        assert "FAILED" in printed
        assert f"request 2 in round 1: 1 {fault}, first at token" in printed
        assert report["comparison"][fault] == 1
        assert report["comparison"]["identical"] == 1
    else:
        assert "PASSED" in printed
        assert "2/2 identical" in printed
        assert report["comparison"]["tokens"] == 12
