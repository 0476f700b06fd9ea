"""Hands on a node: a small actor that signals processes there, and only those named by pid and start time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ray

#: For the hand of a node to start and to answer, in seconds.
REACH_S: Final = 20.0


def start_ticks(pid: int) -> int | None:
    """A process's start in clock ticks since boot; None when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def send(pid: int, ticks: int, number: int) -> bool:
    """Signal one process, and no later one with its pid; whether it was there."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


class Hand:
    """Lives on one node, takes no resources, and does as it is told."""

    def identify(self, pids: Sequence[int]) -> dict[int, int]:
        """Pid -> start time, for those that are there."""
        found = {pid: start_ticks(pid) for pid in pids}
        return {pid: ticks for pid, ticks in found.items() if ticks is not None}

    def signal(self, victims: Sequence[tuple[int, int]], number: int) -> list[int]:
        """Send a signal to processes, given as (pid, start time); returns the pids that were there."""
        return [pid for pid, ticks in victims if send(pid, ticks, number)]

    def freeze(self, victims: Sequence[tuple[int, int]], duration_s: float) -> list[int]:
        """Stop processes for a while. They are let go on from here: a node that is frozen as a whole hears nobody."""
        timer = threading.Timer(duration_s, self.signal, (victims, signal.SIGCONT))
        timer.daemon = True
        timer.start()
        return self.signal(victims, signal.SIGSTOP)

    def raylet(self) -> tuple[int, int]:
        """This node's raylet, as (pid, start time)."""
        pid = os.getppid()
        return pid, start_ticks(pid) or 0

    def node(self, spare: Sequence[int]) -> list[tuple[int, int]]:
        """Everything under this node's raylet and itself, this hand and ``spare`` left out; the raylet comes last."""
        raylet = os.getppid()
        children = [p for p in descendants(raylet) if p != os.getpid() and p not in spare]
        return [(pid, ticks) for pid in [*children, raylet] if (ticks := start_ticks(pid)) is not None]


def descendants(root: int) -> list[int]:
    """Pids of the processes under one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, queue = [], list(parents.get(root, ()))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += parents.get(pid, ())
    return found


class Hands:
    """A hand on each node, made when it is needed; all are gone after :meth:`close`."""

    def __init__(self) -> None:
        self._hands: dict[str, Any] = {}
        self._here = ray.get_runtime_context().get_node_id()

    def signal(self, node_id: str, victims: Sequence[tuple[int, int]], number: int) -> list[int]:
        """Signal processes of a node; see :meth:`Hand.signal`. On this node without a detour."""
        if node_id == self._here:
            return [pid for pid, ticks in victims if send(pid, ticks, number)]
        answer: list[int] = self.ask(node_id, "signal", victims, number)
        return answer

    def identify(self, node_id: str, pids: Sequence[int]) -> dict[int, int]:
        """See :meth:`Hand.identify`."""
        if node_id == self._here:
            return Hand().identify(pids)
        answer: dict[int, int] = self.ask(node_id, "identify", pids)
        return answer

    def ask(self, node_id: str, method: str, *args: Any) -> Any:
        """Call a method of a node's hand; Ray's error when the node gives no answer within ``REACH_S``."""
        if node_id not in self._hands:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            self._hands[node_id] = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=strategy)(Hand).remote()
        try:
            return ray.get(getattr(self._hands[node_id], method).remote(*args), timeout=REACH_S)
        except Exception:
            self._hands.pop(node_id, None)
            raise

    def close(self) -> None:
        """End all hands."""
        while self._hands:
            ray.kill(self._hands.popitem()[1], no_restart=True)
