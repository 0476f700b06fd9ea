"""One node for the supervisor's heartbeats: two workers, and an agent that does as it is told."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from resilient_executor import ExecutorConfig, WorkerSpec
from resilient_executor.heart import Answer, Beat
from resilient_executor.protocol import Phase, ProcessIdentity, Progress
from resilient_executor.supervisor.actor import Member
from resilient_executor.supervisor.heartbeats import Heartbeats
from resilient_executor.supervisor.pulse import Pulse
from resilient_executor.supervisor.watch import Watch, WatchSettings

CONFIG = ExecutorConfig(
    worker=WorkerSpec("a:B"), tensor_parallel_size=2, heartbeat_interval_s=0.02, heartbeat_timeout_s=0.3
)
SETTINGS = WatchSettings.from_config(CONFIG)
Give = Callable[[Mapping[ProcessIdentity, Beat]], Coroutine[Any, Any, tuple[float, dict[ProcessIdentity, Answer]]]]


def progress(rank: int) -> Progress:
    return Progress(rank, 1, Phase.SERVING, -1, 0.0, 3, (), "")


class Node:
    """Two workers, their agent, and what the supervisor did."""

    def __init__(self, give: Give, here: str = "another node") -> None:
        self.here = here
        self.processes = [ProcessIdentity(100 + rank, os.getpid(), "node") for rank in range(2)]
        self.direct: list[tuple[int, int, int]] = []
        self.beats: list[dict[int, Beat]] = []
        self.renewals = 0
        #: When the agent was told to keep its workers, and for how long.
        self.leases: list[tuple[float, float]] = []
        self.refused: list[tuple[int, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.watch = Watch(1, [(p, "10.0.0.1") for p in self.processes], SETTINGS, SETTINGS.step_deadline(), 0.0)
        self._give = give
        self.members = [
            Member(rank, SimpleNamespace(heartbeat=Remote(self._heartbeat(rank))), process, "10.0.0.1")
            for rank, process in enumerate(self.processes)
        ]
        self.agent = SimpleNamespace(beat=Remote(self._beat), renew=Remote(self._renew))

    def _heartbeat(self, rank: int) -> Callable[..., Coroutine[Any, Any, Progress]]:
        async def heartbeat(epoch: int, grantor: str, number: int, heard: int) -> Progress:
            self.direct.append((rank, number, heard))
            return progress(rank)

        return heartbeat

    async def _beat(self, beats: Mapping[ProcessIdentity, Beat], *_: object) -> Any:
        self.beats.append({process.pid - 100: beat for process, beat in beats.items()})
        return await self._give(beats)

    async def _renew(self, _: object, duration_s: float, __: float) -> None:
        self.renewals += 1
        self.leases.append((time.monotonic(), duration_s))
        if self._give is dead:
            raise RayActorError
        if self._give is unavailable and self.renewals % 2:
            raise ActorUnavailableError("the connection is broken", b"1" * 16)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    def heartbeats(self) -> Heartbeats:
        return Heartbeats(
            self.watch,
            Pulse(),
            SETTINGS,
            self.here,
            "me",
            lambda rank, text: self.refused.append((rank, text)),
            self.spawn,
        )

    async def run(self, seconds: float) -> None:
        self.heartbeats().of_node(self.members, self.agent)
        await asyncio.sleep(seconds)
        await self.end()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.sleep(0.05)
        assert all(task.done() for task in self.tasks), "a task has outlived its cancellation"

    def numbers(self, rank: int) -> list[int]:
        """Of all beats to a worker, on either way, in order."""
        direct = [number for of, number, _ in self.direct if of == rank]
        return sorted([*direct, *(beats[rank].number for beats in self.beats if rank in beats)])


class Remote:
    """Something with ``remote``, as Ray's methods have it."""

    def __init__(self, work: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = work


async def all_answer(beats: Mapping[ProcessIdentity, Beat]) -> tuple[float, dict[ProcessIdentity, Answer]]:
    return 0.0, {p: Answer(beat.number, beat.grantor, progress(p.pid - 100)) for p, beat in beats.items()}


async def dead(beats: Mapping[ProcessIdentity, Beat]) -> Any:
    raise RayActorError


async def unavailable(beats: Mapping[ProcessIdentity, Beat]) -> Any:
    raise ActorUnavailableError("the connection is broken", b"1" * 16)


async def stopped(beats: Mapping[ProcessIdentity, Beat]) -> Any:
    await asyncio.sleep(30)


async def broken(beats: Mapping[ProcessIdentity, Beat]) -> Any:
    return "nonsense"


def serve(give: Give, seconds: float = 0.6) -> Node:
    async def work() -> Node:
        node = Node(give)
        await node.run(seconds)
        return node

    return asyncio.run(work())
