"""How a server ends: by Ctrl-C at any moment, in time, with nothing left; by itself when it cannot go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest
from engines import Server, ends_in_time_and_leaves_nothing, kill_one, workers
from test_serve import all_clients

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "start"),
        (signal.SIGINT, "recovery"),  # while it serves: test_serve.py
        # Not in a start: the API server of vLLM 0.32 loses a SIGTERM then, with any executor.
        pytest.param(signal.SIGTERM, "serving", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "recovery", marks=pytest.mark.long),
    ],
)
def test_it_ends_in_time_and_leaves_nothing(number: int, moment: str, tmp_path: Path) -> None:
    server = Server("--pipeline-parallel-size", "2", log=tmp_path / "log")
    try:
        if moment == "start":
            deadline = time.monotonic() + 300
            while not workers(server.process.pid):
                assert time.monotonic() < deadline, server.tail()
                time.sleep(0.1)
            time.sleep(1)
        else:
            server.wait()
            all_clients(server)
        if moment == "recovery":
            kill_one(server.process.pid)
            time.sleep(1)
        ends_in_time_and_leaves_nothing(server, number)
    finally:
        server.stop()


def test_a_spent_budget_ends_the_server(tmp_path: Path) -> None:
    server = Server("--pipeline-parallel-size", "2", settings={"max_restarts": 1}, log=tmp_path / "log")
    try:
        server.wait()
        undisturbed = all_clients(server)
        kill_one(server.process.pid)
        assert all_clients(server) == undisturbed

        async def be_disappointed() -> None:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                answer = await client.completions.create(
                    model="reference", prompt="It was", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
                )
                await anext(answer)
                kill_one(server.process.pid)
                finished = None
                with contextlib.suppress(openai.APIError, httpx.HTTPError):
                    async for chunk in answer:
                        finished = chunk.choices[0].finish_reason
                assert finished != "length", "it was served to its end"

        asyncio.run(be_disappointed())
        assert server.health() in (503, 0)
        assert server.process.wait(60) != 0, "the process ends non-zero"
        assert "the executor has failed" in server.log.read_text(errors="replace")
    finally:
        server.stop()
