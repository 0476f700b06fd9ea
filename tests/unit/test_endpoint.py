"""The endpoint's pages and the commands that read them, over real HTTP, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from resilient_executor.cli import main
from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import ConfigError
from resilient_executor.protocol import Phase, ProcessIdentity, Progress, WorkerSpec
from resilient_executor.supervisor.endpoint import Endpoint
from resilient_executor.supervisor.status import STATES, News, prometheus, status
from resilient_executor.supervisor.watch import Watch, WatchSettings

SETTINGS = WatchSettings.from_config(ExecutorConfig(worker=WorkerSpec("unused")))
INCIDENT = {
    "number": 1,
    "epoch": 1,
    "cause": 'rank 1 (pid 11) was killed by SIGKILL during step "7"',
    "outcome": "recovered",
    "duration_s": 2.5,
}
NEWS = News("probe", "HEALTHY", 2, "", 4242, 2, 2, [INCIDENT], {("process_exit", "recovered"): 1}, {"load": 1.5}, 1, 10)


def data(news: News | None = NEWS) -> dict[str, Any]:
    watch = Watch(
        2, [(ProcessIdentity(10 + r, 1, "n"), "10.0.0.1") for r in range(2)], SETTINGS, SETTINGS.step_deadline(), 0.0
    )
    watch.heard(Progress(0, 2, Phase.SERVING, 17, 0.25, 16, (), "", 9.0, 17, 0.1), 1.0, 0.002)
    return status(news, 1.5, watch, {0: ("0",), 1: ("1",)}, 2.0)


class Server:
    """An endpoint in a thread, whose state can be set."""

    def __init__(self) -> None:
        self.news: News | None = NEWS
        self.port = 0
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        async def stacks() -> list[str]:
            return ["rank 0: in step 17"]

        async def start() -> None:
            self.endpoint = Endpoint(lambda: data(self.news), stacks)
            self.port = await self.endpoint.start("127.0.0.1", 0)
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self.endpoint.close()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    def be(self, state: str) -> None:
        self.news = dataclasses.replace(NEWS, state=state)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        ("STARTING", 200, 503),
        ("HEALTHY", 200, 200),
        ("SUSPECT", 200, 503),
        ("RECOVERING", 200, 503),
        ("FAILED", 503, 503),
        ("STOPPED", 503, 503),
    ],
)
def test_probes_metrics_and_status_show_the_same_state(server: Server, state: str, live: int, ready: int) -> None:
    """F8."""
    server.be(state)
    assert server.ask("/livez") == (live, f"{state}\n")
    assert server.ask("/readyz?verbose") == (ready, f"{state}\n")
    assert json.loads(server.ask("/status")[1])["state"] == state
    shown = re.findall(r'resilient_executor_state\{state="(\w+)"\} (\d)', server.ask("/metrics")[1])
    assert dict(shown) == {name: str(int(name == state)) for name in STATES}
    server.be("HEALTHY")


def test_it_answers_before_there_is_any_news(server: Server) -> None:
    server.news = None
    for path, code in (("/livez", 200), ("/readyz", 503), ("/metrics", 200), ("/status", 200), ("/", 200)):
        assert server.ask(path)[0] == code
    server.be("HEALTHY")


def test_every_line_of_the_metrics_is_well_formed() -> None:
    name, label = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'[a-z]+="(?:[^"\\\n]|\\.)*"'
    sample = re.compile(rf"{name}(\{{{label}(,{label})*\}})? -?[0-9.e+-]+")
    lines = prometheus(data()).splitlines()
    assert all(line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line) for line in lines), lines
    assert 'resilient_executor_incidents_total{kind="process_exit",outcome="recovered"} 1' in lines
    assert 'resilient_executor_rank_heartbeat_age_seconds{rank="0"} 1.0' in lines
    assert 'resilient_executor_rank_step_age_seconds{rank="0"} 0.25' in lines


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert server.ask("/status", method)[0] == 405


def test_strange_requests(server: Server) -> None:
    assert server.ask("/status", "HEAD") == (200, "")
    assert server.ask("/../etc/passwd")[0] == 404
    for raw in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n", b"\xff\xfe \xfd\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(raw)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert server.ask("/livez")[0] == 200


def test_the_page_is_self_contained(server: Server) -> None:
    code, page = server.ask("/")
    assert code == 200
    assert not re.findall(r"https?://|src=|innerHTML", page)


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    def test_status(self, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        url = f"http://127.0.0.1:{server.port}"
        code, out, _ = self.run(capsys, "status", "--url", url)
        assert code == 0
        assert "probe is HEALTHY: epoch 2, restarts 1 of 10, driver 4242" in out
        assert "in step 17 for 0.2 s" in out
        assert "was killed by SIGKILL" in out
        server.be("RECOVERING")
        monkeypatch.setenv("RESILIENT_EXECUTOR_STATUS_PORT", str(server.port))
        code, out, _ = self.run(capsys, "status", "--json")
        assert (code, json.loads(out)["state"]) == (1, "RECOVERING")
        server.be("HEALTHY")

    def test_stacks(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(capsys, "stacks", "--url", f"http://127.0.0.1:{server.port}")[:2] == (0, "rank 0: in step 17\n")

    @pytest.mark.parametrize(
        "url", ["ftp://x:1", "127.0.0.1:80", "http://127.0.0.1", "http://h:99999", "http://[::1:2"]
    )
    def test_an_address_that_is_none(self, capsys: pytest.CaptureFixture[str], url: str) -> None:
        code, _, error = self.run(capsys, "status", "--url", url)
        assert code == 2
        assert "no address of an endpoint" in error
        assert error.count("\n") == 1

    def test_nobody_answers(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
            code, _, error = self.run(capsys, "stacks", "--url", url)
        assert code == 2
        assert "status_port" in error

    def test_watch_wants_a_number(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(capsys, "status", "--watch", "soon")[0] == 2


@pytest.mark.parametrize(
    "wrong",
    [{"status_port": -1}, {"status_port": 65536}, {"status_port": "80"}, {"status_host": ""}, {"status_host": "a b"}],
    ids=str,
)
def test_hosts_and_ports_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join(wrong)):
        ExecutorConfig(worker=WorkerSpec("unused"), **wrong)
