"""Talks to a driver (driver.py) that runs on the cluster's head, and repairs the cluster after each fault."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from resilient_executor.chaos.cluster import NetnsCluster

Message = dict[str, Any]


class Commander:
    """One driver process. Its messages are read by a thread, so that every wait has a bound."""

    def __init__(self, cluster: NetnsCluster, settings: dict[str, Any]) -> None:
        self.cluster = cluster
        command = [sys.executable, str(Path(__file__).with_name("driver.py")), cluster.address, json.dumps(settings)]
        self._process = cluster.popen(0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._oracle: dict[tuple[int, int], list[list[int]]] = {}

    def __enter__(self) -> Commander:
        self.wait("ready", 100)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            try:
                self.tell("end")
                self._process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait(10)
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def kill(self) -> None:
        """SIGKILL the driver."""
        self._process.kill()
        self._process.wait(10)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait(self, kind: str, timeout_s: float) -> Message:
        """The next message of this kind; others are dropped."""
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                message = self._messages.get(timeout=remaining)
            except queue.Empty:
                break
            if message is None:
                raise AssertionError(f"the driver ended with {self._process.wait(10)} instead of saying {kind!r}")
            if message["kind"] == kind:
                return message
        raise AssertionError(f"the driver did not say {kind!r} within {timeout_s:g} s")

    def oracle(self, tokens: int, seed: int) -> list[list[int]]:
        """The tokens of an undisturbed run."""
        if (tokens, seed) not in self._oracle:
            self.tell(f"go {tokens} {seed}")
            self._oracle[tokens, seed] = self.wait("done", 90)["tokens"]
        return self._oracle[tokens, seed]

    def node_of(self, address: str) -> int:
        return next(node for node in self.cluster.nodes() if self.cluster.ip(node) == address)
