"""Workers that fail while they start: once, always, or only after they have served."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from probe_executor import ExecutorFactory, run_step, within
from probe_worker import ProbeError

from resilient_executor import (
    ExecutorFailed,
    ExecutorState,
    ExecutorStopped,
    ResilientExecutor,
    StartupError,
    StepLost,
)

pytestmark = pytest.mark.usefixtures("leak_check")


def kill(executor: ResilientExecutor, rank: int) -> None:
    os.kill(executor.workers[rank].process.pid, signal.SIGKILL)


def test_a_constructor_that_fails_once_is_tried_again(make_executor: ExecutorFactory, tmp_path: Path) -> None:
    """F26."""
    executor = make_executor({"fail_once": str(tmp_path / "failed")}, tensor_parallel_size=2, eager_graph=False)
    assert executor.epoch == 2
    assert executor.state is ExecutorState.HEALTHY
    assert executor.collective_rpc("nap", args=({},)) == [0, 1]
    executor.check_health()


def test_a_replacement_that_fails_once_is_tried_again(make_executor: ExecutorFactory, tmp_path: Path) -> None:
    """F26 in a rebuild: the engine sees one loss."""
    flag = tmp_path / "broken"
    executor = make_executor({"fail_while": str(flag)}, tensor_parallel_size=2)
    assert run_step(executor, "before")["scheduler"] == "before"
    flag.touch()
    kill(executor, 1)
    within(30, lambda: executor.epoch >= 3, "the first replacement has failed")
    flag.unlink()
    assert run_step(executor, "after")["scheduler"] == "after"
    [incident] = executor.incidents
    assert incident.outcome == "recovered"
    assert incident.cause is not None
    assert (incident.cause.rank, incident.cause.signal) == (1, signal.SIGKILL)
    assert incident.epochs_tried[0] == 2
    assert incident.epochs_tried[-1] == executor.epoch >= 3


@pytest.mark.long
def test_a_start_that_hangs_is_given_up_after_its_phase_s_limit(
    make_executor: ExecutorFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Long before ``start_timeout_s``, and the second attempt comes up. A load that takes its time is left alone."""
    flag = tmp_path / "slow"
    flag.touch()
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "loading_timeout_s": 8.0}
    threading.Timer(12.0, flag.unlink).start()
    began = time.monotonic()
    executor = make_executor({"slow_while": str(flag), "start_s": 4.0}, **settings)
    assert time.monotonic() - began < 55.0
    assert executor.epoch > 1
    assert "(limit 8 s, loading_timeout_s)" in caplog.text
    assert run_step(executor, "after")["scheduler"] == "after"


def test_an_executor_that_never_starts_says_why(make_executor: ExecutorFactory, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    flag.touch()
    began = time.monotonic()
    with pytest.raises(StartupError, match="the constructor was told to fail") as raised:
        make_executor(
            {"fail_while": str(flag), "mark": str(tmp_path / "mark")},
            start_attempts=2,
            eager_graph=False,
        )
    assert time.monotonic() - began < 30
    assert "in 2 attempts" in str(raised.value)
    causes = chain(raised.value)
    assert any(isinstance(cause, ProbeError) for cause in causes), causes
    assert len(list(tmp_path.glob("mark.*"))) == 2


def chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def test_a_fault_that_stays_is_given_up(make_executor: ExecutorFactory, tmp_path: Path) -> None:
    """F27: after the restart budget everybody who waits is told, once, and everybody who comes later."""
    flag = tmp_path / "broken"
    executor = make_executor(
        {"fail_while": str(flag)},
        tensor_parallel_size=2,
        max_restarts=2,
        backoff_initial_s=0.01,
        backoff_max_s=0.02,
    )
    called: list[ExecutorState] = []
    executor.register_failure_callback(lambda: called.append(executor.state))
    assert run_step(executor, "before")["scheduler"] == "before"
    flag.touch()
    executor.execute_model({"do": {0: [("sleep", 60)]}})
    inflight: Future[Any] = executor.sample_tokens(None, non_block=True)
    kill(executor, 0)

    assert isinstance(inflight.exception(timeout=30), StepLost)
    waiting = executor.collective_rpc("echo", non_block=True)
    executor.execute_model("after")
    began = time.monotonic()
    with pytest.raises(ExecutorFailed, match="SIGKILL") as raised:
        executor.sample_tokens(None)
    assert time.monotonic() - began < 40
    assert raised.value.incident is executor.incidents[-1]
    assert "max_restarts" in str(raised.value)
    assert isinstance(waiting.exception(timeout=5), ExecutorFailed)
    assert executor.state is ExecutorState.FAILED
    within(5, lambda: called, "the failure callback")

    for call in (
        executor.check_health,
        lambda: executor.execute_model("late"),
        lambda: executor.sample_tokens(None),
        lambda: executor.collective_rpc("echo"),
    ):
        began = time.monotonic()
        with pytest.raises(ExecutorFailed, match="SIGKILL"):
            call()
        assert time.monotonic() - began < 1
    [incident] = executor.incidents
    assert incident.outcome == "failed"
    assert incident.cause is not None
    assert (incident.cause.rank, incident.cause.signal) == (0, signal.SIGKILL)
    assert incident.epochs_tried == [2, 3], "two rebuilds were allowed"
    executor.register_failure_callback(lambda: called.append(ExecutorState.STOPPED))
    assert called == [ExecutorState.FAILED, ExecutorState.STOPPED], "each callback once, a late one at once"

    began = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - began < 10
    with pytest.raises(ExecutorStopped):
        executor.check_health()
    assert len(called) == 2


def test_futures_wait_for_the_verdict(make_executor: ExecutorFactory, tmp_path: Path) -> None:
    """With no rebuild allowed, a death is the end: what is in flight ends, and nothing waits."""
    executor = make_executor(max_restarts=0, uses_sampler=False)
    inflight = [executor.execute_model({"do": {0: [("exit", 7)]}}, non_block=True) for _ in range(2)]
    errors = [future.exception(timeout=30) for future in inflight]
    assert [type(error) for error in errors] == [StepLost, StepLost]
    within(20, lambda: executor.state is ExecutorState.FAILED, "given up")
    late = executor.execute_model
    with pytest.raises(ExecutorFailed, match="exited with code 7"):
        late("late")
    with pytest.raises(ExecutorFailed, match="exited with code 7"):
        late("late", non_block=True)
