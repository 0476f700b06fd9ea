"""Heartbeats by datagrams between an agent and the workers of its node: real sockets, one process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

import pytest

from resilient_executor import processes
from resilient_executor.heart import Answer, Beat, Heart, address_of, open_socket, receive
from resilient_executor.protocol import Phase, ProcessIdentity, Progress, StaleEpoch
from resilient_executor.supervisor.beats import Beats

T = TypeVar("T")
BEAT = Beat(3, "supervisor-1", 7, 6)
PROGRESS = Progress(2, 3, Phase.SERVING, 41, 0.25, 40, (), "", 9.0, 40, 0.3, True)


class Worker:
    """Answers like one, after ``slow_s``."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.heart = Heart(self.answer)
        self.process = processes.identify(os.getpid(), "here")

    def answer(self, beat: Beat) -> Progress:
        self.go_on.wait(10)
        self.beats.append(beat)
        if beat.epoch != 3:
            raise StaleEpoch("rank 2 is of epoch 3")
        return PROGRESS


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker()  # one for each process: that is where it listens


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


async def ask(beats: Beats, worker: Worker, beat: Beat, wait_s: float = 5.0, patience_s: float = 30) -> Answer | None:
    return (await beats.ask({worker.process: beat}, wait_s, patience_s)).get(worker.process)


def test_a_beat_and_its_answer_arrive_whole(worker: Worker) -> None:
    async def work() -> Answer | None:
        with closing(Beats()) as beats:
            return await ask(beats, worker, BEAT)

    answer = run(work())
    assert worker.beats[-1] == BEAT
    assert answer is not None
    assert (answer.number, answer.progress, answer.refusal, answer.reachable) == (7, PROGRESS, "", True)
    assert 0.0 < answer.trip_s < 5.0


def test_a_worker_of_another_generation_says_so(worker: Worker) -> None:
    async def work() -> Answer | None:
        with closing(Beats()) as beats:
            return await ask(beats, worker, Beat(4, "supervisor-1", 1, 0))

    answer = run(work())
    assert answer is not None
    assert (answer.progress, answer.refusal, answer.reachable) == (None, "rank 2 is of epoch 3", True)


def test_nobody_there_is_told_at_once() -> None:
    nobody = ProcessIdentity(os.getpid(), 1, "here")

    async def work() -> tuple[float, Answer]:
        began = time.monotonic()
        with closing(Beats()) as beats:
            answers = await beats.ask({nobody: BEAT}, 5.0, 5.0)
        return time.monotonic() - began, answers[nobody]

    took_s, answer = run(work())
    assert took_s < 1.0
    assert not answer.reachable


def test_a_late_answer_comes_with_the_next_call_and_nothing_piles_up_meanwhile(worker: Worker) -> None:
    async def work() -> list[Answer | None]:
        with closing(Beats()) as beats:
            worker.go_on.clear()
            got = [await ask(beats, worker, Beat(3, "s", number, 0), 0.05) for number in (1, 2, 3)]
            asyncio.get_running_loop().call_later(0.1, worker.go_on.set)
            got.append(await ask(beats, worker, Beat(3, "s", 4, 0)))
            got.append(await ask(beats, worker, Beat(3, "s", 5, 1)))
            return got

    before = len(worker.beats)
    *silent, late, next_one = run(work())
    assert silent == [None, None, None]
    assert late is not None
    assert late.number == 1, "the answer to what was asked first, and so it is counted"
    assert next_one is not None
    assert next_one.number == 5
    assert [beat.number for beat in worker.beats[before:]] == [1, 5]


def test_an_answer_that_comes_between_two_calls_is_among_those_of_the_next(worker: Worker) -> None:
    """Thrown away, it would be missing each time for a worker that is just so slow, and its lease would run out."""

    async def work() -> list[Answer | None]:
        with closing(Beats()) as beats:
            got = []
            for number in (1, 2, 3):
                worker.go_on.clear()
                got.append(await ask(beats, worker, Beat(3, "s", number, number - 1), 0.02))
                worker.go_on.set()
                await asyncio.sleep(0.1)
            return got

    first, second, third = run(work())
    assert first is None
    assert second is not None
    assert third is not None
    assert (second.number, third.number) == (1, 2)


def test_who_owes_an_answer_for_too_long_is_to_be_asked_in_another_way(worker: Worker) -> None:
    async def work() -> list[Answer | None]:
        with closing(Beats()) as beats:
            worker.go_on.clear()
            got = [await ask(beats, worker, Beat(3, "s", number, 0), 0.1, 0.15) for number in (1, 2, 3)]
            worker.go_on.set()
            return got

    first, second, third = run(work())
    assert (first, second) == (None, None)
    assert third is not None
    assert not third.reachable


def test_a_new_supervisor_need_not_wait_for_what_is_owed_to_the_last_one(worker: Worker) -> None:
    async def work() -> Answer | None:
        with closing(Beats()) as beats:
            worker.go_on.clear()
            assert await ask(beats, worker, Beat(3, "old", 1, 0), 0.05) is None
            asking = asyncio.ensure_future(ask(beats, worker, Beat(3, "new", 1, 0)))
            await asyncio.sleep(0.05)
            worker.go_on.set()
            return await asking

    answer = run(work())
    assert answer is not None
    assert (answer.number, answer.grantor) == (1, "new"), "what it said to the last one is no answer to this one"
    assert [beat.grantor for beat in worker.beats[-2:]] == ["old", "new"]


def test_a_dead_worker_ends_the_wait(worker: Worker) -> None:
    async def work() -> float:
        with closing(Beats()) as beats:
            worker.go_on.clear()
            asking = asyncio.ensure_future(beats.ask({worker.process: Beat(3, "s", 1, 0)}, 10.0, 30.0))
            await asyncio.sleep(0.05)
            began = time.monotonic()
            beats.forget(worker.process)
            assert await asking == {}
            return time.monotonic() - began

    try:
        assert run(work()) < 5.0
    finally:
        worker.go_on.set()


def test_what_is_no_beat_does_not_stop_a_heart(worker: Worker) -> None:
    with open_socket() as stranger:
        for nonsense in (b"", b"\xff", b"[]", b"[1]", b'{"epoch": 1}', b"[1,2,3,4]"):
            stranger.sendto(nonsense, address_of(worker.process))

    async def work() -> Answer | None:
        with closing(Beats()) as beats:
            return await ask(beats, worker, BEAT)

    assert run(work()) is not None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else for a moment")
def test_another_user_is_not_believed() -> None:
    address = b"\0resilient-executor-test-" + os.urandom(8).hex().encode()
    with open_socket(address) as mine:
        for user in (65534, 0):
            if (child := os.fork()) == 0:
                os.setuid(user)
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
                    other.bind(b"")
                    other.sendto(json.dumps([user]).encode(), address)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert receive(mine) == (None, None)
        assert receive(mine)[0] == [0]
