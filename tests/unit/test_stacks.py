"""Stacks of processes that cannot be asked: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resilient_executor import stacks
from resilient_executor.processes import identify, vitals
from resilient_executor.protocol import ProcessIdentity

PRELUDE = """
import re, threading
from resilient_executor import stacks
stacks.install()
stacks.install()

def hold_the_lock():
    # Hours in C, and the interpreter's lock is not let go: backtracking.
    print("ready", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")

def wait_for_ever():
    print("ready", flush=True)
    threading.Event().wait()

def spin():
    print("ready", flush=True)
    while True:
        pass
"""


@contextmanager
def process(code: str) -> Iterator[ProcessIdentity]:
    child = subprocess.Popen([sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield identify(child.pid, "node")
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def dump(identity: ProcessIdentity) -> str:
    return asyncio.run(stacks.dump(identity, 5.0))


@pytest.mark.parametrize("function", ["hold_the_lock", "wait_for_ever", "spin"])
def test_the_stack_of_a_stuck_process_shows_where(function: str) -> None:
    with process(f"{function}()") as identity:
        time.sleep(0.1)
        for _ in range(2):
            found = dump(identity)
            assert f"in {function}" in found
            assert found.count("most recent call first") == 1, "the last dump is still there"


def test_a_stopped_process_is_named_so_and_goes_on_unharmed() -> None:
    with process("spin()") as identity:
        os.kill(identity.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert dump(identity) == "(no stacks: the process is stopped)"
        seen = vitals(identity)
        assert seen is not None
        assert seen.describe() == "is stopped"
        os.kill(identity.pid, signal.SIGCONT)
        assert "in spin" in dump(identity)


def test_a_process_without_a_handler_is_not_killed_by_the_question() -> None:
    with process("import signal\nsignal.signal(stacks.SIGNAL, signal.SIG_DFL)\nwait_for_ever()") as identity:
        assert dump(identity) == "(no stacks: the process has not come up far enough)"
        assert vitals(identity) is not None


def test_a_process_that_is_gone_has_no_stacks() -> None:
    with process("spin()") as identity:
        pass
    assert dump(identity) == "(no stacks: the process has ended)"
    assert vitals(identity) is None


def test_vitals_tell_who_runs() -> None:
    with process("spin()") as spinning, process("wait_for_ever()") as waiting:
        time.sleep(0.3)
        first, second = vitals(spinning), vitals(waiting)
        assert first is not None
        assert second is not None
        assert (first.runnable, first.describe()) == (True, "runs")
        assert (second.runnable, second.describe()) == (False, "sleeps")
        assert first.cpu_ticks > second.cpu_ticks
    assert vitals(ProcessIdentity(os.getpid(), 1, "node")) is None, "another process with this pid"
