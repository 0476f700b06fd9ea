"""Processes as the kernel knows them: identity, death and exit status, without the gap between check and kill.

Ray's word that an actor is dead is not proof: after ``ray.kill`` of a stopped process the process is still there, with
all its device memory. A pidfd is proof: it names one process and no later one with the same pid, becomes readable when
that process has ended, and (Linux 6.15 and newer) tells how it ended, although another process is its parent.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from typing import Final

from resilient_executor.protocol import ExitStatus, ProcessIdentity, Vitals

# include/uapi/linux/pidfd.h: struct pidfd_info, PIDFD_GET_INFO, PIDFD_INFO_EXIT
_PIDFD_INFO: Final = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO: Final = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT: Final = 1 << 3

#: include/linux/sched.h, in field 9 of ``/proc/PID/stat``
_PF_EXITING: Final = 0x4

#: How long a process may be in the middle of being reaped, in seconds.
_REAPING_S: Final = 0.03

#: Start time of a process that has not said it itself: only Ray names its pid. Then it must at least be a Ray worker.
UNKNOWN_START: Final = 0


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when there is no such process (or only its zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def vitals(identity: ProcessIdentity) -> Vitals | None:
    """How a process is; None when it is gone. Reads a file for each of its threads: some tens of microseconds each."""
    folder = f"/proc/{identity.pid}"
    try:
        state, *fields = _stat(f"{folder}/stat")
        if identity.start_ticks not in (UNKNOWN_START, int(fields[18])):
            return None
        threads = [thread.path for thread in os.scandir(f"{folder}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return None
    runnable = False
    for thread in threads:
        try:
            runnable = runnable or _stat(f"{thread}/stat")[0] == b"R"
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Vitals(state.decode(), int(fields[10]) + int(fields[11]), runnable)


def _stat(path: str) -> list[bytes]:
    """The fields of a ``stat`` file from the state on."""
    with open(path, "rb") as stat:
        return stat.read().rpartition(b")")[2].split()


def identify(pid: int, node_id: str) -> ProcessIdentity:
    """The identity of a running process.

    Raises:
        ProcessLookupError: there is no such process.
    """
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(pid, ticks, node_id)


def take_ordinary_priority() -> bool:
    """Undo the niceness that Ray gives to its workers (15), for this whole process; returns whether that was allowed.

    For those who watch: beside processes of ordinary priority they would get a thirtieth of a core, and come too late.
    Only a privileged process may do it.
    """
    try:
        for thread in os.listdir("/proc/self/task"):  # Linux has a niceness for each thread
            if os.getpriority(os.PRIO_PROCESS, int(thread)) > 0:
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass  # a thread that has just ended
    return True


def _is(identity: ProcessIdentity) -> bool:
    """Whether the process with this pid is still the one that is meant."""
    ticks = start_ticks(identity.pid)
    if identity.start_ticks != UNKNOWN_START:
        return ticks == identity.start_ticks
    if ticks is None:
        return False
    with open(f"/proc/{identity.pid}/cmdline", "rb") as title:
        return title.read().startswith(b"ray::")


class ProcessHandle:
    """A pidfd on one process of this machine. Close it, or use it as a context manager."""

    def __init__(self, identity: ProcessIdentity) -> None:
        """Open the process.

        Raises:
            ProcessLookupError: it has ended, or its pid belongs to another process now.
        """
        self.identity = identity
        self.fd = os.pidfd_open(identity.pid)
        if not _is(identity):
            os.close(self.fd)
            raise ProcessLookupError(f"process {identity.pid} has ended")

    def __enter__(self) -> ProcessHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_dying(self) -> bool:
        """Whether its end has begun: SIGKILL is pending, or its first thread has exited and others are about to.

        The end of a large process takes a while on a busy machine. Its sockets are closed early, so that others hear of
        its death before the pidfd tells of it.
        """
        pid = self.identity.pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, *fields = stat.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/status", "rb") as status:
                pending = [int(line.split()[1], 16) for line in status if line.startswith((b"SigPnd", b"ShdPnd"))]
        except (FileNotFoundError, ProcessLookupError):
            return True
        kill_pending = any(mask & (1 << (signal.SIGKILL - 1)) for mask in pending)
        return state in (b"Z", b"X") or bool(int(fields[5]) & _PF_EXITING) or kill_pending

    def kill(self) -> None:
        """Send SIGKILL; nothing happens when it has ended already."""
        try:
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        except ProcessLookupError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended, after waiting for that at most ``timeout_s``."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def exit_status(self) -> ExitStatus:
        """How it ended; without code and signal where the kernel cannot tell. Call it after the end only."""
        pid = self.identity.pid
        # Until it is reaped its /proc/PID/stat has the status; from then on the pidfd has it. In between neither may,
        # for a moment.
        deadline = time.monotonic() + _REAPING_S
        while True:
            status = self._status_of_zombie()
            if status is None:
                status = self._recorded_status()
            if status is not None:
                if os.WIFSIGNALED(status):
                    return ExitStatus(pid, None, os.WTERMSIG(status), time.time())
                return ExitStatus(pid, os.WEXITSTATUS(status), None, time.time())
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return ExitStatus(pid, None, None, time.time(), "this kernel does not tell how it ended")

    def _status_of_zombie(self) -> int | None:
        """The status in ``/proc/PID/stat`` (its last field), until nothing of the process is left.

        Its state is Z (zombie), or X where its parent ignores its children, as a raylet does: such a process reaps
        itself, and on a busy machine it can be in the middle of that for a tenth of a second.
        """
        try:
            with open(f"/proc/{self.identity.pid}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        same = int(fields[19]) == self.identity.start_ticks or self.identity.start_ticks == UNKNOWN_START
        return int(fields[49]) if fields[0] in (b"Z", b"X") and same else None

    def _recorded_status(self) -> int | None:
        """The status that the kernel keeps with the pidfd of a process that has been reaped."""
        buffer = bytearray(_PIDFD_INFO.size)
        struct.pack_into("=Q", buffer, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self.fd, _PIDFD_GET_INFO, buffer)
        except OSError:
            return None
        mask, *_, status = _PIDFD_INFO.unpack(buffer)
        return int(status) if mask & _PIDFD_INFO_EXIT else None


def parent(pid: int) -> int:
    """The parent of a process of this machine.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return int(_stat(f"/proc/{pid}/stat")[1])
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None


def children(pid: int) -> list[ProcessHandle]:
    """Handles on the direct children of a process of this machine. Whoever asks for them closes them."""
    handles = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            if parent(int(entry)) == pid:
                handles.append(ProcessHandle(identify(int(entry), "")))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile; or it is another user's, and no child of ours
    return handles
