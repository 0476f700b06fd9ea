"""What is left of an embedded cluster: real processes in the place of Ray's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resilient_executor import processes
from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor import estate
from resilient_executor.supervisor.estate import Estate


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process with one child, as a raylet with its helper."""
    monkeypatch.setattr(estate, "_LAST_S", 0.3)
    process = subprocess.Popen(["bash", "-c", "sleep 60 & echo up; wait"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    child = psutil.Process(process.pid).children()[0]
    yield process
    process.stdout.close()
    for one in (process, child):
        try:
            one.kill()
        except (OSError, psutil.NoSuchProcess):
            continue
    process.wait(5)


def test_a_helper_ends_with_its_daemon_and_so_does_what_they_had_in_memory(daemon: subprocess.Popen[str]) -> None:
    [helper] = psutil.Process(daemon.pid).children()
    left = Path(f"/dev/shm/sem.obj{daemon.pid}-1")
    left.touch()
    mine = Estate(daemon.pid)
    daemon.kill()
    daemon.wait(5)
    assert helper.is_running(), "as Ray's does"
    assert mine.clear()
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
    assert not left.exists()


def test_a_daemon_that_was_made_to_outlive_its_owner_keeps_everything(daemon: subprocess.Popen[str]) -> None:
    [helper] = psutil.Process(daemon.pid).children()
    assert not Estate(daemon.pid).clear()
    assert daemon.poll() is None
    assert helper.is_running()


def test_only_who_has_started_the_daemon_owns_it() -> None:
    """This process's parent is in the daemon's place here."""
    above = processes.parent(os.getppid())
    ticks = processes.start_ticks(above) if above else None
    assert Estate.of(ProcessIdentity(above, (ticks or 0) + 1, "")) is None
    assert Estate.of(ProcessIdentity(os.getpid(), 1, "")) is None


def test_workers_that_were_starting_end_with_their_daemon_and_nobody_elses(daemon: subprocess.Popen[str]) -> None:
    mine = Estate(daemon.pid)
    command = [sys.executable, "-c", "import time; time.sleep(60)", "workers/default_worker.py"]
    starting, another = (
        subprocess.Popen(command, env={**os.environ, "RAY_RAYLET_PID": str(pid)}) for pid in (daemon.pid, os.getpid())
    )
    try:
        daemon.kill()
        daemon.wait(5)
        assert mine.clear()
        assert starting.wait(5) == -9
        assert another.poll() is None
    finally:
        for one in (starting, another):
            one.kill()
            one.wait(5)
