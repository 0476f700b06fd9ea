"""Which links are taken for cut."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from ray.actor import ActorHandle

from resilient_executor.supervisor.links import CONNECT_S, PATIENCE, Door, LinkHistory, Pair, look, silent_of


def test_a_pair_is_the_same_in_both_directions() -> None:
    assert Pair.of("b", "a") == Pair.of("a", "b") == Pair("a", "b")


def test_only_failures_in_a_row_count() -> None:
    history, pairs = LinkHistory(), [Pair("a", "b"), Pair("a", "c")]
    for _ in range(PATIENCE - 1):
        assert history.note(pairs, pairs[:1]) == []
    assert history.note(pairs, pairs[1:]) == [], "it answered once"
    for _ in range(PATIENCE - 1):
        assert history.note(pairs, pairs[:1]) == []
    assert history.note(pairs, pairs[:1]) == pairs[:1]


def test_what_could_not_be_looked_at_is_not_held_against_it() -> None:
    history, pair = LinkHistory(), Pair("a", "b")
    for _ in range(PATIENCE - 1):
        history.note([pair], [pair])
    assert history.note([], []) == []
    assert history.note([pair], [pair]) == []


@contextmanager
def silence() -> Iterator[tuple[str, int]]:
    """An address that gives no answer."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for one in fillers:  # a full queue drops what comes
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        time.sleep(0.1)
        try:
            yield full.getsockname()
        finally:
            for one in fillers:
                one.close()


def test_a_refusal_is_an_answer_and_silence_is_none() -> None:
    async def try_all(silent: tuple[str, int]) -> list[str]:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # nobody listens: refused
            door = Door()
            peers = {"open": ("127.0.0.1", await door.open("127.0.0.1")), "refuses": closed.getsockname()}
            try:
                return await silent_of({**peers, "silent": silent})
            finally:
                await asyncio.sleep(0.1)
                door.close()

    with silence() as silent:
        assert asyncio.run(try_all(silent)) == ["silent"]


class Remote:
    """In the place of an agent's handle: answers, in time or late, that it hears nothing of these."""

    def __init__(self, silent: Sequence[str], after_s: float) -> None:
        self._silent, self._after_s = silent, after_s
        self.silent = self

    async def remote(self, peers: Mapping[str, Any]) -> list[str]:
        await asyncio.sleep(self._after_s)
        return [node_id for node_id in self._silent if node_id in peers]


def looked(agents: Mapping[str, Remote], peers: Mapping[str, tuple[str, int]]) -> tuple[set[Pair], float]:
    began = time.monotonic()
    _, failed = asyncio.run(look("here", cast("Mapping[str, ActorHandle]", agents), peers))
    return failed, time.monotonic() - began


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_who_meets_silence_is_heard_also_when_it_is_late(late_s: float) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address: tuple[str, int] = closed.getsockname()
        agents = {"a": Remote(["b"], CONNECT_S + late_s), "b": Remote(["a"], CONNECT_S + late_s)}
        failed, _ = looked(agents, dict.fromkeys(("here", "a", "b"), address))
    assert failed == {Pair("a", "b")}


def test_nobody_waits_for_the_answer_of_one_that_is_out_of_reach() -> None:
    with socket.socket() as closed, silence() as silent:
        closed.bind(("127.0.0.1", 0))
        peers = {"here": closed.getsockname(), "a": closed.getsockname(), "b": silent}
        failed, took_s = looked({"a": Remote(["b"], CONNECT_S), "b": Remote([], 60.0)}, peers)
    assert failed == {Pair("a", "b"), Pair("b", "here")}
    assert took_s < CONNECT_S + 1.0
