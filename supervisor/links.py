"""Whether nodes see each other, asked of the network alone.

Two nodes that both see the head, and not each other, look healthy to Ray for ever, and every step between them hangs.
So each node's agent listens at a port and connects to the others'. A kernel completes such a connection even while the
process behind it is busy or stopped, and a refusal is an answer, too: only silence counts, and nobody is suspected for
being slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ray.actor import ActorHandle
from ray.exceptions import RayError

from resilient_executor.supervisor.calls import within

#: For one connection, in seconds. The first packet may be lost; it is sent again after one second.
CONNECT_S: Final = 1.5
#: For an agent to say what it sees, in seconds: silence takes it CONNECT_S, and it may be busy fencing.
_ANSWER_S: Final = CONNECT_S + 1.5
#: From one look to the next, in seconds; a look that meets silence takes longer.
PERIOD_S: Final = 1.0
#: So many looks in a row must have failed.
PATIENCE: Final = 3


@dataclass(frozen=True, order=True)
class Pair:
    """Two nodes, by id, in order."""

    one: str
    other: str

    @classmethod
    def of(cls, one: str, other: str) -> Pair:
        """The pair of two nodes, whichever is named first."""
        return cls(*sorted((one, other)))


class LinkHistory:
    """Counts failures in a row. Pure."""

    def __init__(self) -> None:
        self._failures: dict[Pair, int] = {}

    def note(self, looked_at: Iterable[Pair], failed: Iterable[Pair]) -> list[Pair]:
        """Note one look; returns the pairs that have now failed :data:`PATIENCE` times in a row."""
        bad = set(failed)
        self._failures = {pair: self._failures.get(pair, 0) + 1 for pair in looked_at if pair in bad}
        return sorted(pair for pair, count in self._failures.items() if count >= PATIENCE)


class Door:
    """What others connect to: every connection is closed at once."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """The port at ``address``; the same at every call."""
        if self._server is None:
            self._server = await asyncio.start_server(lambda _, writer: writer.close(), address, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Let nobody in any more."""
        if self._server is not None:
            self._server.close()


async def reach(address: str, port: int) -> bool:
    """Whether the kernel at ``address`` answers within :data:`CONNECT_S`."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
    except ConnectionError:  # refused or reset: an answer
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


async def doors(agents: Mapping[str, ActorHandle]) -> dict[str, tuple[str, int]]:
    """Node id -> address and port where its agent listens; those that do not answer are left out."""

    async def ask(node_id: str) -> tuple[str, tuple[str, int]] | None:
        try:
            return node_id, await within(agents[node_id].door.remote(), 2 * CONNECT_S)
        except (RayError, asyncio.TimeoutError):
            return None

    return dict(one for one in await asyncio.gather(*map(ask, agents)) if one is not None)


async def look(
    here: str, agents: Mapping[str, ActorHandle], peers: Mapping[str, tuple[str, int]]
) -> tuple[set[Pair], set[Pair]]:
    """One look at every pair of nodes.

    Args:
        here: the id of this node, whose own view is taken, too.
        agents: node id -> agent.
        peers: the result of :func:`doors`.

    Returns:
        the pairs that were looked at, and those where one got no answer from the other.
    """
    looked: set[Pair] = set()
    failed: set[Pair] = set()

    def note(node_id: str, silent: Iterable[str]) -> None:
        looked.update(Pair.of(node_id, other) for other in peers if other != node_id)
        failed.update(Pair.of(node_id, other) for other in silent)

    async def ask(node_id: str) -> None:
        others = {n: where for n, where in peers.items() if n != node_id}
        try:
            note(node_id, await within(agents[node_id].silent.remote(others), _ANSWER_S))
        except (RayError, asyncio.TimeoutError):
            return  # what it sees is not known; whether it is seen, the others say

    asked = {node_id: asyncio.ensure_future(ask(node_id)) for node_id in peers if node_id != here}
    try:
        out_of_reach = await silent_of({n: where for n, where in peers.items() if n != here})
        note(here, out_of_reach)
        await asyncio.gather(*(task for node_id, task in asked.items() if node_id not in out_of_reach))
    finally:
        for task in asked.values():
            task.cancel()  # an answer that cannot come must not delay the look
    return looked, failed


async def silent_of(peers: Mapping[str, tuple[str, int]]) -> list[str]:
    """Those of the nodes that give no answer."""
    answers = await asyncio.gather(*(reach(*where) for where in peers.values()))
    return [node_id for node_id, answered in zip(peers, answers, strict=True) if not answered]
