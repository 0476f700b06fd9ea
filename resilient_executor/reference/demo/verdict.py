"""The judge of a demo: compares what arrived with what an undisturbed run had given, and says what is wrong. Pure.

It knows nothing of the run but its history: every token that the client got, in the order of arrival. That no error was
raised proves nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What the client got for one request.

    Attributes:
        token_ids: every token, in the order of arrival.
        positions: the position that the engine named with each.
        text: the text that came with them.
        finish: why it ended, or "" if it did not.
        error: what it ended with, or "".
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    error: str = ""


@dataclass(frozen=True)
class Difference:
    """How one answer differs from the undisturbed one.

    Attributes:
        round: counted from 1.
        request: counted from 1.
        at: position of the first token that differs.
        note: what else is known.
    """

    round: int
    request: int
    at: int
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    note: str = ""

    def describe(self) -> str:
        """One line."""
        counts = ", ".join(f"{count} {what}" for what, count in self._counts().items() if count) or "tokens equal"
        note = f"; {self.note}" if self.note else ""
        return f"request {self.request} in round {self.round}: {counts}, first at token {self.at}{note}"

    def _counts(self) -> dict[str, int]:
        return {"lost": self.lost, "repeated": self.repeated, "changed": self.changed}


@dataclass(frozen=True)
class Comparison:
    """All answers of a disturbed run against the undisturbed one.

    Attributes:
        answers: how many were compared: requests times rounds.
        tokens: how many tokens the undisturbed run has for them.
    """

    answers: int
    tokens: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> int:
        """Answers without any difference."""
        return self.answers - len(self.differences)

    @property
    def lost(self) -> int:
        """Tokens that never came."""
        return sum(one.lost for one in self.differences)

    @property
    def repeated(self) -> int:
        """Tokens that came and were not due."""
        return sum(one.repeated for one in self.differences)

    @property
    def changed(self) -> int:
        """Tokens that came in the place of others."""
        return sum(one.changed for one in self.differences)


def compare(expected: Sequence[Answer], rounds: Sequence[Sequence[Answer]]) -> Comparison:
    """Compare every round with the undisturbed one.

    Raises:
        ValueError: a round has not as many answers.
    """
    differences = [
        difference
        for number, answers in enumerate(rounds, 1)
        for request, (want, got) in enumerate(zip(expected, answers, strict=True), 1)
        if (difference := _difference(want, got, number, request)) is not None
    ]
    tokens = sum(len(answer.token_ids) for answer in expected) * len(rounds)
    return Comparison(len(expected) * len(rounds), tokens, tuple(differences))


def reasons(
    comparison: Comparison, *, kills_planned: int, kills_delivered: int, left_behind: Sequence[str], trouble: str = ""
) -> list[str]:
    """Why the demo has failed, one line each; empty when it has not."""
    why = [trouble] if trouble else []
    if not comparison.tokens:
        why.append("no token was compared")
    if comparison.differences:
        why.append(
            f"{len(comparison.differences)} of {comparison.answers} answers differ from the undisturbed run "
            f"({comparison.lost} tokens lost, {comparison.repeated} repeated, {comparison.changed} changed)"
        )
    if kills_delivered < kills_planned:
        why.append(f"only {kills_delivered} of {kills_planned} planned kills were delivered")
    if left_behind:
        why.append(f"left behind after the shutdown: {', '.join(left_behind)}")
    return why


def _difference(want: Answer, got: Answer, number: int, request: int) -> Difference | None:
    lost, repeated, changed, at = _count(want.token_ids, got.token_ids)
    note = ""
    if got.error:
        note = got.error
    elif got.finish != want.finish:
        note = f"it ended with {got.finish or 'nothing'}, not {want.finish or 'nothing'}"
    elif not lost + repeated + changed and got.positions != list(range(len(got.token_ids))):
        note = "the engine numbered its tokens wrongly"
    elif not lost + repeated + changed and got.text != want.text:
        note = "its text differs"
    if lost + repeated + changed == 0 and not note:
        return None
    return Difference(number, request, at, lost, repeated, changed, note)


def _count(want: Sequence[int], got: Sequence[int]) -> tuple[int, int, int, int]:
    """Lost, repeated and changed tokens, and where the first of them is."""
    shorter = min(len(want), len(got))
    start = next((i for i in range(shorter) if want[i] != got[i]), shorter)
    rest = shorter - start
    # What is equal at both ends is equal: a single edit is then told exactly, also in a text that repeats itself.
    end = next((i for i in range(rest) if want[len(want) - 1 - i] != got[len(got) - 1 - i]), rest)
    want_middle, got_middle = want[start : len(want) - end], got[start : len(got) - end]
    lost = repeated = changed = 0
    for _, i1, i2, j1, j2 in _edits(want_middle, got_middle):
        both = min(i2 - i1, j2 - j1)
        changed += both
        lost += i2 - i1 - both
        repeated += j2 - j1 - both
    return lost, repeated, changed, start


def _edits(want: Sequence[int], got: Sequence[int]) -> list[tuple[str, int, int, int, int]]:
    opcodes = difflib.SequenceMatcher(None, list(want), list(got), autojunk=False).get_opcodes()
    return [code for code in opcodes if code[0] != "equal"]
