"""Engines, servers and the killing of their workers, for the tests of this folder."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import resilient_executor.reference

CHECKPOINT = str(Path(resilient_executor.reference.__file__).parent / "checkpoint")
PATH = "resilient_executor.vllm.ResilientVllmExecutor"
PROMPTS = ("It was a fine evening, and", "The house stood on", "My dear Emma,", "She could not")
#: Every engine of these tests: small, deterministic (float32: greedy tokens do not depend on the batch), embedded Ray.
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 512,
    "max_num_seqs": 16,
}
SETTINGS: dict[str, Any] = {
    "address": "local",
    "max_restarts": 1000,
    "backoff_initial_s": 0.01,
    "backoff_max_s": 0.05,
}


#: Of prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: The executors under the engines of :func:`offline`, as long as they live.
_CORES: list[Any] = []


def workers(root: int | None = None) -> list[int]:
    """Pids of the ranks under a process, in order of creation.

    A warm standby looks like a rank from outside; those of this process's own engines are left out.
    """
    waiting = {pid for core in _CORES for pid in standbys(core)} if root is None else set()
    return [pid for pid in actors("WorkerActor", root) if pid not in waiting]


def standbys(core: Any) -> list[int]:
    """Pids of an executor's warm standbys, those that are still being made included."""
    import ray

    handles = [standby.handle for standby in list(core._recovery.standbys._standbys)]
    pids = [int(ray._private.state.actors(handle._actor_id.hex()).get("Pid", 0)) for handle in handles]
    return [pid for pid in pids if pid]


def await_standbys(core: Any, number: int, timeout_s: float = 120) -> None:
    """Wait until so many standbys are ready, and none is being made."""
    deadline = time.monotonic() + timeout_s
    while core.standbys != {"ready": number, "preparing": 0}:
        assert time.monotonic() < deadline, f"standbys: {core.standbys}"
        time.sleep(0.1)


def kill_standby(core: Any, index: int = 0) -> int:
    """Kill one standby; returns its pid."""
    pid = standbys(core)[index]
    os.kill(pid, signal.SIGKILL)
    return pid


