"""The supervisor's heartbeats: by itself on its own node, by one call to the agent of each other one.

Where neither works, it calls the worker alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from resilient_executor.errors import brief
from resilient_executor.heart import Answer, Beat
from resilient_executor.protocol import ProcessIdentity, Progress
from resilient_executor.supervisor.beats import Beats
from resilient_executor.supervisor.calls import within
from resilient_executor.supervisor.pulse import Pulse
from resilient_executor.supervisor.ticks import rest_s
from resilient_executor.supervisor.watch import Watch, WatchSettings

if TYPE_CHECKING:
    from resilient_executor.supervisor.actor import Member

logger = logging.getLogger(__name__)

#: Before an agent that has failed is asked for beats again, in seconds: a third of a lease, doubled up to this.
_LONGEST_PAUSE_S: Final = 60.0
#: The lease that the agent of one's own node gets, in those of other nodes' agents.
_OWN_NODE: Final = 4.0


class Heartbeats:
    """Those of one epoch. Its tasks run until they are cancelled.

    Args:
        watch: is told what is heard.
        pulse: the same, for metrics.
        settings: interval and leases.
        here: id of this process's node.
        grantor: under whose name leases are renewed.
        refused: called with a rank that says that it is of another group, and what it says.
        spawn: makes a task.
    """

    def __init__(
        self,
        watch: Watch,
        pulse: Pulse,
        settings: WatchSettings,
        here: str,
        grantor: str,
        refused: Callable[[int, str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._watch, self._pulse = watch, pulse
        self._settings, self._grantor = settings, grantor
        self._refused, self._spawn = refused, spawn
        self._here = here
        self._by_itself: asyncio.Task[None] | None = None
        #: Of the last beat that was sent to a process; and of the last one whose answer has come: its lease is counted
        #: from there. Both go on when the beats take another way.
        self._sent: Counter[ProcessIdentity] = Counter()
        self._answered: Counter[ProcessIdentity] = Counter()
        self._of_nodes: dict[str, asyncio.Task[None]] = {}
        #: Who is called through Ray now; and who always will be, or has nothing more to say.
        self._of_workers: dict[ProcessIdentity, asyncio.Task[None]] = {}
        self._unreachable: set[ProcessIdentity] = set()

    def of_node(self, members: Sequence[Member], agent: ActorHandle) -> None:
        """Beats for one node's workers from now on, through this agent, which must also be kept from ending them.

        On this process's own node it is only for the latter: the beats go straight to the workers.

        While the agent is slow, and when it has died, its workers are called one by one; so is one who does not answer
        on this way, for good. The agent asks nobody again who owes it an answer: meanwhile the silence grows. The
        successor of another agent begins as a slow one: it still starts.
        """
        node_id = members[0].process.node_id
        if (earlier := self._of_nodes.pop(node_id, None)) is not None:
            earlier.cancel()
        if node_id != self._here:
            self._of_nodes[node_id] = self._spawn(self._of_node(members, agent, ready=earlier is None))
            return
        self._of_nodes[node_id] = self._spawn(self._keep(members, agent))
        if self._by_itself is None:
            self._stop_calls(members)
            self._by_itself = self._spawn(self._straight(members))

    def of_worker(self, member: Member) -> None:
        """Beats for one worker, by calls of Ray, one after the other."""
        self._of_workers[member.process] = self._spawn(self._of_worker(member))

    def forget(self) -> None:
        """Let go of its tasks, which have been cancelled.

        A task that was cancelled holds the frames that it was in, and those hold this object and the workers' handles:
        a circle that Python would take days to find in a process that does so little, and Ray keeps a record of a
        worker, in the driver and in the cluster's head, as long as anybody has its handle.
        """
        self._by_itself = None
        self._of_nodes.clear()
        self._of_workers.clear()

    def _is_reachable(self, member: Member) -> bool:
        """Whether it can be asked by datagrams."""
        return member.process not in self._unreachable

    async def _keep(self, members: Sequence[Member], agent: ActorHandle) -> None:
        """Keep the agent of this node from ending anybody, until it has died.

        Its lease is a long one, and renewed as rarely. On another node it ends workers that nobody here can reach any
        more, and their replacements wait for that; on this one those that could not be fenced, or that are left when we
        have died.
        """
        lease_s = _OWN_NODE * self._settings.lease_s
        while (took_s := await self._renew(members, agent, lease_s)) is not None:
            await asyncio.sleep((lease_s if took_s < math.inf else self._settings.lease_s) / 3)

    async def _renew(self, members: Sequence[Member], agent: ActorHandle, lease_s: float) -> float | None:
        """Have an agent keep its workers. Returns how long it took, ``inf`` if it did not, None if it has died."""
        began = time.monotonic()
        try:
            await agent.renew.remote([m.process for m in members], lease_s, self._settings.lease_grace_s)
        except RayActorError as error:
            if not isinstance(error, ActorUnavailableError):  # that one may be back, and end them
                return None
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is asked again
            logger.debug("an agent does not renew leases: %s", brief(error))
        else:
            return time.monotonic() - began
        return math.inf

    def _stop_calls(self, members: Sequence[Member]) -> None:
        """Those that can be asked otherwise are called no more."""
        for member in members:
            call = self._of_workers.pop(member.process, None) if self._is_reachable(member) else None
            if call is not None:
                call.cancel()

    async def _straight(self, members: Sequence[Member]) -> None:
        """Beats for this node's own workers: a call of Ray costs ten times as much, here and at the agent."""
        try:
            await self._ask_straight(members)
        except Exception as error:  # noqa: BLE001 - no descriptor left, for instance: they must not suffer for it
            logger.warning("heartbeats go through Ray on this node, too: %s", brief(error))
            for member in members:
                if self._is_reachable(member):
                    self._unreachable.add(member.process)
                    self.of_worker(member)

    async def _ask_straight(self, members: Sequence[Member]) -> None:
        interval_s, patience_s = self._settings.heartbeat_interval_s, self._settings.lease_s / 3
        own = Beats()
        try:
            while left := {member.process: member for member in members if self._is_reachable(member)}:
                began = time.monotonic()
                answers = await own.ask(self._beats(left), interval_s / 2, patience_s)
                self._take(left, answers, time.monotonic())
                await asyncio.sleep(rest_s(interval_s, began, time.monotonic()))
        finally:
            own.close()

    def _beats(self, processes: Collection[ProcessIdentity]) -> dict[ProcessIdentity, Beat]:
        """The next beat for each: all get the same number."""
        number = 1 + max((self._sent[process] for process in processes), default=0)
        for process in processes:
            self._sent[process] = number
        return {p: Beat(self._watch.epoch, self._grantor, number, self._answered[p]) for p in processes}

    async def _of_node(self, members: Sequence[Member], agent: ActorHandle, ready: bool) -> None:
        pause_s = self._settings.lease_s / 3
        while True:
            if ready:
                self._stop_calls(members)
                await self._by_agent(members, agent)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for member in members:
                if self._is_reachable(member) and member.process not in self._of_workers:
                    self.of_worker(member)
            if not await self._answers_again(members, agent, pause_s):
                return
            ready = True

    async def _by_agent(self, members: Sequence[Member], agent: ActorHandle) -> None:
        """Beats through the agent, until it fails."""
        settings, interval_s = self._settings, self._settings.heartbeat_interval_s
        # In time for the calls that take its place, before any lease has run out.
        limit_s = interval_s / 2 + settings.lease_s / 3
        wanted = [member.process for member in members]
        while True:
            began = time.monotonic()
            left = {member.process: member for member in members if self._is_reachable(member)}
            try:
                call = agent.beat.remote(
                    self._beats(left), interval_s / 2, wanted, settings.lease_s, settings.lease_grace_s
                )
                took_s, answers = await within(call, limit_s)
                self._take(left, answers, began + took_s)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, its workers must not suffer for it
                if time.monotonic() - began > limit_s + interval_s:
                    continue  # it was this process that did not run
                logger.warning("heartbeats go past the agent of %s: %s", members[0].node_ip, brief(error))
                return
            await asyncio.sleep(rest_s(interval_s, began, time.monotonic()))

    def _take(
        self, asked: Mapping[ProcessIdentity, Member], answers: Mapping[ProcessIdentity, Answer], over_s: float
    ) -> None:
        """Take what was heard; an agent's answer would be here at ``over_s`` if there were no way between us."""
        now = time.monotonic()
        for process, answer in answers.items():
            if answer.progress is not None:
                if answer.number <= self._answered[process]:
                    continue  # the agent has kept it since before the calls of Ray: it says nothing of now
                self._answered[process] = answer.number
                self._heard(answer.progress, now, now - over_s + answer.trip_s)
                continue
            self._unreachable.add(process)
            if answer.reachable:
                self._refused(asked[process].rank, answer.refusal)
            else:
                self.of_worker(asked[process])

    async def _answers_again(self, members: Sequence[Member], agent: ActorHandle, pause_s: float) -> bool:
        """Keep an agent from ending anybody, until it has died (False), or can be asked for beats again.

        For that it must be quick, and every worker must just have been heard without it: should it fail once more, they
        are silent until the next call. It is asked again later each time.
        """
        settings, since = self._settings, time.monotonic()
        while True:
            before = Counter(self._answered)
            if (took_s := await self._renew(members, agent, settings.lease_s)) is None:
                return False
            await asyncio.sleep(settings.lease_s / 3)
            reachable = [member.process for member in members if self._is_reachable(member)]
            heard = all(self._answered[process] > before[process] for process in reachable)
            if heard and took_s <= settings.heartbeat_interval_s / 2 and time.monotonic() - since >= pause_s:
                return True

    async def _of_worker(self, member: Member) -> None:
        process, interval_s = member.process, self._settings.heartbeat_interval_s
        while True:
            began = time.monotonic()
            self._sent[process] += 1
            number = self._sent[process]
            try:
                heard = self._answered[process]
                progress = await member.handle.heartbeat.remote(self._watch.epoch, self._grantor, number, heard)
                now = time.monotonic()
                self._answered[process] = number
                self._heard(progress, now, now - began)
            except RayActorError:
                pass  # the sentinel says the same, and says why
            except Exception as error:  # noqa: BLE001 - StaleEpoch and the like: alive, but not of this group
                self._refused(member.rank, brief(error))
                return
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))

    def _heard(self, progress: Progress, now: float, round_trip_s: float) -> None:
        self._watch.heard(progress, now, round_trip_s)
        self._pulse.heard(progress.rank, now, round_trip_s)
