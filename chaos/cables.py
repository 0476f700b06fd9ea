"""Faults of the network between nodes, where the nodes are those of the harness (see :mod:`chaos.netns`).

They are done on the machine that the nodes share, so the kit has to run inside: ``resilient-chaos cluster run
resilient-chaos pull_cable --node 10.77.0.12``. The harness tells its commands by a variable whose cluster they are in.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from resilient_executor.chaos.faults import Kind
from resilient_executor.chaos.netns import PREFIX_VARIABLE, ClusterError, NetnsCluster
from resilient_executor.chaos.targets import Refused

#: What a slow link still carries: a graph's small messages pass, a whole model's do not, and queues fill.
SLOW_KBIT: Final = 256


class Cables:
    """Pulls, cuts and slows; remembers it, and undoes it. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._undo: dict[int, tuple[Callable[[], None], threading.Timer | None]] = {}
        self._number = 0

    def plan(self, kind: Kind, wanted: str | None, addresses: Sequence[str]) -> list[int]:
        """The nodes that such a fault would hit: one, or two for a pair; none when there are too few.

        Args:
            kind: of the fault.
            wanted: the address that the fault names, or None.
            addresses: of the nodes that could be hit, those drawn by the fault first.

        Raises:
            Refused: the nodes are not the harness's, or cannot be told from here.
        """
        cluster = _cluster()
        try:
            known = {cluster.ip(node): node for node in cluster.nodes()}
        except ClusterError as error:
            raise Refused(str(error)) from error
        if strangers := [one for one in [*addresses, *([wanted] if wanted else [])] if one not in known]:
            raise Refused(f"{strangers[0]} is no node of the cluster {cluster.prefix!r}")
        nodes = list(dict.fromkeys(known[address] for address in addresses))
        if kind is Kind.SLOW_LINK:
            return [known[wanted] if wanted else 0]  # the head's
        if kind is Kind.CUT_PAIR:
            return sorted(nodes[:2]) if len(nodes) > 1 else []
        return nodes[:1]

    def names(self, kind: Kind, nodes: Sequence[int]) -> list[str]:
        """The same for people."""
        cluster = _cluster()
        ips = [f"node {cluster.ip(node)}" for node in nodes]
        return [" and ".join(ips)] if kind is Kind.CUT_PAIR and ips else ips

    def harm(self, kind: Kind, nodes: Sequence[int], duration_s: float) -> None:
        """Do it; it is undone after ``duration_s`` (0: by :meth:`heal`).

        Raises:
            Refused: the machine cannot.
        """
        cluster, node = _cluster(), nodes[0]
        if kind is Kind.PULL_CABLE:
            do, undo = partial(cluster.cut, node), partial(cluster.heal, node)
        elif kind is Kind.SLOW_LINK:
            do, undo = partial(cluster.slow, node, SLOW_KBIT), partial(cluster.unslow, node)
        else:
            do, undo = partial(cluster.pair_cut, *nodes), partial(cluster.pair_heal, *nodes)
        with self._lock:
            number = self._number = self._number + 1
            timer = threading.Timer(duration_s, self._over, (number,)) if duration_s else None
            self._undo[number] = (undo, timer)
        try:
            do()
        except ClusterError as error:
            self._over(number)
            raise Refused(str(error)) from error
        if timer is not None:
            timer.daemon = True
            timer.start()

    def heal(self) -> int:
        """Undo everything that is still done; how much that was."""
        with self._lock:
            numbers = list(self._undo)
        for number in numbers:
            self._over(number)
        return len(numbers)

    def _over(self, number: int) -> None:
        with self._lock:
            undo, timer = self._undo.pop(number, (None, None))
        if timer is not None:
            timer.cancel()
        if undo is not None:
            with contextlib.suppress(ClusterError):  # the cluster has been taken down
                undo()


def _cluster() -> NetnsCluster:
    prefix = os.environ.get(PREFIX_VARIABLE)
    if prefix is None:
        raise Refused(
            "cables belong to the harness of several nodes: resilient-chaos cluster up, and then "
            "resilient-chaos cluster run resilient-chaos ..."
        )
    return NetnsCluster(prefix)
