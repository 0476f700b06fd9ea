"""Where the next generation goes: away from nodes that are bad, leaving, or out of sight; and the wait for room."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import PlacementError, WorkerStartError
from resilient_executor.lifecycle import Generation, Lifecycle
from resilient_executor.placement import Reservation, has_room_without, reserve, shortage, wait_ready
from resilient_executor.protocol import WorkerInfo
from resilient_executor.supervisor.avoidance import Avoidance, Death
from resilient_executor.supervisor.client import Supervision
from resilient_executor.supervisor.incidents import Incident
from resilient_executor.supervisor.links import Pair

logger = logging.getLogger(__name__)

#: A rebuild that finds no room asks again, with fresh news of the nodes, after so many seconds.
_ROOM_S: Final = 5.0


class Sites:
    """Holds the bundles, and what is known of nodes. Owned by the thread that builds."""

    def __init__(
        self,
        config: ExecutorConfig,
        lifecycle: Lifecycle,
        supervision: Supervision,
        driver_node_id: str,
        stopping: threading.Event,
    ) -> None:
        self._config, self._lifecycle, self._supervision = config, lifecycle, supervision
        self._driver_node_id, self._stopping = driver_node_id, stopping
        self._avoidance = Avoidance(after=config.avoid_after, avoid_s=config.avoid_s)
        self._reservations: list[Reservation] = []
        #: Nodes that did not see another one in this rebuild.
        self._cut_off: set[str] = set()
        #: The last choice of nodes that was explained.
        self._said: tuple[str, frozenset[str]] = ("", frozenset())

    def begin(self) -> None:
        """A rebuild begins: which links are cut is asked anew."""
        self._cut_off.clear()

    def note_death(self, old: Generation, incident: Incident) -> str:
        """Remember where this was; returns what to add to the line about it."""
        cause, infos = incident.cause, old.group.infos if old.group is not None else []
        if cause is None or cause.rank is None or cause.rank >= len(infos) or old.epoch != incident.epoch:
            return ""
        info = infos[cause.rank]
        devices = ",".join(info.device_ids)
        line = self._avoidance.died(Death(time.monotonic(), cause.rank, info.process.node_id, info.node_ip, devices))
        return f"; {line}" if line else ""

    # -- bundles ----------------------------------------------------------------------------------------------------

    def place(self, epoch: int, *, rebuild: bool) -> Reservation:
        """Bundles away from bad nodes. Where there is no room, a rebuild waits for it, and says so.

        Raises:
            PlacementError: no room in time.
            ExecutorStopped: the executor is being shut down.
        """
        config = self._config
        deadline = time.monotonic() + (config.capacity_timeout_s if rebuild else 0.0)
        waits = False
        while True:
            avoid = self._nodes_to_avoid()
            # Asked for before the old ones are given back: where there is room for both, nobody waits; where there is
            # not, the new ones are first in the queue.
            # Ray wants names of groups to be unique; several executors of one cluster may have the same one.
            label = f"{config.name}-epoch-{epoch}-{secrets.token_hex(4)}"
            reservation = reserve(config, label=label, avoid=avoid)
            self.release()
            self._reservations.append(reservation)
            try:
                wait_ready(reservation, config, self._stopping, _ROOM_S if rebuild else None)
                # Their agents come up while the workers do.
                self._supervision.be_on(reservation.nodes())
                return reservation
            except PlacementError:
                self._avoidance.forgive()  # better there than nowhere
                if time.monotonic() >= deadline:
                    raise
            # A node may come, or one that was left out may be fit again: then the next request is another one.
            phase = f"waiting for capacity: {shortage(config, avoid)}"
            self._lifecycle.note_phase(phase)
            if not waits:
                waits = True
                logger.warning("epoch %d: %s; at most %g s", epoch, phase, config.capacity_timeout_s)

    def release(self) -> None:
        """Give back every bundle that is still held. Twice is fine."""
        while self._reservations:
            self._reservations.pop().release()

    def _nodes_to_avoid(self) -> frozenset[str]:
        """The weaker the reason, the sooner it is dropped where there is no room elsewhere."""
        unfit = self._supervision.unfit_nodes()
        cut_off, bad = frozenset(self._cut_off), self._avoidance.avoided(time.monotonic())
        weaker = (unfit | cut_off | bad, unfit | cut_off, unfit)
        fits = (avoid for avoid in weaker if avoid and has_room_without(self._config, avoid))
        chosen = next(fits, frozenset[str]())
        self._say(chosen, {"unfit": unfit, "cut off": cut_off, "deaths": bad})
        return chosen

    def _say(self, chosen: frozenset[str], reasons: Mapping[str, frozenset[str]]) -> None:
        """Explain the choice in one line; not again while it stays the same, as it may in a wait for room."""
        why = "; ".join(f"{word}: {_brief(nodes)}" for word, nodes in reasons.items() if nodes)
        needed = frozenset().union(*reasons.values()) - chosen
        if (said := (why, needed)) == self._said:
            return
        self._said = said
        if needed:
            logger.warning("nodes that were to be left out (%s) are not: no room without %s", why, _brief(needed))
        elif why:
            logger.info("nodes are left out: %s", why)

    # -- links ------------------------------------------------------------------------------------------------------

    def look_for_cuts(self, infos: Sequence[WorkerInfo], known: Collection[Pair] = ()) -> None:
        """Whether the nodes of a dead group still see each other; its workers are gone, their agents are not.

        Nobody looks where the supervisor has, which takes what it has found (``known``): that costs time. Nodes that
        were given up are avoided already, and would cost more.
        """
        nodes = {info.process.node_id: info.node_ip for info in infos}
        reached = nodes.keys() - self._supervision.unfit_nodes()
        if not known and reached - {self._driver_node_id}:
            known = self._supervision.cut_pairs(reached)
        for pair in known:
            self._leave_one_out(pair, nodes)

    def check_links(self, infos: Sequence[WorkerInfo]) -> None:
        """Nodes that do not see each other cannot work together, whatever Ray's head sees.

        Raises:
            WorkerStartError: two do not; one of them is left out for the rest of this rebuild.
        """
        nodes = {info.process.node_id: info.node_ip for info in infos}
        if nodes.keys() == {self._driver_node_id}:
            return
        if cut := [pair for pair in self._supervision.cut_pairs(nodes) if self._leave_one_out(pair, nodes)]:
            ends = "; ".join(f"{nodes.get(p.one, 'the driver')} and {nodes.get(p.other, 'the driver')}" for p in cut)
            raise WorkerStartError(f"nodes get no answer from each other: {ends}", phase="rank")

    def _leave_one_out(self, pair: Pair, nodes: Mapping[str, str]) -> bool:
        """Of two nodes that do not see each other, avoid the one of the higher rank, and never the driver's."""
        order = dict.fromkeys([self._driver_node_id, *nodes])
        known = [node_id for node_id in order if node_id in (pair.one, pair.other)]
        if len(known) < 2:
            return False
        self._cut_off.add(known[-1])
        return True


def _brief(nodes: Collection[str]) -> str:
    return ", ".join(sorted(node_id[:8] for node_id in nodes))
