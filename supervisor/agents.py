"""The node agents of one executor: made where they are needed, and known when they have died."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from resilient_executor.protocol import ProcessIdentity

logger = logging.getLogger(__name__)

#: One that has died sooner than so many seconds after it was made would do so again: the next one is made by whoever
#: cannot do without, and not for watching alone.
_BRIEF_S: Final = 10.0
#: For an answer that is there, in seconds.
_THERE_S: Final = 1.0


@dataclass(frozen=True)
class _Agent:
    handle: ActorHandle
    #: Of a call that ends with the agent.
    stay: Any
    made_at: float


class Agents:
    """Handles of the agents, by node. Safe for several threads, and never waits.

    Args:
        make: starts an agent on a node.
        owner: the process that asks for them.
    """

    def __init__(self, make: Callable[[str], ActorHandle], owner: ProcessIdentity) -> None:
        self._make, self._owner = make, owner
        self._lock = threading.Lock()
        self._agents: dict[str, _Agent] = {}

    def get(self, node_id: str) -> ActorHandle:
        """The agent of a node; makes it if there is none."""
        with self._lock:
            if node_id not in self._agents:
                handle = self._make(node_id)
                self._agents[node_id] = _Agent(handle, handle.stay.remote(self._owner), time.monotonic())
            return self._agents[node_id].handle

    def drop(self, node_id: str, handle: ActorHandle | None = None) -> bool:
        """Forget the agent of a node, or this one of it: the next one who asks gets another. Returns whether it was."""
        with self._lock:
            agent = self._agents.get(node_id)
            known = agent is not None and handle in (None, agent.handle)
            if known:
                del self._agents[node_id]
            return known

    def handles(self, nodes: Iterable[str] | None = None) -> dict[str, ActorHandle]:
        """Node id -> agent, of all or of these nodes, as far as there are any."""
        with self._lock:
            wanted = self._agents if nodes is None else [node_id for node_id in nodes if node_id in self._agents]
            return {node_id: self._agents[node_id].handle for node_id in wanted}

    def take_dead(self) -> list[str]:
        """Forget the agents that have died; returns the nodes that should have another one, without being asked."""
        with self._lock:
            stays = {agent.stay: (node_id, agent) for node_id, agent in self._agents.items()}
        if not stays:
            return []
        ended, _ = ray.wait(list(stays), num_returns=len(stays), timeout=0)
        bereft = []
        for stay in ended:
            node_id, agent = stays[stay]
            if _is_unavailable(stay):
                with self._lock:
                    if self._agents.get(node_id) is agent:
                        self._agents[node_id] = replace(agent, stay=agent.handle.stay.remote(self._owner))
                continue
            if not self.drop(node_id, agent.handle):
                continue  # somebody has noticed before, and perhaps made another
            lasted_s = time.monotonic() - agent.made_at
            logger.warning("the agent of node %s has died after %.0f s", node_id[:8], lasted_s)
            if lasted_s >= _BRIEF_S:
                bereft.append(node_id)
        return bereft

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._agents.clear()


def _is_unavailable(stay: Any) -> bool:
    """Whether Ray has only lost sight of an agent: it lives, holds leases, and may be back."""
    try:
        ray.get(stay, timeout=_THERE_S)
    except ActorUnavailableError:
        return True
    except RayError:
        return False
    return False
