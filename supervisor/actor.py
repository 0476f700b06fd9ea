"""The supervisor: a Ray actor beside the driver that knows, at any moment, which workers are alive.

Four independent sources tell it of a death, and the fastest wins: the node agent's pidfd (a millisecond, with the exit
status), the sentinel call (tens of milliseconds, from Ray), heartbeats (for what is silent but not dead), and the
executor's own errors. It keeps the findings of one epoch only; what an earlier epoch says goes nowhere.

It owns no decision that must outlive it: epoch, restart budget and incidents stay in the executor's process, so that a
new supervisor needs nothing but :meth:`SupervisorActor.adopt`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError

from resilient_executor.protocol import ExitStatus, ProcessIdentity, Progress
from resilient_executor.supervisor.detectors import Liveness, LivenessDetector
from resilient_executor.supervisor.incidents import CauseKind
from resilient_executor.supervisor.pulse import Pulse

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One worker of the epoch, as the supervisor needs it."""

    rank: int
    handle: ActorHandle
    process: ProcessIdentity
    node_ip: str


@dataclass(frozen=True)
class Finding:
    """One thing that the supervisor found out about a worker.

    Attributes:
        at: seconds since the Unix epoch.
        exit: how its process ended, when that is known.
        doing: the worker's last progress, when there was one.
    """

    epoch: int
    kind: CauseKind
    rank: int
    at: float
    text: str
    exit: ExitStatus | None = None
    doing: Progress | None = None


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

    def __init__(self, heartbeat_interval_s: float, heartbeat_timeout_s: float) -> None:
        self._interval_s = heartbeat_interval_s
        self._timeout_s = heartbeat_timeout_s
        self._epoch = 0
        self._members: dict[int, Member] = {}
        self._progress: dict[int, Progress] = {}
        self._findings: list[Finding] = []
        self._pulse = Pulse()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def ping(self) -> int:
        """The epoch that it watches; 0 for none."""
        return self._epoch

    async def adopt(self, epoch: int, members: Sequence[Member], agents: dict[str, ActorHandle]) -> None:
        """Watch these workers from now on, and forget those of every earlier epoch.

        Args:
            epoch: their generation; an older one than the present is ignored.
            members: the workers.
            agents: node id -> that node's agent.
        """
        if epoch < self._epoch:
            return
        await self.retire(self._epoch)
        self._epoch = epoch
        self._members = {member.rank: member for member in members}
        self._progress, self._findings, self._pulse = {}, [], Pulse()
        detectors = {m.rank: self._detector() for m in members}
        self._spawn(self._detect(epoch, detectors))
        for member in members:
            self._spawn(self._sentinel(epoch, member))
            self._spawn(self._heartbeat(epoch, member, detectors[member.rank]))
        for node_id, agent in agents.items():
            local = [member for member in members if member.process.node_id == node_id]
            if local:
                self._spawn(self._exits(epoch, local, agent))

    async def retire(self, epoch: int) -> None:
        """Stop watching: what happens to these workers from now on is the executor's own doing."""
        if epoch != self._epoch:
            return
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._members = {}
        self._changed.set()

    def _detector(self) -> LivenessDetector:
        return LivenessDetector(interval_s=self._interval_s, timeout_s=self._timeout_s, now=time.monotonic())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    # -- sources ----------------------------------------------------------------------------------------------------

    async def _exits(self, epoch: int, members: Sequence[Member], agent: ActorHandle) -> None:
        """Follow what the node's agent sees. When the agent is gone, the sentinels are still there."""
        ranks = {member.process: member.rank for member in members}
        known = 0
        while epoch == self._epoch and known < len(ranks):
            try:
                exits = await agent.exits.remote(list(ranks), known, 30.0)
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

    async def _heartbeat(self, epoch: int, member: Member, detector: LivenessDetector) -> None:
        """One heartbeat after the other: while an answer is awaited, the silence grows, and nothing piles up."""
        while epoch == self._epoch:
            began = time.monotonic()
            try:
                self._progress[member.rank] = await member.handle.heartbeat.remote(epoch)
                detector.heard(time.monotonic())
                self._pulse.heard(member.rank, time.monotonic(), time.monotonic() - began)
            except RayActorError:
                pass  # the sentinel says the same, and says why
            except Exception as error:  # noqa: BLE001 - StaleEpoch and the like: alive, but not of this group
                self._find(epoch, CauseKind.RPC_ERROR, member.rank, _brief(error))
                return
            await asyncio.sleep(max(0.0, self._interval_s - (time.monotonic() - began)))

    async def _detect(self, epoch: int, detectors: dict[int, LivenessDetector]) -> None:
        convicted: set[int] = set()
        while epoch == self._epoch:
            await asyncio.sleep(self._interval_s)
            now = time.monotonic()
            for rank, detector in detectors.items():
                verdict = detector.evaluate(now)
                if verdict.state is Liveness.DEAD and rank not in convicted:
                    convicted.add(rank)
                    self._find(epoch, CauseKind.FROZEN, rank, verdict.reason)

    def _find(self, epoch: int, kind: CauseKind, rank: int, text: str, exit: ExitStatus | None = None) -> None:
        if epoch != self._epoch or rank not in self._members:
            return
        self._findings.append(Finding(epoch, kind, rank, time.time(), text, exit, self._progress.get(rank)))
        self._changed.set()

    # -- answers ----------------------------------------------------------------------------------------------------

    async def findings(self, epoch: int, known: int, timeout_s: float) -> list[Finding]:
        """All findings of ``epoch``; waits until there are more than ``known``, at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while epoch == self._epoch and len(self._findings) <= known:
            self._changed.clear()
            if not await _within(self._changed.wait(), deadline - time.monotonic()):
                break
        return list(self._findings) if epoch == self._epoch else []

    async def pulse(self) -> dict[int, tuple[list[float], float]]:
        """How heartbeats went since the last call; see :class:`Pulse`."""
        return self._pulse.take(time.monotonic())

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
            result.progress[member.rank] = await asyncio.wait_for(
                _wrap(member.handle.heartbeat.remote(epoch)), timeout_s
            )
        except asyncio.TimeoutError:
            result.silent[member.rank] = f"no answer within {timeout_s:g} s"
        except RayActorError as error:
            result.dead[member.rank] = death_notice(error, member.rank)[2]
        except Exception as error:  # noqa: BLE001 - any failure to answer is the answer
            result.silent[member.rank] = _brief(error)


async def _wrap(reference: Awaitable[T]) -> T:
    return await reference


async def _within(work: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(work, max(0.0, timeout_s))
    except asyncio.TimeoutError:
        return False
    return True


def death_notice(error: BaseException, rank: int) -> tuple[CauseKind, int, str]:
    """What Ray's paragraph about a dead actor says, in a few words: kind of cause, the rank, and a text."""
    match = re.search(r"Worker exit type: (\w+)", str(error))
    exit_type = match.group(1) if match else type(error).__name__
    if isinstance(error, OutOfMemoryError) or "OUT_OF_MEMORY" in exit_type:
        return CauseKind.OUT_OF_MEMORY, rank, "Ray's memory monitor killed it to protect the node (OUT_OF_MEMORY)"
    return CauseKind.PROCESS_EXIT, rank, f"Ray reports {exit_type}"


def _brief(error: BaseException) -> str:
    """An error in one line of at most 300 characters: Ray's run over pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
