"""Executors of probe workers that are shut down, and leave nothing behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import leaks
from probe_worker import ProbeWorker

from resilient_executor import ExecutorConfig, ExecutorState, ResilientExecutor, StepLost, WorkerSpec

_numbers = itertools.count()


def probe_config(worker_kwargs: dict[str, Any] | None = None, **settings: Any) -> ExecutorConfig:
    """Settings for probe workers, with short pauses and a name of its own."""
    defaults: dict[str, Any] = {
        "name": f"probe-{next(_numbers)}",
        "backoff_initial_s": 0.05,
        "backoff_max_s": 0.2,
        "start_timeout_s": 90.0,
        "recovery_timeout_s": 90.0,
    }
    return ExecutorConfig(worker=WorkerSpec(ProbeWorker, worker_kwargs or {}), **{**defaults, **settings})


@contextmanager
def serving(worker_kwargs: dict[str, Any] | None = None, **settings: Any) -> Iterator[ResilientExecutor]:
    """A started executor that leaves nothing behind when the block ends."""
    with leaks.nothing_left():
        executor = ResilientExecutor(probe_config(worker_kwargs, **settings))
        try:
            yield executor
        finally:
            pids = [worker.process.pid for worker in executor.workers]
            executor.shutdown()
            assert leaks.alive(pids) == [], "shutdown returned before the workers were gone"


class ExecutorFactory:
    """Makes executors; the ones that a test has not shut down are shut down after it."""

    def __init__(self) -> None:
        self._made: list[ResilientExecutor] = []

    def __call__(self, worker_kwargs: dict[str, Any] | None = None, **settings: Any) -> ResilientExecutor:
        executor = ResilientExecutor(probe_config(worker_kwargs, **settings))
        self._made.append(executor)
        return executor

    def shut_down(self) -> None:
        with ExitStack() as stack:
            for executor in self._made:
                stack.callback(executor.shutdown)


def await_epoch(executor: ResilientExecutor, epoch: int, timeout_s: float = 60.0) -> None:
    """Wait until ``epoch`` serves."""
    deadline = time.monotonic() + timeout_s
    while executor.epoch < epoch or executor.state is not ExecutorState.HEALTHY:
        assert time.monotonic() < deadline, f"epoch {executor.epoch}, state {executor.state}: {executor.incidents}"
        time.sleep(0.02)


def run_step(executor: ResilientExecutor, command: Any) -> Any:
    """A step as an engine runs it: one that was lost is made again, once."""
    for attempt in (1, 2):
        try:
            executor.execute_model(command)
            return executor.sample_tokens(None)
        except StepLost:
            if attempt == 2:
                raise
    raise AssertionError


def within(seconds: float, condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
