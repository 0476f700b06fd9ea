"""The supervisor's loop over one node's heartbeats, with an agent that is dead, slow, or answers as it is told to."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import astuple
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from resilient_executor import ExecutorConfig, WorkerSpec
from resilient_executor.heart import Answer, Beat, address_of, open_socket, receive
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
    return Progress(rank, 1, Phase.SERVING, -1, 0.0, 3, -1, "")


class Node:
    """Two workers, their agent, and what the supervisor did."""

    def __init__(self, give: Give, here: str = "another node") -> None:
        self.here = here
        self.processes = [ProcessIdentity(100 + rank, os.getpid(), "node") for rank in range(2)]
        self.direct: list[tuple[int, int, int]] = []
        self.beats: list[dict[int, Beat]] = []
        self.renewals = 0
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

    async def _renew(self, *_: object) -> None:
        self.renewals += 1
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


def test_one_call_serves_all_and_says_which_answers_have_been_heard() -> None:
    node = serve(all_answer)
    assert len(node.beats) > 5
    assert [(beats[0].number, beats[0].heard) for beats in node.beats[:4]] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert set(node.watch.progress) == {0, 1}
    assert (node.direct, node.refused) == ([], [])


def test_past_a_dead_agent_the_workers_are_called() -> None:
    node = serve(dead)
    assert (len(node.beats), node.renewals) == (1, 1)
    assert {rank for rank, _, _ in node.direct} == {0, 1}
    of_first = [(number, heard) for rank, number, heard in node.direct if rank == 0]
    assert of_first[:3] == [(2, 0), (3, 2), (4, 3)], "numbers go on: none may stand for two answers"
    assert len(of_first) > 5


@pytest.mark.parametrize("give", [stopped, broken, unavailable])
def test_a_useless_agent_has_its_leases_kept_and_is_tried_again(give: Give) -> None:
    """In between every worker is called, so that none is silent for long."""
    node = serve(give, 1.5)
    assert len(node.beats) > 2
    assert node.renewals >= len(node.beats) - 1
    for rank in range(2):
        assert len(node.numbers(rank)) == len(set(node.numbers(rank))), "no number stands for two answers"
        rounds = [beats[rank].number for beats in node.beats]
        called = [number for of, number, _ in node.direct if of == rank]
        for first, second in pairwise(rounds):
            assert any(first < number < second for number in called)


def test_an_agent_that_was_slow_once_is_asked_again() -> None:
    count = itertools.count()

    async def give(beats: Mapping[ProcessIdentity, Beat]) -> tuple[float, dict[ProcessIdentity, Answer]]:
        if next(count) == 3:
            await asyncio.sleep(30)
        return await all_answer(beats)

    node = serve(give, 1.0)
    assert len(node.beats) > 15
    last_call = max(number for _, number, _ in node.direct)
    assert node.beats[-1][0].number > last_call + 5, "and nobody calls the workers any more"
    assert node.beats[-1][0].heard == node.beats[-1][0].number - 1


def test_an_answer_that_the_agent_has_kept_says_nothing_of_now() -> None:
    """It came too late for its own call; then the workers were called, and one of them froze."""

    async def give(beats: Mapping[ProcessIdentity, Beat]) -> tuple[float, dict[ProcessIdentity, Answer]]:
        took_s, answers = await all_answer(beats)
        if next(count) > 2:
            frozen = next(process for process in answers if process.pid == 101)
            answers[frozen] = Answer(1, "me", progress(1))
        return took_s, answers

    count = itertools.count()
    node = serve(give)
    assert max(beats[1].heard for beats in node.beats) == 3, "nor does the count go back"
    assert node.beats[-1][1].heard == 3
    assert node.watch.silence_s(1, time.monotonic()) > 0.3
    assert node.watch.silence_s(0, time.monotonic()) < 0.2


def test_a_new_agent_takes_over_from_the_calls() -> None:
    async def work() -> None:
        old = Node(dead)
        beats = old.heartbeats()
        beats.of_node(old.members, old.agent)
        await asyncio.sleep(0.2)
        calls = len(old.direct)
        assert calls > 5
        new = Node(all_answer)
        beats.of_node(old.members, new.agent)
        await asyncio.sleep(0.05)
        assert (len(new.beats), new.renewals) == (0, 1), "it may still start: until it answers, the calls go on"
        assert len(old.direct) > calls
        await asyncio.sleep(0.3)
        calls = len(old.direct)
        await asyncio.sleep(0.2)
        assert len(old.direct) == calls
        assert len(new.beats) > 10
        assert new.beats[0][0].number > max(number for _, number, _ in old.direct)
        await old.end()

    asyncio.run(work())


def test_one_that_is_out_of_the_agents_reach_is_called_alone() -> None:
    async def give(beats: Mapping[ProcessIdentity, Beat]) -> tuple[float, dict[ProcessIdentity, Answer]]:
        took_s, answers = await all_answer(beats)
        for process in answers:
            if process.pid == 101:
                answers[process] = Answer(1, "me", refusal="Connection refused", reachable=False)
        return took_s, answers

    node = serve(give)
    assert set(node.beats[-1]) == {0}
    assert {rank for rank, _, _ in node.direct} == {1}


def test_one_of_another_group_is_reported_and_not_asked_again() -> None:
    async def give(beats: Mapping[ProcessIdentity, Beat]) -> tuple[float, dict[ProcessIdentity, Answer]]:
        took_s, answers = await all_answer(beats)
        for process in answers:
            if process.pid == 101:
                answers[process] = Answer(1, "me", refusal="rank 1 is of epoch 7")
        return took_s, answers

    node = serve(give)
    assert node.refused == [(1, "rank 1 is of epoch 7")]
    assert set(node.beats[-1]) == {0}
    assert node.direct == []


def test_a_late_look_at_the_clock_is_not_the_agents_fault() -> None:
    """The supervisor was stopped while its call was under way."""
    first = [True]

    async def give(beats: Mapping[ProcessIdentity, Beat]) -> tuple[float, dict[ProcessIdentity, Answer]]:
        if first:
            first.clear()
            time.sleep(0.3)  # nothing in this process runs
            await asyncio.sleep(1.0)
        return await all_answer(beats)

    node = serve(give, 1.0)
    assert len(node.beats) > 5
    assert node.direct == []


def test_a_cancellation_that_comes_with_an_answer_is_not_lost() -> None:
    """``asyncio.wait_for`` drops it before Python 3.12; the leases of a dead epoch would be renewed for ever."""

    async def work() -> None:
        for delay in range(12):
            node = Node(all_answer)
            node.heartbeats().of_node(node.members, node.agent)
            [task] = node.tasks
            for _ in range(delay):  # one pass of the loop each: the cancellation meets every line
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0.1)
            assert task.done(), f"cancelled after {delay} passes, it goes on"

    asyncio.run(work())


# -- on the supervisor's own node -------------------------------------------------------------------------------------


@contextmanager
def heart(node: Node, rank: int, heard: list[Beat]) -> Iterator[None]:
    """What a worker has, in this event loop."""
    loop = asyncio.get_running_loop()

    def answer() -> None:
        message, sender = receive(opened)
        beat = Beat(*message)
        heard.append(beat)
        said = [beat.number, beat.grantor, astuple(progress(rank)), ""]
        opened.sendto(json.dumps(said).encode(), sender)

    with closing(open_socket(address_of(node.processes[rank]))) as opened:
        loop.add_reader(opened, answer)
        try:
            yield
        finally:
            loop.remove_reader(opened)


def straight(give: Give, ranks: int, seconds: float = 0.6) -> tuple[Node, list[list[Beat]]]:
    """A node of the supervisor's own, where the first ``ranks`` of its two workers listen."""
    heard: list[list[Beat]] = [[], []]

    async def work() -> Node:
        node = Node(give, here="node")
        with ExitStack() as hearts:
            for rank in range(ranks):
                hearts.enter_context(heart(node, rank, heard[rank]))
            await node.run(seconds)
        return node

    return asyncio.run(work()), heard


