"""What an embedded cluster leaves behind when its owner is killed.

Ray's processes die with the one that has started them, except the two that the node daemon (raylet) has started for
itself: they find out by and by, want to tell the head, which is gone, and are there for another minute. What the graphs
had in ``/dev/shm`` stays for good. And workers that were just starting look for their daemon before they give up.
Whoever ends in an orderly way clears everything himself (``cluster.disconnect``).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from resilient_executor import processes, semaphores
from resilient_executor.processes import ProcessHandle
from resilient_executor.protocol import ProcessIdentity

#: For processes that the kernel ends with their parent, in seconds.
_LAST_S: Final = 2.0


class Estate:
    """One node's daemon and its children, as they are now: the daemon ends with its owner, the others may not.

    Raises:
        ProcessLookupError: the daemon has ended.
    """

    def __init__(self, raylet_pid: int) -> None:
        self._raylet = ProcessHandle(processes.identify(raylet_pid, ""))
        self._others = [one for one in processes.children(raylet_pid) if one.identity.pid != os.getpid()]

    @classmethod
    def of(cls, owner: ProcessIdentity) -> Estate | None:
        """That of this actor's own node; None where ``owner`` has not started it, or it has ended."""
        raylet = os.getppid()
        try:
            embedded = processes.parent(raylet) == owner.pid and processes.start_ticks(owner.pid) == owner.start_ticks
            return cls(raylet) if embedded else None
        except OSError:  # it has ended, or may not be looked at: then Ray's own way has to do
            return None

    def clear(self) -> bool:
        """The owner has died: end what is left, and remove what nobody can use any more. At most some seconds.

        Returns:
            False when the daemon goes on: it was made to outlive its owner, and so is everything else then.
        """
        with contextlib.ExitStack() as handles:
            for one in (self._raylet, *self._others):
                handles.enter_context(one)
            if not self._raylet.wait(_LAST_S):
                return False
            others = [*self._others, *(handles.enter_context(one) for one in _starting(self._raylet.identity.pid))]
            for one in others:
                one.kill()
            deadline = time.monotonic() + _LAST_S
            for one in others:
                one.wait(max(0.0, deadline - time.monotonic()))
        semaphores.remove_all(self._raylet.identity.pid)
        return True


def _starting(raylet_pid: int) -> list[ProcessHandle]:
    """Ray's workers of this daemon that have not come up: they have the command line that they were started with."""
    mark, found = f"RAY_RAYLET_PID={raylet_pid}".encode(), []
    for entry in os.scandir("/proc"):
        try:
            if not entry.name.isdigit() or b"default_worker.py" not in Path(entry.path, "cmdline").read_bytes():
                continue
            if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                found.append(ProcessHandle(processes.identify(int(entry.name), "")))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found
