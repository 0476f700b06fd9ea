"""``vllm serve`` with the one flag, OpenAI clients that stream, and workers that are killed.

``KILLS`` and ``SEED`` in the environment set how many and which.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engines import PROMPTS, Assassin, Server, actors, ends_in_time_and_leaves_nothing, kill_one

KILLS = int(os.environ.get("KILLS", "5"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 30)))
CLIENTS = 8

pytestmark = pytest.mark.timeout(600 + 60 * KILLS)


@pytest.fixture(scope="module", params=[pytest.param("tp2", marks=pytest.mark.long), "pp2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    sizes = {"tp2": "--tensor-parallel-size", "pp2": "--pipeline-parallel-size"}[request.param]
    running = Server(sizes, "2", log=tmp_path_factory.mktemp("serve") / "log")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


async def stream(client: openai.AsyncOpenAI, number: int) -> str:
    """One client: completions and chats in turn, streamed; the text as it arrived."""
    prompt, text = f"{PROMPTS[number % len(PROMPTS)]} {number}", ""
    options: dict[str, Any] = {"model": "reference", "max_tokens": 60, "temperature": 0.0, "stream": True}
    finished = None
    async for chunk in await client.completions.create(prompt=prompt, extra_body={"ignore_eos": True}, **options):
        assert finished is None, "something came after the end"
        text += chunk.choices[0].text
        finished = chunk.choices[0].finish_reason
    assert finished == "length"
    return text


async def _all_clients(url: str) -> list[str]:
    # No retries: a client that would have to repeat anything fails.
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        return list(await asyncio.gather(*(stream(client, number) for number in range(CLIENTS))))


def all_clients(server: Server) -> list[str]:
    return asyncio.run(_all_clients(server.url))


def test_no_client_notices_a_kill(server: Server) -> None:
    print(f"SEED={SEED} KILLS={KILLS}")
    undisturbed = all_clients(server)
    assert all_clients(server) == undisturbed
    engine, healths = server.engine, []
    # Longer pauses than a rebuild, and shorter ones: some kills hit the service, some the rebuild.
    with Assassin(server.process.pid, KILLS, SEED, pause_s=(0.2, 14.0)) as assassin:
        while not assassin.done:
            assert all_clients(server) == undisturbed, f"seed {SEED}\n{server.tail()}"
            healths.append(server.health())
    assert all_clients(server) == undisturbed
    assert set(healths) <= {200}
    assert server.engine == engine, "the engine's process is another one"
    assert server.process.poll() is None
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log, server.tail()
    recoveries = log.count("; recovered in")
    print(f"{len(assassin.killed)} kills, {recoveries} recoveries")
    assert recoveries > KILLS // 8


def test_a_client_that_leaves_during_a_recovery_is_forgotten(server: Server) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            task = asyncio.create_task(stream(client, 1))
            await asyncio.sleep(0.2)
            kill_one(server.process.pid)
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    undisturbed = all_clients(server)
    asyncio.run(leave())
    assert all_clients(server) == undisturbed


def test_new_requests_during_a_recovery_wait(server: Server) -> None:
    undisturbed = all_clients(server)
    kill_one(server.process.pid, 1)
    assert server.health() == 200
    assert all_clients(server) == undisturbed


def test_the_supervisor_may_die_too(server: Server) -> None:
    undisturbed = all_clients(server)
    for pid in actors("SupervisorActor", server.process.pid) + actors("NodeAgent", server.process.pid):
        os.kill(pid, signal.SIGKILL)
    kill_one(server.process.pid)
    assert all_clients(server) == undisturbed


def test_ctrl_c_ends_it_in_time_and_leaves_nothing(server: Server) -> None:
    """Comes last: the server is over. At other moments: ``test_server_end.py``."""
    all_clients(server)
    ends_in_time_and_leaves_nothing(server, signal.SIGINT)