@pytest.mark.parametrize("give", [all_answer, dead, stopped])
def test_its_own_node_it_asks_itself_whatever_the_agent_does(give: Give) -> None:
    node, heard = straight(give, 2)
    assert node.beats == []
    assert node.direct == []
    assert node.renewals == 1 if give is dead else node.renewals > 2, "the agent must not end anybody"
    for beats in heard:
        assert len(beats) > 5
        assert [(beat.number, beat.heard) for beat in beats[:3]] == [(1, 0), (2, 1), (3, 2)]
    assert all(node.watch.silence_s(rank, time.monotonic()) < 0.3 for rank in range(2))
    assert max(node.watch.round_trip_s.values()) < 0.1


def test_one_of_its_own_node_that_does_not_listen_is_called() -> None:
    node, heard = straight(all_answer, 1)
    assert len(heard[0]) > 5
    assert {rank for rank, _, _ in node.direct} == {1}
    assert len(node.direct) > 5


def test_a_successor_of_its_own_agent_changes_nothing_for_the_workers() -> None:
    heard: list[Beat] = []

    async def work() -> None:
        node, new = Node(dead, here="node"), Node(all_answer)
        with heart(node, 0, heard), heart(node, 1, []):
            beats = node.heartbeats()
            beats.of_node(node.members, node.agent)
            await asyncio.sleep(0.2)
            beats.of_node(node.members, new.agent)
            await asyncio.sleep(0.2)
            assert (new.renewals > 1, new.beats, node.direct) == (True, [], [])
            await node.end()

    asyncio.run(work())
    assert [beat.number for beat in heard] == list(range(1, len(heard) + 1))


def test_a_cancellation_ends_the_beats_at_every_line_and_closes_their_socket() -> None:
    async def work() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for delay in range(15):
            node, heard = Node(all_answer, here="node"), list[Beat]()
            with heart(node, 0, heard), heart(node, 1, []):
                node.heartbeats().of_node(node.members, node.agent)
                for _ in range(delay):
                    await asyncio.sleep(0)
                await node.end()
                count = len(heard)
                await asyncio.sleep(0.05)
                assert len(heard) == count, f"cancelled after {delay} passes, they go on"
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(work())
