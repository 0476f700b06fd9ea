"""Processes are told apart, proven gone, and their ends are known, whoever their parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from resilient_executor import processes
from resilient_executor.processes import ProcessHandle, identify, start_ticks
from resilient_executor.protocol import ProcessIdentity

NODE = "node"


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize("reaped", [False, True])
def test_the_end_is_known_before_and_after_the_parent_has_reaped_it(reaped: bool) -> None:
    """A pidfd becomes readable when the process is a zombie; the kernel records its status when it is reaped."""
    for how in (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM):
        child = sleeper()
        with ProcessHandle(identify(child.pid, NODE)) as handle:
            assert not handle.wait(0.0)
            child.send_signal(how)
            assert handle.wait(5.0)
            if reaped:
                child.wait(5.0)
            status = handle.exit_status()
            child.wait(5.0)
        assert (status.pid, status.signal, status.exit_code) == (child.pid, how, None)


def test_the_end_of_a_process_that_reaps_itself_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A raylet ignores its children's ends. Between its death and its disappearance such a process is in state X."""
    monkeypatch.setattr(processes, "_REAPING_S", 0.0)
    parent = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "children = [subprocess.Popen(['sleep', '60']).pid for _ in range(20)]\n"
        "print(*children, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reaper:
        assert reaper.stdout is not None
        pids = [int(pid) for pid in reaper.stdout.readline().split()]
        assert len(pids) == 20
        handles = [ProcessHandle(identify(pid, NODE)) for pid in pids]
        for handle in handles:
            with handle:
                handle.kill()
                assert handle.wait(10.0)
                assert handle.exit_status().signal == signal.SIGKILL
        reaper.communicate(timeout=10)


@pytest.mark.parametrize("reaped", [False, True])
def test_exit_codes(reaped: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(7)"], stdin=subprocess.PIPE)
    with ProcessHandle(identify(child.pid, NODE)) as handle:
        assert child.stdin is not None
        child.stdin.close()
        assert handle.wait(10.0)
        if reaped:
            child.wait(5.0)
        status = handle.exit_status()
        child.wait(5.0)
    assert (status.exit_code, status.signal) == (7, None)


def test_a_stopped_process_can_be_killed_and_proven_gone() -> None:
    child = sleeper()
    with ProcessHandle(identify(child.pid, NODE)) as handle:
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        assert not handle.wait(0.0)
        handle.kill()
        assert handle.wait(5.0)
    assert child.wait(5.0) == -signal.SIGKILL


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    own = identify(os.getpid(), NODE)
    with pytest.raises(ProcessLookupError):
        ProcessHandle(ProcessIdentity(own.pid, own.start_ticks + 1, NODE))


def test_a_process_that_only_ray_names_must_at_least_be_a_worker_of_ray() -> None:
    with pytest.raises(ProcessLookupError):
        ProcessHandle(ProcessIdentity(os.getpid(), 0, NODE))


def test_a_zombie_does_not_count_as_running() -> None:
    child = sleeper()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    with pytest.raises(ProcessLookupError):
        identify(child.pid, NODE)
    child.wait(5.0)


def test_killing_twice_is_fine() -> None:
    child = sleeper()
    with ProcessHandle(identify(child.pid, NODE)) as handle:
        handle.kill()
        assert handle.wait(5.0)
        child.wait(5.0)
        handle.kill()
    assert handle.fd == -1


def test_a_process_that_others_have_killed_is_dying_before_it_is_dead() -> None:
    """A stopped parent cannot reap, and a process with many threads takes its time: the kill counts from the start."""
    threads = "import threading, time; [threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(50)]"
    for _ in range(20):
        child = subprocess.Popen([sys.executable, "-c", threads])
        with ProcessHandle(identify(child.pid, NODE)) as handle:
            time.sleep(0.1)
            assert not handle.is_dying()
            child.kill()
            assert handle.is_dying()
            assert handle.wait(5.0)
            assert handle.is_dying()
        child.wait(5.0)


def test_a_stopped_process_is_not_dying() -> None:
    child = sleeper()
    with ProcessHandle(identify(child.pid, NODE)) as handle:
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        assert not handle.is_dying()
        handle.kill()
        assert handle.is_dying()
    child.wait(5.0)
