"""Who renews the workers' leases while the supervisor is silent: the executor itself.

A supervisor may die or be stopped for a while. It is replaced within seconds, but its heartbeats are missing until
then, and leases are short, as they must end before a conviction for silence. The executor's process is where an epoch
is given up, so it may say at any time that it is not: it then beats the workers' hearts itself, until the supervisor is
heard again. It convicts nobody.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from resilient_executor.config import ExecutorConfig
from resilient_executor.supervisor.actor import Member

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Charges:
    """Whose leases are to be renewed.

    Attributes:
        neglected: whether the supervisor has not been heard for too long.
    """

    epoch: int
    members: Sequence[Member]
    agents: dict[str, ActorHandle]
    neglected: bool


class StandIn(threading.Thread):
    """A thread that does nothing as long as the supervisor is heard."""

    def __init__(self, config: ExecutorConfig, charges: Callable[[], Charges], stopping: threading.Event) -> None:
        super().__init__(name="resilient-executor-stand-in", daemon=True)
        self._config = config
        self._charges = charges
        self._stopping = stopping
        self._grantor = f"executor-{uuid.uuid4().hex[:8]}"
        #: The heartbeats that are on their way: the next one to a worker waits for the answer to the last.
        self._awaited: dict[tuple[int, int], tuple[int, Any]] = {}
        self._number = 0

    def run(self) -> None:
        """Look once an interval; beat where it is needed."""
        while not self._stopping.wait(self._config.heartbeat_interval_s):
            charges = self._charges()
            if not charges.neglected or not charges.members:
                self._awaited.clear()
                continue
            try:
                self._renew(charges)
            except Exception:
                if self._stopping.is_set():
                    return  # Ray itself is going down
                logger.exception("renewing leases in the supervisor's place failed")

    def _renew(self, charges: Charges) -> None:
        self._awaited = {key: beat for key, beat in self._awaited.items() if key[0] == charges.epoch}
        self._number += 1
        for member in charges.members:
            key = (charges.epoch, member.rank)
            heard, last = self._awaited.get(key, (0, None))
            if last is not None and not ray.wait([last], timeout=0)[0]:
                continue
            beat = member.handle.heartbeat.remote(charges.epoch, self._grantor, self._number, heard)
            self._awaited[key] = (self._number, beat)
        for node_id, agent in charges.agents.items():
            local = [member.process for member in charges.members if member.process.node_id == node_id]
            if local:
                agent.renew.remote(local, self._config.lease_s, self._config.lease_grace_s)
