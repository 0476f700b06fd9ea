"""The endpoint of a running executor: through a rebuild, its supervisor's death, and at an address that is taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
import ray
from probe_executor import await_epoch, probe_config, run_step, serving, within

from resilient_executor import ConfigError, ExecutorState, ResilientExecutor
from resilient_executor.cli import main

pytestmark = pytest.mark.usefixtures("ray_cluster")


def ask(executor: ResilientExecutor, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{executor.status_url}/{page}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def listens(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5).close()
    except OSError:
        return False
    return True


def status(executor: ResilientExecutor) -> Any:
    return json.loads(ask(executor, "status")[1])


@pytest.mark.timeout(240)
def test_it_tells_the_story_of_a_rebuild_and_of_its_own_death(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({"start_s": 1.0}, tensor_parallel_size=2, status_port=0, heartbeat_interval_s=0.25) as executor:
        assert run_step(executor, 1)["epoch"] == 1
        within(5.0, lambda: ask(executor, "readyz") == (200, "HEALTHY\n"), "ready")
        within(5.0, lambda: len(status(executor)["ranks"]) == 2, "both ranks are shown")
        shown = status(executor)
        assert [rank["pid"] for rank in shown["ranks"]] == [worker.process.pid for worker in executor.workers]
        within(5.0, lambda: {r["phase"] for r in status(executor)["ranks"]} == {"serving"}, "all serve")

        os.kill(executor.workers[1].process.pid, signal.SIGKILL)
        seen: list[tuple[str, int, int]] = []
        deadline = time.monotonic() + 60
        while not (executor.epoch == 2 and executor.state is ExecutorState.HEALTHY):
            assert time.monotonic() < deadline
            state = status(executor)["state"]
            seen.append((state, ask(executor, "livez")[0], ask(executor, "readyz")[0]))
            time.sleep(0.05)
        assert ("RECOVERING", 200, 503) in seen, "it did not answer during the rebuild"
        within(5.0, lambda: ask(executor, "readyz")[0] == 200, "ready again")
        assert "was killed by SIGKILL" in status(executor)["incidents"][0]["cause"]
        assert 'incidents_total{kind="process_exit",outcome="recovered"} 1' in ask(executor, "metrics")[1]

        assert main(["status", "--url", str(executor.status_url)]) == 0
        assert main(["stacks", "--url", str(executor.status_url)]) == 0
        printed = capsys.readouterr().out
        assert "HEALTHY: epoch 2" in printed
        assert "most recent call first" in printed

        assert executor._supervision is not None
        url = executor.status_url
        supervisor = executor._supervision.actor_processes()[0]
        os.kill(ray._private.state.actors(supervisor._actor_id.hex())["Pid"], signal.SIGKILL)

        def answers_again() -> bool:
            try:
                return status(executor)["state"] == "HEALTHY" and len(status(executor)["ranks"]) == 2
            except (OSError, ValueError):
                return False

        time.sleep(0.5)
        within(30.0, answers_again, "the next supervisor answers at the same address")
        assert executor.status_url == url
        await_epoch(executor, 2)
    within(5.0, lambda: not listens(str(url)), "it ends with the executor")


@pytest.mark.parametrize(
    ("host", "words"),
    [("127.0.0.1", "in use"), ("192.0.2.200", "status_host"), ("no.such.host.invalid", "status_host")],
)
def test_an_address_that_cannot_be_had(host: str, words: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"status_port {port}.*{words}|{words}.*status_port {port}"):
            ResilientExecutor(probe_config(status_host=host, status_port=port))


def test_it_is_off_by_default() -> None:
    with serving() as executor:
        assert executor.status_url is None
