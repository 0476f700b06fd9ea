"""Heartbeats on the supervisor's own node: real sockets, one process."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import astuple
from itertools import pairwise

import pytest
from heartbeat_node import Give, Node, all_answer, dead, progress, stopped

from resilient_executor.heart import Beat, address_of, open_socket, receive
from resilient_executor.supervisor import heartbeats


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
    assert node.renewals == 1 if give is dead else node.renewals > 1, "the agent must not end anybody"
    assert all(later - at < duration_s / 2 for (at, duration_s), (later, _) in pairwise(node.leases))
    for beats in heard:
        assert len(beats) > 5
        assert all(beat.heard < beat.number for beat in beats)
        assert [beat.heard for beat in beats[1:]] == [beat.number for beat in beats[:-1]]
    assert all(node.watch.silence_s(rank, time.monotonic()) < 0.3 for rank in range(2))
    assert max(node.watch.round_trip_s.values()) < 0.1


def test_one_of_its_own_node_that_does_not_listen_is_called() -> None:
    node, heard = straight(all_answer, 1)
    assert len(heard[0]) > 5
    assert {rank for rank, _, _ in node.direct} == {1}
    assert len(node.direct) > 5


def test_without_a_socket_of_its_own_it_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor_left() -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(heartbeats, "Beats", no_descriptor_left)
    node, heard = straight(all_answer, 2)
    assert (heard, node.beats) == ([[], []], [])
    assert {rank for rank, _, _ in node.direct} == {0, 1}
    assert all(node.watch.silence_s(rank, time.monotonic()) < 0.3 for rank in range(2))


def test_answers_that_lie_there_after_a_pause_count() -> None:
    """The supervisor was stopped in the middle of a round, for longer than anybody may owe an answer."""
    heard: list[list[Beat]] = [[], []]

    async def work() -> Node:
        node = Node(all_answer, here="node")
        with heart(node, 0, heard[0]), heart(node, 1, heard[1]):
            node.heartbeats().of_node(node.members, node.agent)
            for _ in range(5):
                await asyncio.sleep(0.05)
                time.sleep(0.3)  # everything in this process stops, the hearts too: the beats lie there
            await asyncio.sleep(0.2)
            await node.end()
        return node

    node = asyncio.run(work())
    assert node.direct == []
    assert len(heard[0]) > 5


def test_when_its_agent_comes_late_the_calls_end() -> None:
    async def work() -> None:
        node, heard = Node(all_answer, here="node"), list[Beat]()
        with heart(node, 0, heard), heart(node, 1, []):
            beats = node.heartbeats()
            for member in node.members:
                beats.of_worker(member)
            await asyncio.sleep(0.1)
            assert len(node.direct) > 2
            beats.of_node(node.members, node.agent)
            calls = len(node.direct)
            await asyncio.sleep(0.2)
            assert len(node.direct) <= calls
            assert len(heard) > 3
            assert heard[0].number > max(number for _, number, _ in node.direct)
            await node.end()

    asyncio.run(work())


def test_a_successor_of_its_own_agent_changes_nothing_for_the_workers() -> None:
    heard: list[Beat] = []

    async def work() -> None:
        node, new = Node(dead, here="node"), Node(all_answer)
        with heart(node, 0, heard), heart(node, 1, []):
            beats = node.heartbeats()
            beats.of_node(node.members, node.agent)
            await asyncio.sleep(0.2)
            beats.of_node(node.members, new.agent)
            await asyncio.sleep(0.5)
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
