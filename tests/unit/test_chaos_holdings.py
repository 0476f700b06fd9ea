"""What a soak counts as left behind: its own, and nothing that only looks like it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_executor.chaos import holdings

SHM = Path("/dev/shm")


@pytest.fixture
def semaphores() -> Iterator[list[Path]]:
    """Files in ``/dev/shm``, which are removed afterwards."""
    made: list[Path] = []
    yield made
    for path in made:
        path.unlink(missing_ok=True)


def made(semaphores: list[Path], pid: int, at_ns: int) -> str:
    path = SHM / f"sem.hdr{pid}-{at_ns}"
    path.write_bytes(b"x" * 32)
    semaphores.append(path)
    return path.name


def test_semaphores_of_strangers_are_not_ours(semaphores: list[Path]) -> None:
    """Pids come round: a child of ours, even a dead one, may have that of a raylet that left something long ago."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its zombie stays
        made(semaphores, child.pid, time.time_ns())
        assert holdings.things()["shared memory"] == []


def test_semaphores_of_our_raylet_are_told_if_they_are_not_older_than_it(semaphores: list[Path]) -> None:
    raylet, since = 4_194_305, time.time_ns()  # above the largest pid
    made(semaphores, raylet, since - 1)
    left = made(semaphores, raylet, since + 1)
    holdings.remember_raylet(raylet, since)
    assert holdings.things()["shared memory"] == [left]


def test_a_leak_is_told_with_its_age_and_who_holds_it(semaphores: list[Path]) -> None:
    name = made(semaphores, 4_194_306, 1)
    assert holdings.told_in_full(name).endswith("s ago, mapped by nobody)")
    with open(SHM / name, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert f"mapped by {os.getpid()})" in holdings.told_in_full(name)
    assert holdings.told_in_full("sem.hdr0-0") == "sem.hdr0-0 (gone meanwhile)"
