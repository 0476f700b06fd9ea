"""Where workers die again and again: named as such, and avoided for a while. Pure, the clock included.

One death says little about a node. Several within a while, all on the same one, do: a bad device, a bad cable, a
neighbour that eats the memory. Then the next bundles are asked for elsewhere, if there is an elsewhere. It is not for
ever: after ``avoid_s`` without a further death there the node is as good as any other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

#: Deaths that are remembered.
MEMORY: Final = 256
#: Deaths of one rank on one device that are worth a word.
REPEATED: Final = 2


@dataclass(frozen=True)
class Death:
    """One death, and where.

    Attributes:
        at: seconds of a steady clock.
        node_id: Ray's id of the node.
        node_ip: its address, for people.
        device: the devices that the worker had, or "" on CPU.
    """

    at: float
    rank: int
    node_id: str
    node_ip: str
    device: str = ""


class Avoidance:
    """Remembers deaths. Owned by one thread.

    Args:
        after: deaths on one node within ``avoid_s`` from which it is avoided; 0 never avoids any.
        avoid_s: how long a death counts.
    """

    def __init__(self, *, after: int, avoid_s: float) -> None:
        if after < 0 or avoid_s <= 0:
            raise ValueError("after must not be negative, and avoid_s positive")
        self._after = after
        self._avoid_s = avoid_s
        self._deaths: deque[Death] = deque(maxlen=MEMORY)

    def died(self, death: Death) -> str:
        """Note a death; returns in one line what it adds up to, or ""."""
        self._deaths.append(death)
        recent = self._recent(death.at)
        same = [d for d in recent if (d.rank, d.node_id, d.device) == (death.rank, death.node_id, death.device)]
        here = [d for d in recent if d.node_id == death.node_id]
        where = f"device {death.device} of node {death.node_ip}" if death.device else f"node {death.node_ip}"
        parts = []
        if len(same) >= REPEATED:
            parts.append(f"rank {death.rank} has died {len(same)} times on {where} within {self._avoid_s:g} s")
        if self._after and len(here) >= self._after:
            parts.append(f"node {death.node_ip} has seen {len(here)} deaths and is avoided for {self._avoid_s:g} s")
        return "; ".join(parts)

    def avoided(self, now: float) -> frozenset[str]:
        """Ids of the nodes to avoid at ``now``."""
        if self._after == 0:
            return frozenset()
        recent = self._recent(now)
        nodes = {death.node_id for death in recent}
        return frozenset(node for node in nodes if sum(d.node_id == node for d in recent) >= self._after)

    def forgive(self) -> None:
        """Forget everything: there was no room anywhere else."""
        self._deaths.clear()

    def _recent(self, now: float) -> list[Death]:
        return [death for death in self._deaths if now - death.at < self._avoid_s]
