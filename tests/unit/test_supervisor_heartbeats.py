"""The supervisor's loop over one node's heartbeats, with an agent that is dead, slow, or answers as it is told to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from itertools import pairwise

import pytest
from heartbeat_node import Give, Node, all_answer, broken, dead, progress, serve, stopped, unavailable

from resilient_executor.heart import Answer, Beat
from resilient_executor.protocol import ProcessIdentity


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
