"""The supervisor: a Ray actor beside the driver that knows, at any moment, which workers are alive.

Four independent sources tell it of a death, and the fastest wins: the node agent's pidfd (a millisecond, with the exit
status), the sentinel call (tens of milliseconds, from Ray), heartbeats (for what is silent but not dead, and for what
answers but gets nowhere), and the executor's own errors. Heartbeats also renew the workers' leases. Before it speaks of
a freeze or a stall it makes a report, because whoever hears of it will kill. It keeps the findings of one epoch only;
what an earlier epoch says goes nowhere.

It owns no decision that must outlive it: epoch, restart budget and incidents stay in the executor's process, so that a
new supervisor needs nothing but :meth:`SupervisorActor.adopt`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from resilient_executor.errors import brief
from resilient_executor.processes import identify, take_ordinary_priority
from resilient_executor.protocol import ExitStatus, ProcessIdentity, Progress
from resilient_executor.supervisor import links
from resilient_executor.supervisor.calls import within
from resilient_executor.supervisor.endpoint import Endpoint
from resilient_executor.supervisor.heartbeats import Heartbeats
from resilient_executor.supervisor.incidents import CauseKind
from resilient_executor.supervisor.progress import DriverView
from resilient_executor.supervisor.pulse import Pulse
from resilient_executor.supervisor.reports import ask_agents, collect, death_notice
from resilient_executor.supervisor.stalls import StallReport
from resilient_executor.supervisor.status import News
from resilient_executor.supervisor.status import status as status_of
from resilient_executor.supervisor.ticks import last_tick, until_tick
from resilient_executor.supervisor.watch import Conviction, Watch, WatchSettings

logger = logging.getLogger(__name__)

#: Part of an interval: so far behind the beats the detectors look.
_BEHIND: Final = 0.03


@dataclass(frozen=True)
class Member:
    """One worker of the epoch, as the supervisor needs it."""

    rank: int
    handle: ActorHandle
    process: ProcessIdentity
    node_ip: str
    device_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that the supervisor found out about a worker, or about the group.

    Attributes:
        rank: whom it is about; None where one rank cannot be blamed.
        at: seconds since the Unix epoch.
        exit: how its process ended, when that is known.
        doing: the worker's last progress, when there was one.
        report: for a freeze or a stall, what everyone was doing.
        pair: for a link that was cut, the nodes at its ends.
    """

    epoch: int
    kind: CauseKind
    rank: int | None
    at: float
    text: str
    exit: ExitStatus | None = None
    doing: Progress | None = None
    report: StallReport | None = None
    pair: links.Pair | None = None


@dataclass
class Examination:
    """The result of one round trip to every worker.

    Attributes:
        progress: rank -> its fresh answer.
        dead: rank -> what Ray says of its death.
        silent: rank -> why there is no answer, although nobody says that it is dead.
        findings: all findings of the epoch so far.
    """

    epoch: int
    progress: dict[int, Progress] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


