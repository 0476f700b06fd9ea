"""Proves that the processes of an old epoch have ended, on all nodes at once; and what counts where no proof comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from resilient_executor.config import ExecutorConfig
from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor.agent import Fenced
from resilient_executor.supervisor.nodes import NodeWatch

#: A wait looks this often at what else may have ended it, in seconds.
_SLICE_S: Final = 0.1
#: Between two agents for a node whose first one has died.
_AGAIN_S: Final = 0.3
#: A node gets so much longer than the lease of its workers; clocks may run at slightly different rates.
_MARGIN_S: Final = 0.5
_LAPSED: Final = "its agent gives no answer, and the leases there have run out"
#: For an answer that Ray says is there, in seconds: its node may vanish before it is fetched.
_ARRIVED_S: Final = 5.0


class Fencing:
    """One fencing. The epoch has been retired before, so nobody renews a lease any more.

    Args:
        nodes: what Ray says of them.
        agent: makes or finds a node's agent.
        drop: forgets one that has failed.
        config: times.
        here: the driver's node, which is never given up.
    """

    def __init__(
        self,
        nodes: NodeWatch,
        agent: Callable[[str], ActorHandle],
        drop: Callable[[str, ActorHandle], object],
        config: ExecutorConfig,
        here: str,
    ) -> None:
        self._nodes, self._agent, self._drop = nodes, agent, drop
        self._config, self._here = config, here

    def run(
        self, processes: Sequence[ProcessIdentity], can_do_without: Callable[[frozenset[str]], bool]
    ) -> list[Fenced]:
        """Kill and wait; see ``Supervision.fence``."""
        waiting: dict[str, list[ProcessIdentity]] = {}
        for process in processes:
            waiting.setdefault(process.node_id, []).append(process)
        results: list[Fenced] = []
        asked: dict[str, tuple[ActorHandle, Any]] = {}
        began = time.monotonic()
        again_at = dict.fromkeys(waiting, began)
        while waiting and (elapsed := time.monotonic() - began) < self._config.fence_timeout_s:
            for node_id in list(waiting):
                if not self._nodes.is_alive_node(node_id):
                    results += [Fenced(p, True, None, "Ray has declared the node dead") for p in waiting.pop(node_id)]
                elif node_id not in asked and time.monotonic() >= again_at[node_id]:
                    agent = self._agent(node_id)
                    asked[node_id] = agent, agent.fence.remote(waiting[node_id], self._config.fence_timeout_s)
            self._collect(waiting, asked, again_at, results)
            lapsed = frozenset(waiting) - {self._here}
            if lapsed and elapsed > self._config.lease_s + _MARGIN_S and can_do_without(lapsed | self._nodes.unfit()):
                for node_id in lapsed:
                    self._nodes.give_up(node_id, waiting[node_id])
                    results += [Fenced(p, True, None, _LAPSED) for p in waiting.pop(node_id)]
        return results + [Fenced(p, gone=False, exit=None) for left in waiting.values() for p in left]

    def _collect(
        self,
        waiting: dict[str, list[ProcessIdentity]],
        asked: dict[str, tuple[ActorHandle, Any]],
        again_at: dict[str, float],
        results: list[Fenced],
    ) -> None:
        """Take the answers that have come."""
        references = {reference: node_id for node_id, (_, reference) in asked.items() if node_id in waiting}
        if not references:
            time.sleep(_SLICE_S)
            return
        done, _ = ray.wait(list(references), timeout=_SLICE_S)
        for reference in done:
            node_id = references[reference]
            agent, _ = asked.pop(node_id)
            try:
                results += ray.get(reference, timeout=_ARRIVED_S)
                del waiting[node_id]
            except RayError:  # a fresh one can do it, if its node is there
                self._drop(node_id, agent)
                again_at[node_id] = time.monotonic() + _AGAIN_S
