"""The guard around Ray's fatal check: a process outlives the death of a channel's writer (F19)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(how: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("guard_script.py")
    return subprocess.run([sys.executable, str(script), how], capture_output=True, text=True, timeout=90, check=False)


def test_a_process_survives_the_death_of_a_writer_that_it_has_not_read_from() -> None:
    done = run("guarded")
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout, done.stderr


def test_ray_alone_aborts_the_process() -> None:
    """When this fails, Ray has learnt to return an error there, and ray_guard.py can go."""
    done = run("bare")
    assert done.returncode != 0
    assert "must be in the local object store" in done.stderr
