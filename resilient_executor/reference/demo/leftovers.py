"""Which processes a demo has started, and which of them are still there after its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from resilient_executor.processes import start_ticks
from resilient_executor.protocol import ProcessIdentity

#: Between two looks at processes that are about to end.
_LOOK_S = 0.05


def family() -> set[ProcessIdentity]:
    """Every process under this one, children of children included: all that an embedded cluster consists of."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            parents[int(entry.name)] = parent
    found: set[int] = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    found.discard(os.getpid())
    return {ProcessIdentity(pid, ticks, "") for pid in found if (ticks := start_ticks(pid)) is not None}


def survivors(processes: Iterable[ProcessIdentity], timeout_s: float) -> list[str]:
    """Those of ``processes`` that still run after ``timeout_s``, each as a text; returns as soon as there are none."""
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while left := [one for one in left if start_ticks(one.pid) == one.start_ticks]:
        if time.monotonic() > deadline:
            return sorted(f"{_title(one.pid)} (pid {one.pid})" for one in left)
        time.sleep(_LOOK_S)
    return []


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):  # it has ended while we looked
        return None


def _title(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return "a process"
    return os.path.basename(command.split(" ")[0]) or "a process"
