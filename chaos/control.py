"""Carries faults out against one executor, remembers what it broke, and heals what can be healed."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from resilient_executor.chaos.cables import Cables
from resilient_executor.chaos.faults import Fault, Kind, Needs, mark
from resilient_executor.chaos.hands import Hands
from resilient_executor.chaos.targets import ChaosError, Member, NotFound, Refused, Roster, executors
from resilient_executor.protocol import ProcessIdentity

logger = logging.getLogger(__name__)

#: For a worker to take an order, in seconds.
_ORDER_S: Final = 10.0
#: How often somebody is looked for who can be hit, and how long.
_LOOK_S: Final = 0.02
_FIND_S: Final = 20.0

_SIGNALS: Final = {
    Kind.KILL: signal.SIGKILL,
    Kind.STOP: signal.SIGSTOP,
    Kind.KILL_SUPERVISOR: signal.SIGKILL,
    Kind.STOP_SUPERVISOR: signal.SIGSTOP,
    Kind.KILL_AGENT: signal.SIGKILL,
    Kind.KILL_STANDBY: signal.SIGKILL,
    Kind.KILL_RAYLET: signal.SIGKILL,
    Kind.KILL_NODE: signal.SIGKILL,
    Kind.STOP_NODE: signal.SIGSTOP,
}


@dataclass(frozen=True)
class Strike:
    """A fault that was carried out.

    Attributes:
        at: when it was done, seconds since the Unix epoch.
        epoch: of the workers that it hit.
        ranks: whom it hit, where it hits workers.
        victims: what was hit, for people: ``rank 1 (pid 77 on 10.0.0.3)``.
    """

    number: int
    fault: Fault
    at: float
    epoch: int
    ranks: tuple[int, ...]
    victims: tuple[str, ...]


class Controller:
    """Hits one executor. Safe for several threads.

    Args:
        roster: who belongs to the executor, now; raises ``NotFound`` when there is none.
    """

    def __init__(self, roster: Callable[[], Roster]) -> None:
        self._roster = roster
        self._hands = Hands()
        self._cables = Cables()
        self._lock = threading.Lock()
        self._stopped: dict[ProcessIdentity, threading.Timer | None] = {}

    def roster(self) -> Roster:
        """Who belongs to the executor, now."""
        return self._roster()

    def plan(self, fault: Fault) -> tuple[Roster, list[Member], list[str]]:
        """Whom a fault would hit now: the workers, and for people everything that it hits. Breaks nothing.

        Raises:
            Refused: this fault cannot be done here.
        """
        roster = self._roster()
        chosen = {w.rank for w in fault.target.choose([m.worker for m in roster.members], fault.seed)}
        members = [member for member in roster.members if member.rank in chosen]
        role = fault.traits.role
        if fault.traits.needs is Needs.NETWORK:
            names = self._cables.names(fault.kind, self._links(fault, roster, members))
        elif role == "supervisor":
            names = [_name("the supervisor", roster.supervisor)] if roster.supervisor is not None else []
        elif role == "standby":
            names = [_name("a standby", process) for process in _standbys(fault, roster)]
        elif role == "agent":
            names = [f"the agent of node {node_id[:8]}" for node_id in self._agents(roster, members)]
        elif role == "placement group":
            names = [f"placement group {name}" for name in self._groups(roster)]
        elif role == "node":
            nodes = {member.process.node_id: member.node_ip for member in members[:1]}
            names = [f"node {ip} ({node_id[:8]})" for node_id, ip in nodes.items()]
        else:
            names = [_name(f"rank {m.rank}", m.process, m.node_ip) for m in members]
            if fault.traits.needs is Needs.PERMISSION and any(not hasattr(m.handle, "inject") for m in members):
                raise Refused(f"{fault.kind.value} happens inside a worker: start the executor with allow_chaos=True")
        return roster, members, names

    def strike(self, fault: Fault, number: int = 0, give_up: Callable[[], bool] = lambda: False) -> Strike | None:
        """Carry out one fault; None when nobody was there to be hit within some seconds, or ``give_up`` said so.

        Raises:
            Refused: this fault cannot be done here.
        """
        time.sleep(fault.timing.after_s)
        deadline = time.monotonic() + _FIND_S
        while not give_up() and time.monotonic() < deadline:
            with contextlib.suppress(NotFound, RayError):  # RayError: a node, or its hand, has just gone
                roster, members, names = self.plan(fault)
                if names and fault.timing.phase in ("", roster.phase):
                    at = time.time()
                    if self._do(fault, number, roster, members):
                        ranks = tuple(member.rank for member in members) if fault.traits.role == "worker" else ()
                        return Strike(number, fault, at, roster.epoch, ranks, tuple(names))
            time.sleep(_LOOK_S)
        return None

    def heal(self) -> list[int]:
        """Let everything go on that was stopped; the pids that were still there.

        A whole node that was frozen for so long that Ray has called it dead cannot be reached any more. That is said,
        and is as well: it must not come back, see docs/architecture.md.
        """
        self._cables.heal()
        with self._lock:
            stopped, self._stopped = dict(self._stopped), {}
        by_node: dict[str, list[tuple[int, int]]] = {}
        for process, timer in stopped.items():
            if timer is not None:
                timer.cancel()
            by_node.setdefault(process.node_id, []).append((process.pid, process.start_ticks))
        healed = []
        for node_id, processes in by_node.items():
            try:
                healed += self._hands.signal(node_id, processes, signal.SIGCONT)
            except (RayError, GetTimeoutError):
                pids = [pid for pid, _ in processes]
                logger.warning("node %s is out of reach; end Ray there. Still stopped: %s", node_id[:8], pids)
        return healed

    def close(self) -> None:
        """Heal, and leave nothing behind."""
        self.heal()
        self._hands.close()

    # -- how it is done ---------------------------------------------------------------------------------------------

    def _do(self, fault: Fault, number: int, roster: Roster, members: Sequence[Member]) -> bool:
        role = fault.traits.role
        if fault.traits.needs is Needs.NETWORK:
            self._cables.harm(fault.kind, self._links(fault, roster, members), fault.duration_s)
            return True
        if role == "worker" and fault.traits.needs is Needs.PERMISSION:
            return self._order(fault, number, roster.epoch, members)
        if role == "placement group":
            for group_id in self._groups(roster).values():
                self._remove(group_id)
            return True
        if role == "worker":
            victims = [member.process for member in members]
        elif role == "supervisor":
            victims = [roster.supervisor] if roster.supervisor is not None else []
        elif role == "agent":
            victims = self._agent_processes(self._agents(roster, members))
        elif role == "standby":
            victims = _standbys(fault, roster)
        else:
            return self._hit_node(fault, members[0].process.node_id)
        return self._signal(victims, _SIGNALS[fault.kind], fault.duration_s)

    def _hit_node(self, fault: Fault, node_id: str) -> bool:
        victims = self._node(fault, node_id)
        pairs = [(process.pid, process.start_ticks) for process in victims]
        if fault.kind is Kind.STOP_NODE and fault.duration_s:
            return bool(self._hands.ask(node_id, "freeze", pairs, fault.duration_s))
        try:
            return self._signal(victims, _SIGNALS[fault.kind], 0.0)
        except RayError:  # the answer has died with the node
            return fault.kind is not Kind.STOP_NODE

    def _signal(self, victims: Sequence[ProcessIdentity], number: int, duration_s: float) -> bool:
        by_node: dict[str, list[ProcessIdentity]] = {}
        for victim in victims:
            by_node.setdefault(victim.node_id, []).append(victim)
        hit = False
        for node_id, processes in by_node.items():
            if number == signal.SIGSTOP:
                self._will_heal(processes, duration_s)
            hit |= bool(self._hands.signal(node_id, [(p.pid, p.start_ticks) for p in processes], number))
        return hit

    def _will_heal(self, processes: Sequence[ProcessIdentity], duration_s: float) -> None:
        """Remember what is about to be stopped, before it is."""
        for process in processes:
            timer = None
            if duration_s:
                timer = threading.Timer(duration_s, self._go_on, (process,))
                timer.daemon = True
                timer.start()
            with self._lock:
                self._stopped[process] = timer

    def _go_on(self, process: ProcessIdentity) -> None:
        with self._lock:
            self._stopped.pop(process, None)
        with contextlib.suppress(RayError, GetTimeoutError):
            self._hands.signal(process.node_id, [(process.pid, process.start_ticks)], signal.SIGCONT)

    def _order(self, fault: Fault, number: int, epoch: int, members: Sequence[Member]) -> bool:
        order = {
            "harm": fault.kind.value,
            "after_steps": fault.timing.after_steps,
            "steps": 3 if fault.kind is Kind.SLOW else 1,
            "duration_s": fault.duration_s,
            "exit_code": fault.exit_code,
            "mark": mark(number),
        }
        try:
            ray.get([member.handle.inject.remote(epoch, order) for member in members], timeout=_ORDER_S)
        except (RayError, GetTimeoutError, ValueError):
            return False
        return True

    def _links(self, fault: Fault, roster: Roster, members: Sequence[Member]) -> list[int]:
        """Nodes of the harness whose links such a fault hits: the drawn one first, and of a pair another in use."""
        addresses = [member.node_ip for member in [*members[:1], *roster.members]]
        return self._cables.plan(fault.kind, fault.target.node, addresses)

    def _agents(self, roster: Roster, members: Sequence[Member]) -> dict[str, Any]:
        nodes = {member.process.node_id for member in members}
        return {node_id: agent for node_id, agent in roster.agents.items() if node_id in nodes}

    def _agent_processes(self, agents: dict[str, Any]) -> list[ProcessIdentity]:
        try:
            return list(ray.get([agent.identity.remote() for agent in agents.values()], timeout=_ORDER_S))
        except (RayError, GetTimeoutError):
            return []

    def _node(self, fault: Fault, node_id: str) -> list[ProcessIdentity]:
        """The processes of a node that such a fault hits; the raylet last, for the others' deaths go through it."""
        if fault.kind is Kind.KILL_RAYLET:
            pairs = [self._hands.ask(node_id, "raylet")]
        else:
            pairs = self._hands.ask(node_id, "node", ())
        return [ProcessIdentity(pid, ticks, node_id) for pid, ticks in pairs]

    def _groups(self, roster: Roster) -> dict[str, str]:
        """Name -> id of the placement groups of this executor's present epoch."""
        if [name for _, name in executors()].count(roster.name) > 1:
            raise Refused(
                f"another namespace has an executor {roster.name!r} too; their placement groups look the same"
            )
        prefix = f"{roster.name}-epoch-{roster.epoch}-"
        table = ray.util.placement_group_table()
        rows = [(key, row) for key, row in table.items() if row["state"] != "REMOVED"]
        return {row["name"]: key for key, row in rows if row["name"].startswith(prefix)}

    def _remove(self, group_id: str) -> None:
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))


