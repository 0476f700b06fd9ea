"""The reference engine's worker, which gets stuck on demand: in Python, in C with the lock, in C without it."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from resilient_executor.reference.worker import ReferenceWorker

#: Way to be stuck -> the function whose name must be in the report.
KINDS = {
    "blocked in python": "_wait_for_ever",
    "spinning in python": "_spin",
    "spinning in C with the lock": "_backtrack",
    "spinning in C without the lock": "_derive",
}


def _wait_for_ever() -> None:
    threading.Event().wait()


def _spin() -> None:
    while True:
        pass


def _backtrack() -> None:
    """Hours of backtracking in C; the interpreter's lock is held throughout, and no heartbeat can be answered."""
    re.match("(a+)+$", "a" * 60 + "b")


def _derive() -> None:
    """Hours of hashing in C, without the lock."""
    hashlib.pbkdf2_hmac("sha256", b"x", b"x", (1 << 31) - 1)


def _hold(seconds: float) -> None:
    """Hold the lock for about so long, in C, in pieces that are longer than any heartbeat limit."""
    end = time.monotonic() + seconds
    length = 22
    while time.monotonic() < end:
        began = time.monotonic()
        re.match("(a+)+$", "a" * length + "b")
        took = time.monotonic() - began
        length += took < seconds / 4


class StuckWorker(ReferenceWorker):
    """See the module. ``load_s``: how long the weights take to load."""

    def __init__(self, assignment: Any, *, load_s: float = 0.0, **arguments: Any) -> None:
        super().__init__(assignment, **arguments)
        self._me = assignment.rank
        self._load_s = load_s
        self._plan: tuple[str, int, str] | None = None
        self._hold_s = 0.0
        self._sleep_s = 0.0

    def load_model(self) -> None:
        if self._load_s:
            _hold(self._load_s)
        super().load_model()

    def arrange(self, kind: str, rank: int, after: int, mark: str) -> None:
        """Get stuck in the step after ``after`` more; leave a file at ``mark`` then."""
        self._plan = (kind, after, mark) if rank == self._me else None

    def slow_down(self, sleep_s: float, hold_s: float) -> None:
        """Have every step take longer: asleep, and with the lock held."""
        self._sleep_s, self._hold_s = sleep_s, hold_s

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        time.sleep(self._sleep_s)
        if self._hold_s:
            _hold(self._hold_s)
        if self._plan is not None:
            kind, after, mark = self._plan
            self._plan = (kind, after - 1, mark)
            if after <= 0:
                Path(mark).write_text(repr(time.time()))
                globals()[KINDS[kind]]()
        return super().execute_stage(scheduler_output, grammar_output, intermediate)


class PoisonedWorker(ReferenceWorker):
    """Crashes as a bad kernel does whenever one token is in its batch."""

    POISON = 2047

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        if any(self.POISON in request.token_ids for request in scheduler_output.requests):
            os.abort()
        return super().execute_stage(scheduler_output, grammar_output, intermediate)
