"""Which silent supervisor is only slow, by what the kernel says of its process. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from resilient_executor.processes import identify, vitals
from resilient_executor.supervisor.client import SLOW_S, Supervision


def supervision(pid: int | None, silent_s: float) -> Supervision:
    """One whose supervisor is this process, and has been silent for so long."""
    made = Supervision.__new__(Supervision)
    made._lock = threading.RLock()
    made._supervisor_process = identify(pid, "node") if pid is not None else None
    made._heard_at = made._expected_at = time.monotonic() - silent_s
    return made


@pytest.mark.parametrize(
    ("code", "number", "silent_s", "slow"),
    [
        ("while True: pass", None, 10.0, True),
        ("while True: pass", None, SLOW_S + 1.0, False),
        ("while True: pass", signal.SIGSTOP, 10.0, False),
        ("import time; time.sleep(60)", None, 10.0, False),
    ],
    ids=["runs", "runs for too long", "is stopped", "sleeps"],
)
def test_only_one_that_runs_is_slow(code: str, number: int | None, silent_s: float, slow: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        found = supervision(process.pid, silent_s)
        time.sleep(1.0)  # its interpreter starts
        if number is not None:
            os.kill(process.pid, number)
            time.sleep(0.2)
        assert found._is_slow() is slow, vitals(identify(process.pid, "node"))
    finally:
        process.kill()
        process.wait()
    assert not found._is_slow(), "one that is gone is not slow"


def test_one_that_has_not_come_up_yet_has_time() -> None:
    assert supervision(None, 10.0)._is_slow()
    assert not supervision(None, SLOW_S + 1.0)._is_slow()
