"""Python stacks of a process that may be stuck: asked for by a signal, written without Python's lock.

``faulthandler`` writes from inside the signal's handler, in C, whatever the interpreter is doing; a thread that spins
in a library while it holds the lock is no obstacle. It writes to memory that the process owns and that others of the
same user can read under ``/proc``: nothing is left behind when the process ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from typing import Final

from resilient_executor.processes import ProcessHandle, vitals
from resilient_executor.protocol import ProcessIdentity

#: A real-time signal that nobody else uses; sent to processes only that have said that they catch it.
SIGNAL: Final = int(signal.SIGRTMIN) + 7
_NAME: Final = "resilient-executor-stacks"
#: Between two looks at what has been written, in seconds.
_LOOK_S: Final = 0.02
#: Bytes that are read at most.
_MAX_BYTES: Final = 1 << 17


def install() -> None:
    """Let this process's stacks be asked for. Twice is fine."""
    if _memory_of(os.getpid()) is not None:
        return
    memory = os.memfd_create(_NAME)
    # Appending: each dump begins where the file ends, also after somebody has emptied it.
    appending = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    os.close(memory)
    faulthandler.register(SIGNAL, file=appending, all_threads=True, chain=False)


async def dump(identity: ProcessIdentity, timeout_s: float) -> str:
    """The stacks of all threads of another process of this node; a line in brackets says why there are none."""
    try:
        with ProcessHandle(identity) as handle:
            seen = vitals(identity)
            if seen is not None and seen.state in ("T", "t", "D"):
                return f"(no stacks: the process {seen.describe()})"
            memory = _memory_of(identity.pid)
            if memory is None or not _catches(identity.pid):
                return "(no stacks: the process has not come up far enough)"
            os.close(os.open(memory, os.O_WRONLY | os.O_TRUNC))
            signal.pidfd_send_signal(handle.fd, SIGNAL)
            return await _written(memory, timeout_s)
    except (ProcessLookupError, FileNotFoundError):
        return "(no stacks: the process has ended)"
    except OSError as error:
        return f"(no stacks: {error.strerror})"


async def _written(memory: str, timeout_s: float) -> str:
    """What is there once it has stopped growing."""
    deadline, size = time.monotonic() + timeout_s, 0
    while time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        before, size = size, os.stat(memory).st_size
        if size and size == before:
            break
    if not size:
        return f"(no stacks: the process did not handle the signal within {timeout_s:g} s)"
    with open(memory, "rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace")


def _memory_of(pid: int) -> str | None:
    """The path of the memory that a process's stacks are written to."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if _NAME in os.readlink(f"{folder}/{name}"):
                return f"{folder}/{name}"
        except FileNotFoundError:
            continue
    return None


def _catches(pid: int) -> bool:
    """Whether the process has a handler for the signal; without one it would die of it."""
    with open(f"/proc/{pid}/status", "rb") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt"))
    return bool(mask & (1 << (SIGNAL - 1)))
