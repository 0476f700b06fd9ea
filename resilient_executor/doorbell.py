"""A bell for each process of a graph: how a reader that sleeps is woken.

It is a datagram socket with an abstract address (Linux): no file, and it ends with its process, however that ends.
Nobody waits for the one who is rung: a full queue means that a ring is waiting there already, a dead one has no address
any more. A sleep is bounded, too: by ``LOOK_S``, after which the reader looks without having been woken.

With wires (``wire_channel.py``) only the owner itself rings, when its channels are closed. With Ray's own channels,
whoever writes rings its readers; nobody can ring on another node, and what comes from there by Ray's channels is looked
for at growing intervals (``readers.py``).

To wake takes longer than a short step. So a reader whose last wait was short spins for a moment before it sleeps: in a
stream of short steps nobody sleeps, and where steps are long, or stop, a spin has been paid for once.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from resilient_executor import wire_channel
from resilient_executor.config import ExecutorConfig

#: A sleeping worker looks without a ring after this, in seconds: a ring that got lost costs that much, not a stall.
LOOK_S: Final = 0.5
#: Spins of this length hide the 0.1 ms that it takes to wake, where there are cores for it.
_SPIN_MS: Final = 2
#: The longest spin of a reader whose last wait was no longer than that, where each spin takes a core from a peer.
_SHORT_MS: Final = 1


@dataclass(frozen=True)
class BellPlan:
    """Where one process listens, and whom it rings.

    Attributes:
        address: of its own bell.
        rings: of those that read what it writes, on its own node.
        remote: whether somebody on another node writes for it.
        company: processes of the graph on this node, itself included.
        busy_wait_ms: how long it spins before it sleeps, always; None for what suits the cores and the last wait.
    """

    address: str
    rings: tuple[str, ...]
    remote: bool
    company: int
    busy_wait_ms: int | None


class Doorbell:
    """One process's own bell. Made and closed by its owner; rung from any process of the node."""

    #: A worker's: it has one epoch, one graph and one reader, which Ray makes.
    of_worker: ClassVar[Doorbell | None] = None

    def __init__(self, plan: BellPlan, look_s: float = LOOK_S) -> None:
        """Listen at the plan's address.

        Raises:
            OSError: the address is taken.
        """
        self.plan = plan
        spin_ms, self._short_s = plan.busy_wait_ms, 0.0
        if spin_ms is None:
            roomy = usable_cores() > plan.company
            spin_ms, self._short_s = (_SPIN_MS, 0.0) if roomy else (0, _SHORT_MS / 1e3)
        self._spin_s, self.look_s = spin_ms / 1e3, look_s
        #: How long the last wait was, in seconds. Written by whoever reads, one thread at a time.
        self.waited_s = math.inf
        #: Whether the owner sleeps now, for whoever shows it; written as above.
        self.asleep = False
        self._rings = [_abstract(address) for address in plan.rings]
        self._own = _abstract(plan.address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(self._own)
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    @property
    def spin_s(self) -> float:
        """How long to spin before the next sleep, in seconds."""
        return self._short_s if self.waited_s <= self._short_s else self._spin_s

    def ring(self) -> None:
        """Ring everybody who reads what the owner writes. Never waits, never raises."""
        for address in self._rings:
            self._send(address)

    def wake(self) -> None:
        """Wake the owner."""
        self._send(self._own)

    def _send(self, address: bytes) -> None:
        # OSError: it is gone (ECONNREFUSED), or it has been rung often enough (EAGAIN), or our own is closed.
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", address)

    def silence(self) -> None:
        """Take all rings that have come: who looks after this misses nothing that was written before them."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.recv(1)

    def watch(self, descriptor: int) -> None:
        """From now on a sleep also ends when there is something to read there."""
        self._poll.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """The end of :meth:`watch`. Twice is fine."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)

    def sleep(self, seconds: float) -> list[tuple[int, int]]:
        """Sleep until it rings, or there is something to read where it watches; ``seconds`` at most.

        For one thread at a time.

        Returns:
            what ``poll`` returned: descriptors and their events.
        """
        self.asleep = seconds > 0.0
        try:
            return self._poll.poll(max(0.0, seconds) * 1e3)
        except OSError:  # the bell has been closed
            return []
        finally:
            self.asleep = False

    def close(self) -> None:
        """Stop listening. Whoever sleeps is woken first. Twice is fine."""
        self.wake()
        self._socket.close()


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode()


def usable_cores() -> float:
    """How many cores this process may use: its affinity, and its control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return cores


def plan(config: ExecutorConfig, nodes: Sequence[str], driver_node_id: str) -> tuple[BellPlan, list[BellPlan | None]]:
    """Who rings whom in one epoch's graph.

    Args:
        config: of the executor.
        nodes: the node of each rank.
        driver_node_id: the driver's.

    Returns:
        the driver's plan, and one for each rank.
    """
    # Addresses are the node's, for whichever executors and epochs there are on it.
    token, size, driver = secrets.token_hex(8), config.tensor_parallel_size, -1
    where = {driver: driver_node_id, **dict(enumerate(nodes))}
    wired = config.wires and wire_channel.install()
    company = Counter(where.values())

    def address(rank: int) -> str:
        return f"resilient-executor-{token}-{'driver' if rank == driver else rank}"

    def one(rank: int, writers: Sequence[int], readers: Sequence[int]) -> BellPlan:
        here = where[rank]
        return BellPlan(
            address=address(rank),
            rings=() if wired else tuple(address(reader) for reader in readers if where[reader] == here),
            remote=any(where[writer] != here for writer in writers),
            company=company[here],
            busy_wait_ms=config.busy_wait_ms,
        )

    # Rank i of a stage feeds rank i of the next; the driver feeds the whole first stage, and reads all of the last.
    workers: list[BellPlan | None] = [
        one(
            rank,
            writers=[rank - size if rank >= size else driver],
            readers=[rank + size if rank + size < len(nodes) else driver],
        )
        for rank in range(len(nodes))
    ]
    return one(driver, writers=range(len(nodes) - size, len(nodes)), readers=range(size)), workers
