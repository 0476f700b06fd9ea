"""The end of a user's script, in every way: what it prints, what it returns, and what it leaves (F22, F29)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import leaks
import psutil
import pytest
from probe_executor import within

SCRIPT = Path(__file__).with_name("exit_script.py")
MARK = "PROBE_SCRIPT_RUN"


class Script:
    """A run of exit_script.py. All processes that come of it carry a mark in their environment."""

    def __init__(self, mode: str, folder: Path, address: str = "") -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.said: list[str] = []
        self.stderr = folder / "stderr"
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), mode, str(folder), *([address] if address else [])],
                env={**os.environ, MARK: self.mark},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(line.strip() for line in self.process.stdout)

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Wait for something that the script does; fail when it ends before."""

        def come_or_gone() -> bool:
            assert self.process.poll() is None, f"ended before: {what}; {self.stderr.read_text()}"
            return bool(condition())

        within(seconds, come_or_gone, what)

    def until_said(self, word: str) -> None:
        self.until(lambda: any(line.startswith(word) for line in self.said), word)

    def end(self, seconds: float) -> tuple[int, str]:
        """Wait for its end; returns the exit code and all of standard error."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code, self.stderr.read_text()

    def processes(self) -> list[str]:
        """All processes of this run that exist."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.Error:
                continue
        return found

    def raylet(self) -> int:
        """The process id of its embedded Ray's raylet."""
        [line] = [line for line in self.said if line.startswith("serving")]
        return int(line.split()[1])

    def assert_nothing_left(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def kill(self) -> None:
        for line in self.processes():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def start(mode: str, address: str = "") -> Script:
        scripts.append(Script(mode, tmp_path, address))
        return scripts[-1]

    yield start
    for script in scripts:
        script.kill()


Run = Callable[..., Script]


class TestEmbedded:
    """With a Ray of its own, which goes when the script goes."""

    @pytest.mark.parametrize("mode", ["proper", pytest.param("forget", marks=pytest.mark.long)])
    def test_a_script_that_ends_is_silent_and_leaves_nothing(self, run: Run, mode: str) -> None:
        """F29: with and without an explicit shutdown."""
        script = run(mode)
        script.until_said("serving")
        code, stderr = script.end(seconds=20)
        assert (code, stderr) == (0, "")
        script.assert_nothing_left()
        assert leaks.semaphores(script.raylet()) == frozenset()

    def test_one_that_is_killed_takes_everything_with_it(self, run: Run) -> None:
        script = run("serve")
        script.until_said("serving")
        assert len(script.processes()) > 5
        script.process.kill()
        assert script.end(5)[0] == -signal.SIGKILL
        script.assert_nothing_left()  # Ray's own agents would take a minute to miss their raylet
        assert leaks.semaphores(script.raylet()) == frozenset()

    def test_ctrl_c_on_a_terminal(self, run: Run) -> None:
        """It goes to every process of the terminal's foreground group."""
        script = run("serve")
        script.until_said("serving")
        os.killpg(script.process.pid, signal.SIGINT)
        code, stderr = script.end(seconds=10)
        assert code in (-signal.SIGINT, 130)
        assert "KeyboardInterrupt" in stderr
        assert_only_traceback(stderr)
        script.assert_nothing_left()
        assert leaks.semaphores(script.raylet()) == frozenset()


def assert_only_traceback(stderr: str) -> None:
    """What Python prints for an exception, and nothing before or after it."""
    assert stderr.startswith("Traceback"), stderr
    assert stderr.count("Traceback") == 1, stderr


@pytest.mark.usefixtures("leak_check")
class TestJoined:
    """With a cluster that stays, in which nothing of the script must stay."""

    @pytest.mark.parametrize("mode", ["forget with standbys", pytest.param("forget in flight", marks=pytest.mark.long)])
    def test_a_script_that_ends(self, run: Run, ray_cluster: str, mode: str) -> None:
        """F29: also with a step and a call that would take minutes."""
        script = run(mode, ray_cluster)
        script.until_said("serving")
        code, stderr = script.end(seconds=20)
        assert (code, stderr) == (0, "")

    def test_one_that_is_killed_leaves_no_orphan(self, run: Run, ray_cluster: str) -> None:
        """Workers, standbys, supervisor and agent end with it, although their Ray goes on.

        Its graph's semaphores in shared memory go with the next executor on the node: there is nobody left to do it.
        """
        before = leaks.holdings()
        script = run("serve with standbys", ray_cluster)
        script.until_said("ready")
        script.process.kill()
        assert script.end(5)[0] == -signal.SIGKILL
        within(15, lambda: set(leaks.holdings().beyond(before)) <= {"semaphores"}, "nothing but semaphores is left")
        assert run("proper", ray_cluster).end(60)[0] == 0

    def test_a_script_that_fails_shows_its_own_error(self, run: Run, ray_cluster: str) -> None:
        code, stderr = run("error", ray_cluster).end(seconds=60)
        assert code == 1
        assert_only_traceback(stderr)
        assert stderr.rstrip().endswith("RuntimeError: the script's own")

    @pytest.mark.parametrize("moment", ["spawning", pytest.param("constructing", marks=pytest.mark.long)])
    def test_ctrl_c_during_the_start(self, run: Run, ray_cluster: str, moment: str) -> None:
        script = run("start", ray_cluster)
        script.until_said("starting")
        if moment == "spawning":
            within(30, lambda: any(f"script-{script.process.pid}" in row for row in leaks.placement_groups()), moment)
        else:
            script.until(lambda: list(script.folder.glob("constructed.*")), moment)
        self.interrupt(script)

    def test_ctrl_c_during_a_rebuild(self, run: Run, ray_cluster: str) -> None:
        script = run("rebuild", ray_cluster)
        script.until_said("rebuilding")
        script.until(lambda: list(script.folder.glob("constructed.2.*")), "the replacements are starting")
        self.interrupt(script)

    @staticmethod
    def interrupt(script: Script) -> None:
        os.kill(script.process.pid, signal.SIGINT)
        began = time.monotonic()
        code, stderr = script.end(seconds=15)
        assert time.monotonic() - began < 10
        assert code in (-signal.SIGINT, 130)
        assert stderr.rstrip().endswith("KeyboardInterrupt")
