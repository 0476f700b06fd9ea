"""The command line: what it takes, what it refuses, and what it says when something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resilient_executor import reference
from resilient_executor.cli import main
from resilient_executor.errors import PlacementError, StartupError
from resilient_executor.reference import demo
from resilient_executor.reference.demo import DemoOptions


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """What the demo was asked for; it is not run."""
    options: list[DemoOptions] = []

    def run(one: DemoOptions) -> int:
        options.append(one)
        return 0

    monkeypatch.setattr(demo, "run", run)
    return options


def test_the_demo_has_defaults(taken: list[DemoOptions]) -> None:
    assert main(["demo"]) == 0

    [options] = taken
    assert (options.tensor_parallel_size, options.pipeline_parallel_size, options.kills) == (2, 2, 3)
    assert (options.requests, options.max_tokens, options.sampling) == (6, 80, "mixed")
    assert (options.plain, options.json_path, options.address) == (False, None, "local")


def test_every_setting_of_the_demo_arrives(taken: list[DemoOptions], tmp_path: Path) -> None:
    sizes = ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "4", "--kills", "0", "--requests", "2"]
    others = ["--max-tokens", "9", "--sampling", "greedy", "--plain", "--address", "auto", "--seed", "0"]
    assert main(["demo", *sizes, *others, "--json", str(tmp_path / "report.json")]) == 0

    assert taken == [DemoOptions(1, 4, 0, 0, 2, 9, "greedy", True, tmp_path / "report.json", "auto")]
    assert taken[0].world_size == 4


def test_without_a_seed_each_run_has_another_one(taken: list[DemoOptions]) -> None:
    for _ in range(8):
        main(["demo"])

    assert len({options.seed for options in taken}) > 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["dmo"], "dmo"),
        (["demo", "--kills", "-1"], "--kills"),
        (["demo", "--kills", "three"], "three"),
        (["demo", "--requests", "0"], "--requests"),
        (["demo", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "--tensor-parallel-size", "0"], "--tensor-parallel-size"),
        (["demo", "--pipeline-parallel-size", "1.5"], "--pipeline-parallel-size"),
        (["demo", "--seed", "-3"], "--seed"),
        (["demo", "--sampling", "beam"], "beam"),
        (["demo", "--json", "no/such/folder/report.json"], "no/such/folder"),
        (["demo", "--json", "."], "--json"),
        (["demo", "more"], "more"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_one_line_that_names_it(
    arguments: list[str], named: str, taken: list[DemoOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err
    assert "--help" in err
    assert taken == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tensor-parallel-size", "3"], "attention heads"),
        (["--pipeline-parallel-size", "5"], "layers"),
        (["--max-tokens", "5000"], "at most"),
        (["--address", "ray://somewhere:1"], "Ray Client"),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_refused_before_anything_is_started(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err


def test_help_shows_defaults_exit_codes_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0

    out = capsys.readouterr().out
    assert "(default: 3)" in out
    assert "exit codes:" in out
    assert "resilient-executor demo --kills 10 --seed 7" in out


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2

    assert "demo" in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    assert capsys.readouterr().out.startswith("resilient-executor 0.")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StartupError("rank 0 raised\n  something long"), 2, "error: rank 0 raised something long\n"),
        (PlacementError("no room"), 2, "error: no room\n"),
        (OSError("disk full"), 2, "error: disk full\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=repr,
)
def test_an_error_is_one_line_and_a_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: DemoOptions) -> int:
        raise error

    monkeypatch.setattr(demo, "run", fail)
    assert main(["demo"]) == code

    assert capsys.readouterr().err == f"resilient-executor: {said}"


def test_without_the_reference_engine_the_demo_names_the_command_that_repairs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "resilient_executor.reference.demo", None)
    monkeypatch.delattr(reference, "demo")
    assert main(["demo"]) == 2

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "pip install 'resilient-executor[reference]'" in err
