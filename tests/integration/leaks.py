"""What an executor can leave behind, and the proof that it has not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import ray

#: What Ray calls the processes of this package's actors.
ACTORS = ("ray::WorkerActor", "ray::ChaosWorkerActor", "ray::SupervisorActor", "ray::NodeAgent")


@dataclass(frozen=True)
class Holdings:
    """Things that exist now, by kind; each a set of texts."""

    placement_groups: frozenset[str] = field(default_factory=frozenset)
    actors: frozenset[str] = field(default_factory=frozenset)
    processes: frozenset[str] = field(default_factory=frozenset)
    threads: frozenset[str] = field(default_factory=frozenset)
    semaphores: frozenset[str] = field(default_factory=frozenset)

    def beyond(self, before: Holdings) -> dict[str, list[str]]:
        """What is here and was not there before."""
        new = {name: sorted(getattr(self, name) - getattr(before, name)) for name in self.__dataclass_fields__}
        return {name: things for name, things in new.items() if things}


def holdings() -> Holdings:
    """Everything that an executor of this process could have made."""
    return Holdings(
        placement_groups() if ray.is_initialized() else frozenset(),
        actors() if ray.is_initialized() else frozenset(),
        actor_processes(psutil.Process()),
        frozenset(f"{t.ident} {t.name}" for t in threading.enumerate() if t.name.startswith("resilient-executor")),
        semaphores(raylet_pid()) - mapped_here(),
    )


def placement_groups() -> frozenset[str]:
    table = ray.util.placement_group_table()
    return frozenset(f"{key} {row['name']}" for key, row in table.items() if row["state"] != "REMOVED")


def actors() -> frozenset[str]:
    """Actors of the whole cluster that are not dead, whichever driver made them, whether they still start or not."""
    from ray._private import state

    return frozenset(f"{key} {row['ActorClassName']}" for key, row in state.actors().items() if row["State"] != "DEAD")


def raylet_pid() -> int:
    """The raylet that this process has started, or 0."""
    node = ray._private.worker._global_node
    raylets = node.all_processes.get("raylet", []) if node is not None and ray.is_initialized() else []
    return int(raylets[0].process.pid) if raylets else 0


def semaphores(raylet: int) -> frozenset[str]:
    """Semaphores of the graphs of one raylet."""
    return frozenset(n for n in os.listdir("/dev/shm") if n.startswith((f"sem.hdr{raylet}-", f"sem.obj{raylet}-")))


def mapped_here() -> frozenset[str]:
    """Semaphores that this process maps. Ray lets go of the channels that it has made when their driver ends.

    By inode: a semaphore's creator maps it under the name that it had before its own.
    """
    inodes = {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
    return frozenset(entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes)


def actor_processes(root: psutil.Process) -> frozenset[str]:
    """Processes under ``root`` that run one of this package's actors."""
    found = set()
    for process in root.children(recursive=True):
        try:
            title = process.cmdline()[0]
        except (psutil.NoSuchProcess, IndexError):  # gone, or a zombie
            continue
        found |= {f"{process.pid} {name}" for name in ACTORS if title.startswith(name)}
    return frozenset(found)


@contextmanager
def nothing_left(timeout_s: float = 10.0) -> Iterator[None]:
    """Fail unless everything that came into being inside is gone ``timeout_s`` after the end."""
    before = holdings()
    yield
    deadline = time.monotonic() + timeout_s
    while left := holdings().beyond(before):
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {left}")
        time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    """Those of ``pids`` whose process still exists; a zombie is dead."""
    present = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                present.append(pid)
        except psutil.NoSuchProcess:
            continue
    return present
