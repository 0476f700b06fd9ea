"""What a process and all under it hold, so that what is left behind can be told."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Final

from resilient_executor import semaphores
from resilient_executor.chaos.hands import descendants, start_ticks

_LISTEN: Final = "0A"


def things() -> dict[str, list[str]]:
    """Processes under this one, ports that they and this one listen at, and what its graphs keep in shared memory."""
    family = descendants(os.getpid())
    return {
        "process": sorted(f"{_title(pid)} (pid {pid})" for pid in family if start_ticks(pid) is not None),
        "port": sorted(ports([os.getpid(), *family])),
        "shared memory": sorted(_shared_memory()),
    }


def rss_mb(pid: int | None = None) -> float:
    """Resident memory of a process (None: this one) in MB."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def ports(pids: list[int]) -> set[str]:
    """TCP ports at which these processes listen."""
    inodes: set[str] = set()
    for pid in pids:
        try:
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        found |= {str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == _LISTEN and row[9] in inodes}
    return found


def _shared_memory() -> set[str]:
    """Semaphores in ``/dev/shm`` that the graphs of this process's raylets have made, whoever maps them.

    They carry their raylet's pid, and the time. A pid alone proves nothing: one that was killed without a word may have
    left others with the same pid an hour ago.
    """
    mine = set()
    for entry in os.scandir("/dev/shm"):
        match = _SEMAPHORE.fullmatch(entry.name)
        if match is not None and int(match[2]) >= _raylets.get(int(match[1]), sys.maxsize):
            mine.add(entry.name)
    return mine


def told_in_full(name: str) -> str:
    """A leaked semaphore with what tells where it comes from: when it was made, and who maps it."""
    try:
        found = os.stat(f"/dev/shm/{name}")
    except OSError:
        return f"{name} (gone meanwhile)"
    by = ", ".join(map(str, semaphores.mapped_by(found.st_ino)))
    return f"{name} (made {time.time() - found.st_mtime:.1f} s ago, mapped by {by or 'nobody'})"


_SEMAPHORE: Final = re.compile(r"sem\.(?:hdr|obj)(\d+)-(\d+)")
#: Raylets that this process has had, and since when, so that what they leave is told after their end.
_raylets: dict[int, int] = {}


def remember_raylet(pid: int, since_ns: int) -> None:
    """This raylet is ours: what carries its pid and a later time is ours after its end, too."""
    _raylets[pid] = since_ns


def _title(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return "a process"
    return os.path.basename(command.split(" ")[0]) or "a process"