def steady(roster: Roster, timeout_s: float = 5.0) -> None:
    """Make sure that the executor is in its steady state: healthy, and every worker answers now.

    Raises:
        Refused: it is not; says why.
    """
    if not roster.healthy:
        phase = f", phase {roster.phase}" if roster.phase else ""
        raise Refused(f"the steady state fails: {roster.name} is {roster.state}{phase}, {len(roster.members)} workers")
    references = [member.handle.heartbeat.remote(roster.epoch) for member in roster.members]
    try:
        ray.get(references, timeout=timeout_s)
    except (RayError, GetTimeoutError) as error:
        raise Refused(
            f"the steady state fails: a worker of {roster.name} gives no answer ({type(error).__name__})"
        ) from None


def await_steady(roster: Callable[[], Roster], timeout_s: float, after_epoch: int = 0) -> float:
    """Wait for the steady state; how long that took, in seconds.

    Args:
        roster: who belongs to the executor, now.
        timeout_s: at most.
        after_epoch: this epoch is over; its steady state does not count.

    Raises:
        Refused: it did not come.
    """
    began, why = time.monotonic(), "it was not asked"
    while time.monotonic() - began < timeout_s:
        try:
            present = roster()
            steady(present)
            if present.epoch > after_epoch:
                return time.monotonic() - began
            why = f"epoch {present.epoch} still serves"
        except ChaosError as error:
            why = str(error)
        time.sleep(0.1)
    raise Refused(f"not steady within {timeout_s:g} s: {why}")


def _standbys(fault: Fault, roster: Roster) -> list[ProcessIdentity]:
    """Those that the fault's seed draws, of its node where it names one.

    Raises:
        Refused: the executor keeps none.
    """
    if not any(roster.status.get("standbys", {}).values()):
        raise Refused("this executor has no warm standbys: start it with warm_standbys")
    nodes = {member.process.node_id for member in roster.members if fault.target.node in (None, member.node_ip)}
    here = [process for process in roster.standbys if process.node_id in nodes]
    return random.Random(fault.seed).sample(here, min(fault.target.count, len(here)))


def _name(who: str, process: ProcessIdentity | None, node: str = "") -> str:
    return f"{who} (pid {process.pid}{f' on {node}' if node else ''})" if process is not None else who
