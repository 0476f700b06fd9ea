"""The demo as a user runs it: a process of its own, with a Ray of its own, that kills real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leaks
import psutil
import pytest

#: A demo of few tokens; on a machine that does nothing else it takes 15 s.
SMALL = ("--requests", "2", "--max-tokens", "20", "--seed", "3")
pytestmark = pytest.mark.timeout(300)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that prints lines; killed, if it has not ended by itself."""
    command = [sys.executable, "-m", "resilient_executor", "demo", "--plain", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # A session of its own, so that its group can get a Ctrl-C of its own, Ray's processes included.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*arguments: str) -> tuple[int, str, str]:
    with running(*arguments) as process:
        out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came; {process.stderr.read() if process.stderr else ''}")


def gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while leaks.alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_worker_is_killed_and_every_token_arrives(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code, out, err = run("--kills", "1", *SMALL, "--json", str(path))

    assert (code, err) == (0, ""), out
    lines = out.splitlines()
    assert lines[0] == (
        "Answers 2 prompts with 4 worker processes (2 pipeline stages x 2 tensor-parallel ranks), kills 1 of them with "
        "SIGKILL meanwhile, and compares every token with an undisturbed run."
    )
    assert lines[-1].startswith("PASSED")
    assert not any(noise in out for noise in ("Traceback", "raylet", "WARNING", "\x1b"))

    report: dict[str, Any] = json.loads(path.read_text())
    assert report["passed"]
    assert report["reasons"] == report["left_behind"] == []
    compared = report["comparison"]
    assert compared["identical"] == compared["answers"] == 2 * report["rounds"]
    assert compared["tokens"] == 40 * report["rounds"]
    assert (compared["lost"], compared["repeated"], compared["changed"]) == (0, 0, 0)
    [kill], [incident] = report["kills"], report["incidents"]
    assert kill["delivered"]
    assert kill["signal"] in (signal.SIGKILL, None)  # older kernels do not tell
    assert not psutil.pid_exists(kill["pid"])
    assert incident["cause"]["pid"] == kill["pid"]
    assert incident["cause"]["rank"] == kill["rank"]
    assert incident["outcome"] == "recovered"
    assert 0 <= kill["noticed_after_s"] == incident["noticed_after_s"] < 5
    assert incident["outage_s"] >= incident["phases"]["initialise"]


def test_the_second_kill_meets_the_rebuild_after_the_first(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code, out, err = run("--kills", "2", "--tensor-parallel-size", "1", *SMALL, "--json", str(path))

    assert (code, err) == (0, ""), out
    report = json.loads(path.read_text())
    first, second = report["kills"]
    assert (first["epoch"], first["phase"]) == (1, "")
    assert second["epoch"] == 2
    assert second["phase"] != ""
    [incident] = report["incidents"]
    assert incident["epochs_tried"] == [2, 3]


@pytest.mark.parametrize(
    ("line", "pause_s", "number"),
    [
        ("Ctrl-C", 1.0, signal.SIGINT),
        pytest.param("embedded Ray runs", 1.0, signal.SIGINT, marks=pytest.mark.long),
        pytest.param("workers serve", 0.5, signal.SIGINT, marks=pytest.mark.long),
        ("kill 1 of 2", 1.0, signal.SIGTERM),
    ],
    ids=["while Ray starts", "while workers start", "while they answer", "during a rebuild"],
)
def test_an_interrupt_leaves_nothing_behind(line: str, pause_s: float, number: signal.Signals) -> None:
    sizes = ("--tensor-parallel-size", "1", "--requests", "4", "--max-tokens", "150")
    with running("--kills", "2", *sizes) as process:
        read_until(process, line)
        time.sleep(pause_s)
        assert process.poll() is None
        started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        # A terminal sends Ctrl-C to the whole group; whoever terminates a program names its process.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=120)

    assert process.returncode == 128 + number, out + err
    assert err == ""
    assert out.splitlines()[-1] == "interrupted; nothing is left behind"
    assert gone(started)


def test_a_reader_that_has_enough_ends_it_cleanly() -> None:
    with running("--kills", "0", *SMALL) as process:
        read_until(process, "embedded Ray runs")
        started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert started
    assert gone(started)


def test_what_cannot_work_is_one_line_and_exit_code_2() -> None:
    assert run("--tensor-parallel-size", "3") == (
        2,
        "",
        "resilient-executor: error: tensor parallel size 3 does not divide the attention heads 8\n",
    )
    code, out, err = run("--kills", "many")
    assert (code, out, err.count("\n")) == (2, "", 1)
