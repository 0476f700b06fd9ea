"""The table of docs/chaos.md: every failure is in it, and every test, experiment and fault that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from resilient_executor.chaos.faults import MIXTURE, PHASES, Kind

ROOT = Path(__file__).resolve().parents[2]
_, _, TABLE = (ROOT / "docs" / "chaos.md").read_text().partition("## Which failure is covered where")
#: id -> what the kit does, the tests
ROWS = {
    cells[1].strip(): (cells[3], cells[4])
    for line in TABLE.splitlines()
    if re.match(r"\| F\d", line) and (cells := line.split("|"))
}


def names_in(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_failure_has_a_row_with_a_test() -> None:
    assert list(ROWS) == [f"F{number}" for number in range(1, 38)]
    assert all(names_in(tests) for _, tests in ROWS.values())


@pytest.mark.parametrize("name", sorted({name for _, tests in ROWS.values() for name in names_in(tests)}))
def test_the_tests_exist(name: str) -> None:
    file, *path = name.split("::")
    scope: list[ast.stmt] = ast.parse((ROOT / "tests" / file).read_text()).body
    for part in path:
        [found] = [one for one in scope if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and one.name == part]
        scope = found.body
    assert path
    assert path[-1].startswith("test_")


@pytest.mark.parametrize("name", sorted({name for kit, _ in ROWS.values() for name in names_in(kit)}))
def test_the_experiments_and_faults_exist(name: str) -> None:
    command = name.removeprefix("resilient-chaos ")
    soaked = {kind.value for kind in MIXTURE} | set(PHASES)
    known = {kind.value for kind in Kind} if command != name else soaked
    assert (ROOT / "chaos" / "experiments" / f"{name}.json").exists() or command in known