class SupervisorActor:
    """Watches the workers of one epoch. An asyncio actor: nothing in it blocks."""

    def __init__(self, settings: WatchSettings) -> None:
        take_ordinary_priority()
        self._settings = settings
        self._interval_s = settings.heartbeat_interval_s
        self._deadline = settings.step_deadline()
        self._grantor = f"supervisor-{uuid.uuid4().hex[:8]}"
        self._epoch = 0
        self._members: dict[int, Member] = {}
        self._agents: dict[str, ActorHandle] = {}
        self._watch: Watch | None = None
        self._beats: Heartbeats | None = None
        self._news: News | None = None
        self._news_at = 0.0
        self._endpoint = Endpoint(self._status, self._stack_lines)
        self._findings: list[Finding] = []
        self._pulse = Pulse()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ping(self) -> int:
        """The epoch that it watches; 0 for none."""
        return self._epoch

    async def adopt(self, epoch: int, members: Sequence[Member], agents: dict[str, ActorHandle]) -> ProcessIdentity:
        """Watch these workers from now on, and forget those of every earlier epoch.

        Args:
            epoch: their generation; an older one than the present is ignored.
            members: the workers.
            agents: node id -> that node's agent.

        Returns:
            the supervisor's own process.
        """
        process = identify(os.getpid(), ray.get_runtime_context().get_node_id())
        if epoch < self._epoch:
            return process
        await self.retire(self._epoch)
        self._epoch = epoch
        self._members = {member.rank: member for member in members}
        self._agents, self._findings, self._pulse = dict(agents), [], Pulse()
        processes = [(member.process, member.node_ip) for member in members]
        watch = self._watch = Watch(epoch, processes, self._settings, self._deadline, time.monotonic())
        beats = self._beats = Heartbeats(
            watch,
            self._pulse,
            self._settings,
            process.node_id,
            self._grantor,
            lambda rank, text: self._find(epoch, CauseKind.RPC_ERROR, rank, text),
            self._spawn,
        )
        self._spawn(self._detect(epoch, watch))
        for member in members:
            self._spawn(self._sentinel(epoch, member))
            if member.process.node_id not in agents:
                beats.of_worker(member)
        for node_id, agent in agents.items():
            self._follow(epoch, node_id, agent)
        if any(member.process.node_id != process.node_id for member in members):
            self._spawn(self._links(epoch, process.node_id))
        return process

    async def take_agent(self, epoch: int, node_id: str, agent: ActorHandle) -> None:
        """A node of the epoch has a new agent: its first one has died."""
        if epoch == self._epoch and self._members:
            self._agents[node_id] = agent
            self._follow(epoch, node_id, agent)

    def _follow(self, epoch: int, node_id: str, agent: ActorHandle) -> None:
        local = [member for member in self._members.values() if member.process.node_id == node_id]
        if local and self._beats is not None:
            self._spawn(self._exits(epoch, local, agent))
            self._beats.of_node(local, agent)

    async def retire(self, epoch: int) -> None:
        """Stop watching: what happens to these workers from now on is the executor's own doing."""
        if epoch != self._epoch:
            return
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._beats is not None:
            self._beats.forget()
        self._members = {}
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the supervisor has failed", exc_info=error)

    # -- sources ----------------------------------------------------------------------------------------------------

    async def _exits(self, epoch: int, members: Sequence[Member], agent: ActorHandle) -> None:
        """Follow what the node's agent sees. When the agent is gone, the sentinels are still there."""
        ranks = {member.process: member.rank for member in members}
        known = 0
        while epoch == self._epoch and known < len(ranks):
            try:
                exits = await agent.exits.remote(list(ranks), known, 30.0)
            except ActorUnavailableError:  # it lives, and may be back
                await asyncio.sleep(self._interval_s)
                continue
            except RayActorError:
                return
            for process, status in exits[known:]:
                self._find(epoch, CauseKind.PROCESS_EXIT, ranks[process], "its process ended", status)
            known = len(exits)

    async def _sentinel(self, epoch: int, member: Member) -> None:
        try:
            await member.handle.sentinel.remote()
        except Exception as error:  # noqa: BLE001 - whatever ends this call ends the worker
            self._find(epoch, *death_notice(error, member.rank))

    async def _links(self, epoch: int, here: str) -> None:
        """Look whether all nodes of the epoch see each other, and this one sees them."""
        ranks = {member.process.node_id: member for member in reversed(self._members.values())}
        agents: dict[str, ActorHandle] = {}
        peers: dict[str, tuple[str, int]] = {}
        history = links.LinkHistory()
        while epoch == self._epoch:
            before, wanted = agents, {here, *ranks}
            agents = {node_id: agent for node_id, agent in self._agents.items() if node_id in wanted}
            if agents != before or len(peers) < len(agents):
                peers = await links.doors(agents)
            began = time.monotonic()
            for pair in history.note(*await links.look(here, agents, peers)):
                far = pair.other if pair.one == here else pair.one
                if here in (pair.one, pair.other) and far in ranks:
                    text = "the driver's node gets no answer from it"
                    self._find(epoch, CauseKind.NODE_LOSS, ranks[far].rank, text)
                elif here not in (pair.one, pair.other):
                    ends = " and ".join(ranks[node_id].node_ip for node_id in (pair.one, pair.other))
                    text = f"nodes {ends} get no answer from each other"
                    self._find(epoch, CauseKind.LINK_LOSS, None, text, pair=pair)
                else:
                    continue
                return
            await asyncio.sleep(max(0.0, links.PERIOD_S - (time.monotonic() - began)))

    async def _detect(self, epoch: int, watch: Watch) -> None:
        looking: asyncio.Task[None] | None = None
        while epoch == self._epoch:
            # A little behind the beats: after their answers, and before the process has gone to rest again.
            await asyncio.sleep(until_tick(self._interval_s, time.monotonic()) + _BEHIND * self._interval_s)
            convictions, suspects = watch.judge(time.monotonic())
            if suspects and (looking is None or looking.done()):
                looking = self._spawn(self._look(watch, suspects))
            for conviction in convictions:
                # In a task of its own: this loop must not be late.
                self._spawn(self._convict(epoch, watch, conviction))

    async def _look(self, watch: Watch, ranks: Sequence[int]) -> None:
        """Have the processes of silent workers looked at: one that runs is not frozen."""
        processes = {self._members[rank].process: rank for rank in ranks if rank in self._members}
        seen = await ask_agents(self._agents, "vitals", list(processes), timeout_s=self._settings.lease_s)
        for process, vitals in seen.items():
            watch.saw(processes[process], vitals, time.monotonic())

    async def _convict(self, epoch: int, watch: Watch, conviction: Conviction) -> None:
        """Make the report first: whoever hears of the finding kills."""
        report = await self._report(watch, conviction.ranks, conviction.text)
        rank = conviction.ranks[0] if len(conviction.ranks) == 1 else report.culprit
        text = conviction.text
        if rank is None:
            text += f"; ranks {', '.join(map(str, conviction.ranks))} have not finished"
        self._find(epoch, conviction.kind, rank, text, report=report)

    async def _report(self, watch: Watch, suspects: Sequence[int], text: str) -> StallReport:
        processes = {member.process: rank for rank, member in self._members.items()}
        return await collect(
            watch, processes, self._agents, suspects, text, tensor_parallel_size=self._settings.tensor_parallel_size
        )

    def _find(
        self,
        epoch: int,
        kind: CauseKind,
        rank: int | None,
        text: str,
        exit: ExitStatus | None = None,
        report: StallReport | None = None,
        pair: links.Pair | None = None,
    ) -> None:
        if epoch != self._epoch or self._watch is None or (rank is not None and rank not in self._members):
            return
        doing = self._watch.progress.get(rank) if rank is not None else None
        self._findings.append(Finding(epoch, kind, rank, time.time(), text, exit, doing, report, pair))
        self._changed.set()

    # -- answers ----------------------------------------------------------------------------------------------------

    async def findings(self, epoch: int, known: int, timeout_s: float, view: DriverView) -> list[Finding]:
        """All findings of ``epoch``; waits until there are more than ``known``, at most ``timeout_s``.

        ``view`` is what the caller knows of its group. That it calls says that it lives.
        """
        now = self._news_at = time.monotonic()
        if self._watch is not None and self._watch.epoch == epoch:
            self._watch.told(view, now)
        deadline = last_tick(self._interval_s, now, now + timeout_s)
        while epoch == self._epoch and len(self._findings) <= known:
            self._changed.clear()
            try:
                await within(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                break
        return list(self._findings) if epoch == self._epoch else []

    async def pulse(self) -> dict[int, tuple[list[float], float, float]]:
        """How heartbeats went since the last call, and the suspicion of each worker now; see :class:`Pulse`."""
        now, watch = time.monotonic(), self._watch
        taken = self._pulse.take(now)
        return {r: (trips, silence, watch.suspicion(r, now)) for r, (trips, silence) in taken.items() if watch}

    # -- the operator's view ----------------------------------------------------------------------------------------

    async def serve(self, host: str, port: int, patience_s: float = 0.0) -> int | str:
        """Open the endpoint; returns its port, or why it cannot be opened, also after ``patience_s`` of trying."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return await self._endpoint.start(host, port)
            except OSError as error:
                if time.monotonic() >= deadline:
                    return error.strerror or str(error)
            await asyncio.sleep(0.1)

    async def tell(self, news: News) -> None:
        """Take what the executor knows, for the endpoint."""
        self._news, self._news_at = news, time.monotonic()

    def _status(self) -> dict[str, Any]:
        devices = {rank: member.device_ids for rank, member in self._members.items()}
        return status_of(self._news, self._news_at, self._watch, devices, time.monotonic())

    async def _stack_lines(self) -> list[str]:
        if self._watch is None or not self._members:
            return ["no workers are watched now"]
        return (await self._report(self._watch, (), "asked for")).lines()

    async def roster(self) -> dict[str, Any]:
        """Everyone who belongs to this executor, for the chaos kit: what ``status`` says, processes and handles."""
        return {
            "epoch": self._epoch,
            "status": self._status(),
            "supervisor": identify(os.getpid(), ray.get_runtime_context().get_node_id()),
            "workers": [
                {"rank": m.rank, "process": m.process, "node_ip": m.node_ip, "handle": m.handle}
                for m in self._members.values()
            ],
            "agents": dict(self._agents),
            "standbys": tuple(self._news.standby_processes) if self._news is not None else (),
        }

    async def examine(self, epoch: int, timeout_s: float) -> Examination:
        """Ask every worker, now, and give each ``timeout_s`` to answer: a real round trip, nothing remembered."""
        result = Examination(epoch)
        if epoch != self._epoch or not self._members:
            return result
        members = list(self._members.values())
        await asyncio.gather(*(self._ask(member, epoch, timeout_s, result) for member in members))
        result.findings = list(self._findings)
        return result

    async def _ask(self, member: Member, epoch: int, timeout_s: float, result: Examination) -> None:
        try:
            result.progress[member.rank] = await within(member.handle.heartbeat.remote(epoch), timeout_s)
        except asyncio.TimeoutError:
            result.silent[member.rank] = f"no answer within {timeout_s:g} s"
        except RayActorError as error:
            result.dead[member.rank] = death_notice(error, member.rank)[2]
        except Exception as error:  # noqa: BLE001 - any failure to answer is the answer
            result.silent[member.rank] = brief(error)
