"""What Ray says of the nodes, and which nodes the executor has given up before Ray has.

Ray takes 1.4 to 63 s to call a node dead. Until then its bundles are offered like any other's. So whoever could not
reach a node says so here, and the next placement goes elsewhere, until Ray calls the node dead (a node that comes back
has a new id) or its agent has proven that nothing of ours is left there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayError

from resilient_executor.protocol import ProcessIdentity

logger = logging.getLogger(__name__)

#: Between two looks, in seconds.
_PERIOD_S: Final = 0.5
#: For an answer that Ray says is there, in seconds: its node may vanish before it is fetched.
_ARRIVED_S: Final = 5.0


class NodeWatch(threading.Thread):
    """Looks at Ray's list of nodes. Its own thread, since Ray's calls have no bound.

    Args:
        on_node: called in this thread with a node's id and "dead" or "draining", once each.
        fence: asks a node's agent, without waiting, to kill processes; returns Ray's reference.
        stopping: ends the thread.
    """

    def __init__(
        self,
        on_node: Callable[[str, str], None],
        fence: Callable[[str, Sequence[ProcessIdentity]], Any],
        stopping: threading.Event,
    ) -> None:
        super().__init__(name="resilient-executor-nodes", daemon=True)
        self._on_node = on_node
        self._fence = fence
        self._stopping = stopping
        self._lock = threading.Lock()
        self._alive: frozenset[str] | None = None
        self._draining: frozenset[str] = frozenset()
        self._told: set[tuple[str, str]] = set()
        self._given_up: dict[str, list[ProcessIdentity]] = {}
        self._proofs: dict[str, Any] = {}
        self._looked = threading.Condition(self._lock)
        self._looks = 0

    def run(self) -> None:
        """Look until the end."""
        while not self._stopping.is_set():
            try:
                self._look()
                self._prove()
            except Exception as error:  # noqa: BLE001 - Ray's head may be away; the next look may work
                if self._stopping.is_set() or not ray.is_initialized():
                    return
                logger.debug("looking at the nodes: %s", error)
            self._stopping.wait(_PERIOD_S)

    def _look(self) -> None:
        alive = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        draining = frozenset(ray._private.state.state.get_draining_nodes()) & alive
        with self._looked:
            dead = (self._alive or frozenset()) - alive
            self._alive, self._draining = alive, draining
            for node_id in self._given_up.keys() - alive:
                del self._given_up[node_id]
            self._looks += 1
            self._looked.notify_all()
        for word, nodes in (("dead", dead), ("draining", draining)):
            for node_id in nodes:
                if (node_id, word) not in self._told:
                    self._told.add((node_id, word))
                    self._on_node(node_id, word)

    def _prove(self) -> None:
        """Ask the agents of nodes that were given up to end what is left there."""
        with self._lock:
            pending = dict(self._given_up)
        for node_id, processes in pending.items():
            reference = self._proofs.pop(node_id, None)
            if reference is None:
                self._proofs[node_id] = self._fence(node_id, processes)
                continue
            if not ray.wait([reference], timeout=0)[0]:
                self._proofs[node_id] = reference
                continue
            try:
                proven = all(fenced.gone for fenced in ray.get(reference, timeout=_ARRIVED_S))
            except RayError:
                continue
            if proven:
                logger.warning("node %s answers again, and nothing of an old epoch is left there", node_id[:8])
                with self._lock:
                    self._given_up.pop(node_id, None)

    def is_alive_node(self, node_id: str) -> bool:
        """Whether Ray takes a node for alive, as of the last look; True before the first."""
        with self._lock:
            return self._alive is None or node_id in self._alive

    def fresh(self, timeout_s: float) -> bool:
        """Wait for a look that began after now, at most ``timeout_s``; returns whether there was one."""
        with self._looked:
            wanted, deadline = self._looks + 2, time.monotonic() + timeout_s
            while self._looks < wanted and (remaining := deadline - time.monotonic()) > 0:
                self._looked.wait(remaining)
            return self._looks >= wanted

    def give_up(self, node_id: str, processes: Sequence[ProcessIdentity]) -> None:
        """Nobody reaches this node; these processes of it are not proven gone."""
        with self._lock:
            self._given_up.setdefault(node_id, []).extend(processes)

    def unfit(self) -> frozenset[str]:
        """Ids of the nodes where nothing new may be placed: draining, or given up."""
        with self._lock:
            return self._draining | self._given_up.keys()
