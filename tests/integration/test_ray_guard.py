"""The guard around Ray's fatal check: with it a process outlives the death of a channel's writer, without it it does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def run(address: str, how: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("guard_script.py")
    return subprocess.run(
        [sys.executable, str(script), address, how], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.usefixtures("leak_check")
class TestDeathOfAWriterThatWasNeverRead:
    def test_the_process_survives_it(self, ray_cluster: str) -> None:
        """F19."""
        done = run(ray_cluster, "guarded")
        assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr

    def test_ray_alone_aborts_the_process(self, ray_cluster: str) -> None:
        """When this fails, Ray has learnt to return an error there, and ray_guard.py can go."""
        done = run(ray_cluster, "bare")
        assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")
        assert "must be in the local object store" in done.stderr