def actors(name: str, root: int | None = None) -> list[int]:
    """Pids of the Ray actors of one class under a process."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            title = process.cmdline()
        except psutil.Error:
            continue
        if title and title[0].startswith(f"ray::{name}"):
            found.append((process.pid, process))
    return [pid for pid, _ in sorted(found)]


class Assassin:
    """Kills random workers at random moments, in a thread of its own, as often as asked."""

    def __init__(self, root: int | None, kills: int, seed: int, pause_s: tuple[float, float] = (0.1, 3.0)) -> None:
        self._root = root
        self._kills = kills
        self._rng = random.Random(seed)
        self._pause_s = pause_s
        self.killed: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Assassin:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    @property
    def done(self) -> bool:
        return len(self.killed) >= self._kills

    def _run(self) -> None:
        while not self.done and not self._stop.wait(self._rng.uniform(*self._pause_s)):
            victims = [pid for pid in workers(self._root) if pid not in self.killed]
            if victims:
                self.kill(self._rng.choice(victims))

    def kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed.append(pid)


def kill_one(root: int | None = None, index: int = 0) -> int:
    """Kill one worker by its place in the order of creation; returns its pid."""
    pid = workers(root)[index]
    os.kill(pid, signal.SIGKILL)
    return pid


@contextmanager
def killing(delay_s: float, root: int | None = None, index: int = 0) -> Iterator[list[int]]:
    """Kill one worker ``delay_s`` after the start of the block."""
    killed: list[int] = []
    timer = threading.Timer(delay_s, lambda: killed.append(kill_one(root, index)))
    timer.daemon = True
    timer.start()
    yield killed
    timer.join(10)
    assert killed, "nobody was killed"


@contextmanager
def offline(settings: dict[str, Any] | None = None, **arguments: Any) -> Iterator[Any]:
    """An ``LLM`` whose engine runs in this process, so that tests can look into it."""
    from vllm import LLM

    before = set(psutil.pids())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    chosen = {**ARGUMENTS, "distributed_executor_backend": PATH, **arguments}
    chosen.setdefault("model", CHECKPOINT)
    chosen.setdefault("additional_config", {"resilient_executor": {**SETTINGS, **(settings or {})}})
    if chosen["distributed_executor_backend"] is None:
        del chosen["distributed_executor_backend"], chosen["additional_config"]
    llm = LLM(**chosen)
    core = getattr(llm.llm_engine.engine_core.engine_core.model_executor, "core", None)
    _CORES.extend([core] if core is not None else [])
    try:
        yield llm
    finally:
        _CORES.clear()  # one at a time
        llm.llm_engine.engine_core.shutdown()
        deadline = time.monotonic() + 15
        while left := [p for p in psutil.Process().children(recursive=True) if p.pid not in before and _lives(p)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)


def core_of(llm: Any) -> Any:
    """The executor under an engine of :func:`offline`."""
    return llm.llm_engine.engine_core.engine_core.model_executor.core


@contextmanager
def dying(llm: Any, *moments: int, index: int = 0) -> Iterator[list[int]]:
    """Kill a worker, each time another one, before the given steps of an :func:`offline` engine (0: the first).

    A step that is asked for while the whole group is being replaced has nobody to lose: the next one has.
    """
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    execute, left, killed, count = executor.execute_model, sorted(moments), [], itertools.count()

    def execute_model(scheduler_output: Any, non_block: bool = False) -> Any:
        if left and next(count) >= left[0] and (pids := workers()):
            left.pop(0)
            pid = pids[(index + len(killed)) % len(pids)]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return execute(scheduler_output, non_block)

    executor.execute_model = execute_model
    try:
        yield killed
        assert not left, f"the run was over before steps {left}"
    finally:
        del executor.execute_model


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Server:
    """``vllm serve`` as a user starts it."""

    def __init__(
        self, *options: str, settings: dict[str, Any] | None = None, env: dict[str, str] | None = None, log: Path
    ) -> None:
        self.port = _free_port()
        self.log = log
        self.shared_before = set(os.listdir("/dev/shm"))
        extra = json.dumps({"resilient_executor": {**SETTINGS, **(settings or {})}})
        command = [
            sys.executable, str(Path(__file__).with_name("serve_main.py")), "serve", CHECKPOINT,
            "--port", str(self.port), "--served-model-name", "reference",
            "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 27),
            "--max-model-len", "512", "--max-num-seqs", "16",
            "--distributed-executor-backend", PATH, "--additional-config", extra,
            *options,
        ]  # fmt: skip
        self._output = log.open("wb")
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
            start_new_session=True,
            # A pytest that is killed runs no fixture's end; the server must not stay for ever.
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT),  # noqa: PLW1509 - one call
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> int:
        """Pid of the engine's process."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any("EngineCore" in part for part in child.cmdline()[:1]):
                return int(child.pid)
        raise AssertionError("there is no engine")

    def health(self) -> int:
        """The status of ``/health``, or 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def wait(self, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while self.health() != 200:
            assert self.process.poll() is None, f"the server has ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the server does not come up:\n{self.tail()}"
            time.sleep(0.25)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 30) -> float:
        """Send a signal; returns how long the server took to end.

        SIGINT goes to the whole group, as a terminal sends it for Ctrl-C; others to the server alone, as Kubernetes
        does it.
        """
        began = time.monotonic()
        if self.process.poll() is None:
            if number == signal.SIGINT:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
            try:
                self.process.wait(timeout_s)
            finally:
                if self.process.poll() is None:
                    os.killpg(self.process.pid, signal.SIGKILL)
        self._output.close()
        return time.monotonic() - began


def alive_after(seconds: float, tree: list[psutil.Process]) -> list[str]:
    """Those that have not ended by then, with what they are."""
    left = []
    for process in psutil.wait_procs(tree, timeout=seconds)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                command = " ".join(process.cmdline())[:100]
                left.append(f"{process.pid} {process.status()}, child of {process.ppid()}: {command}")
    return left


def ends_in_time_and_leaves_nothing(server: Server, number: int) -> None:
    """Send a server a signal: it ends within 10 s, and so do all of its processes, with what they share in memory."""
    tree = psutil.Process(server.process.pid).children(recursive=True)
    took = server.stop(number)
    assert took < 10, f"{took:.1f} s\n{server.tail()}"
    left = alive_after(5.0, tree)
    if left:
        print("still there after 5 s:", *left, sep="\n")
        left = alive_after(10.0, tree)
    assert left == [], server.tail()
    # Others may be at work on this machine: ours are named after their processes.
    pids = {str(process.pid) for process in tree}
    left = set(os.listdir("/dev/shm")) - server.shared_before
    assert not [name for name in left if pids & set(re.findall(r"\d+", name))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tokens(outputs: Sequence[Any]) -> list[list[list[int]]]:
    """Token ids by request and sample."""
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
