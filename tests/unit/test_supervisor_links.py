"""Which links are taken for cut."""

from __future__ import annotations

import asyncio
import socket

from resilient_executor.supervisor.links import PATIENCE, Door, LinkHistory, Pair, silent_of


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


def test_a_refusal_is_an_answer_and_silence_is_none() -> None:
    async def look() -> list[str]:
        with socket.socket() as closed, socket.socket() as full:
            closed.bind(("127.0.0.1", 0))  # nobody listens: refused
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            fillers = [socket.socket() for _ in range(4)]
            for one in fillers:  # a full queue drops what comes: silence
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            await asyncio.sleep(0.1)
            door = Door()
            peers = {"open": ("127.0.0.1", await door.open("127.0.0.1")), "refuses": closed.getsockname()}
            try:
                return await silent_of({**peers, "silent": full.getsockname()})
            finally:
                await asyncio.sleep(0.1)
                door.close()
                for one in fillers:
                    one.close()

    assert asyncio.run(look()) == ["silent"]
