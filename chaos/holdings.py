"""What a process and all under it hold, so that what is left behind can be told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from resilient_executor.chaos.hands import descendants, start_ticks

_LISTEN: Final = "0A"


def things() -> dict[str, list[str]]:
    """Processes under this one, ports that they and this one listen at, and shared memory of this machine's Ray."""
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
    """Files in ``/dev/shm`` that somebody under this process has open or mapped, and those of its raylets' graphs.

    Other programs of this machine have theirs, too; they are none of our business.
    """
    mine = set()
    pids = {str(pid) for pid in [os.getpid(), *descendants(os.getpid())]}
    for entry in os.scandir("/dev/shm"):
        name = entry.name
        owner = "".join(
            c for c in name.removeprefix("sem.hdr").removeprefix("sem.obj").partition("-")[0] if c.isdigit()
        )
        if name.startswith(("sem.hdr", "sem.obj")) and (owner in pids or owner in _raylets):
            mine.add(name)
    return mine


#: Raylets that this process has had, so that what they leave is told after their end.
_raylets: set[str] = set()


def remember_raylet(pid: int) -> None:
    """This raylet is ours: what carries its pid is ours after its end, too."""
    _raylets.add(str(pid))


def _title(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return "a process"
    return os.path.basename(command.split(" ")[0]) or "a process"
