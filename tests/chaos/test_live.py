"""The command line and the ready experiments against a running engine, as an SRE uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilient_executor.chaos import cli

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent.parent / "chaos" / "experiments"
BIN = Path(sys.executable).parent


class Server:
    """An engine of :mod:`serving`."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / "serving.py"), name, json.dumps(settings)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def end(self) -> dict[str, Any]:
        """Close it; what became of the requests."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result

    def chaos(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``resilient-chaos``."""
        command = [sys.executable, "-m", "resilient_executor.chaos.cli", *arguments]
        return subprocess.run(
            [*command, "--address", self.address, "--name", self.name],
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip

    def epoch(self) -> int:
        """The generation that serves, as ``resilient-chaos`` sees it."""
        shown = re.search(r"epoch (\d+), HEALTHY", self.chaos("targets").stdout)
        assert shown is not None
        return int(shown[1])

    def experiment(self, name: str, journal: Path) -> dict[str, Any]:
        """``chaos run`` one of the ready experiments; its journal."""
        env = {**os.environ, "CHAOS_NAME": self.name, "CHAOS_ADDRESS": self.address}
        command = [str(BIN / "chaos"), "--no-version-check", "--log-file", str(journal.with_suffix(".log"))]
        done = subprocess.run(
            [*command, "run", "--journal-path", str(journal), str(EXPERIMENTS / f"{name}.json")],
            capture_output=True, text=True, timeout=240, env=env, check=False,
        )  # fmt: skip
        assert journal.exists(), done.stdout + done.stderr
        result: dict[str, Any] = json.loads(journal.read_text())
        return result


@contextmanager
def server(name: str, **settings: Any) -> Iterator[Server]:
    running = Server(name, {"backoff_initial_s": 0.05, **settings})
    with running.process:  # closes its pipes
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.process.kill()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """One that serves for all tests of this module that leave it serving; at the end, what its clients got."""
    settings = {"heartbeat_timeout_s": 4.0, "step_deadline_min_s": 5.0, "warm_standbys": 1, "max_restarts": 1000}
    with server("game-day", allow_chaos="EXPERIMENTS" in os.environ, **settings) as one:
        yield one
        result = one.end()
        assert result["wrong"] == 0
        assert result["served"] > 0
        assert not result["failed"]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_game_day_on_the_command_line(running: Server) -> None:
    shown = running.chaos("targets")
    assert "rank 1, stage 1" in shown.stdout, shown.stderr
    dry = running.chaos("kill", "--rank", "1", "--dry-run")
    assert dry.returncode == 0
    assert "rank 1 (pid" in dry.stdout
    other = running.chaos("kill", "--namespace", "another")
    assert other.returncode == cli.EXIT_REFUSED
    assert "game-day in namespace resilient-executor" in other.stderr
    cable = running.chaos("pull_cable")
    assert cable.returncode == cli.EXIT_REFUSED
    assert "resilient-chaos cluster run" in cable.stderr

    killed = running.chaos("kill", "--rank", "1")
    assert killed.returncode == cli.EXIT_SURVIVED, killed.stdout + killed.stderr
    assert "survived" in killed.stdout
    before = running.epoch()
    standby = running.chaos("kill_standby")
    assert standby.returncode == cli.EXIT_SURVIVED, standby.stdout + standby.stderr
    assert "a standby (pid" in standby.stdout
    assert running.epoch() == before
    storm = running.chaos("storm", "--mtbf", "2s", "--duration", "6s", "--max-faults", "2", "--protect", "rank:0",
                          "--seed", "11")  # fmt: skip
    assert storm.returncode == cli.EXIT_SURVIVED, storm.stdout + storm.stderr
    assert "rank 0 (" not in storm.stdout


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_ready_experiments_run_with_the_chaos_toolkit(running: Server, tmp_path: Path) -> None:
    """``EXPERIMENTS=all`` runs every one that leaves the executor serving."""
    pytest.importorskip("chaoslib", reason="needs the extra chaos")
    names = os.environ.get("EXPERIMENTS", "kill-worker,kill-agent").split(",")
    if names == ["all"]:
        names = sorted(file.stem for file in EXPERIMENTS.glob("*.json") if file.stem != "spend-budget")
    for name in names:
        journal = running.experiment(name, tmp_path / f"{name}.json")
        said = (tmp_path / f"{name}.log").read_text()
        print(f"{name}: {journal['status']}, {journal['duration']:.1f} s")
        assert (journal["status"], journal["deviated"]) == ("completed", False), f"{name}: {said}"
        assert "So it was" in said


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_ctrl_c_lets_go_on_what_was_stopped() -> None:
    with server("paused", heartbeat_timeout_s=30.0) as running:
        refused = running.chaos("hang", "--rank", "1")
        assert refused.returncode == cli.EXIT_REFUSED
        assert "allow_chaos" in refused.stderr
        command = [sys.executable, "-m", "resilient_executor.chaos.cli", "stop", "--rank", "0", "--within", "60s"]
        with subprocess.Popen(
            [*command, "--address", running.address, "--name", running.name], stdout=subprocess.PIPE, text=True,
            preexec_fn=_hear_ctrl_c,  # noqa: PLW1509 - one system call
        ) as stopping:  # fmt: skip
            assert stopping.stdout is not None
            lines = [stopping.stdout.readline(), stopping.stdout.readline()]
            pid = int(lines[-1].partition("(pid ")[2].split(" ")[0])
            assert _state(pid) == "T", lines
            stopping.send_signal(signal.SIGINT)
            assert stopping.wait(30) == cli.EXIT_INTERRUPTED
        assert _state(pid) in ("S", "R")
        time.sleep(1.0)
        assert running.end() | {"served": 0} == {"served": 0, "wrong": 0, "epoch": 1, "failed": ""}


def _hear_ctrl_c() -> None:
    """In the child: a shell without job control starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_an_executor_without_a_budget_says_that_it_has_failed(tmp_path: Path) -> None:
    pytest.importorskip("chaoslib", reason="needs the extra chaos")
    with server("no-budget", max_restarts=0) as running:
        journal = running.experiment("spend-budget", tmp_path / "spend-budget.json")
        assert journal["status"] == "completed", (tmp_path / "spend-budget.log").read_text()
        killed = running.chaos("kill")
        assert killed.returncode == cli.EXIT_REFUSED
        assert "the steady state fails" in killed.stderr
        assert running.end()["failed"]
