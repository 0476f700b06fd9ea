"""Removes the named semaphores that Ray's channels leave behind in ``/dev/shm``.

Every buffer of a channel has two POSIX semaphores, ``sem.obj<raylet pid>-<time>`` and ``sem.hdr<raylet pid>-<time>``.
Ray unlinks them when a process that has opened them ends in an orderly way. Workers that are killed never do, so each
rebuild would leave those behind that only workers had opened. A semaphore that is in use is mapped by somebody; one
that nobody maps any more is an orphan. Creation leaves no gap: glibc maps the file before it gives it its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_SHM: Final = Path("/dev/shm")


def of_raylet(raylet_pid: int) -> list[Path]:
    """All semaphores of channels of one node's object store."""
    return [path for kind in ("obj", "hdr") for path in _SHM.glob(f"sem.{kind}{raylet_pid}-*")]


def sweep(raylet_pid: int) -> int:
    """Unlink the orphans of a living node; returns how many there were."""
    candidates: dict[int, Path] = {}
    for path in of_raylet(raylet_pid):
        try:
            candidates[path.stat().st_ino] = path
        except FileNotFoundError:
            continue
    if not candidates:
        return 0
    orphans = set(candidates) - _mapped_inodes()
    return sum(_unlink(candidates[inode]) for inode in orphans)


def remove_all(raylet_pid: int) -> int:
    """Unlink all semaphores of a node that has ended; returns how many there were."""
    return sum(_unlink(path) for path in of_raylet(raylet_pid))


def _mapped_inodes() -> set[int]:
    """Inodes of all semaphores that a process of this machine maps.

    Some processes cannot be looked into, the first one of a container for instance. Either they are of another user,
    and cannot open these semaphores, or they hold more rights than Ray's own processes, and are none of them.
    """
    return {inode for inodes in _maps().values() for inode in inodes}


def mapped_by(inode: int) -> list[int]:
    """Processes of this machine that map the semaphore with this inode."""
    return sorted(pid for pid, inodes in _maps().items() if inode in inodes)


def _maps() -> dict[int, set[int]]:
    """Process -> inodes of the semaphores that it maps."""
    found: dict[int, set[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/maps", encoding="utf-8", errors="replace") as maps:
                found[int(entry.name)] = {int(line.split(None, 5)[4]) for line in maps if "/dev/shm/sem." in line}
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def _unlink(path: Path) -> int:
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return 1
