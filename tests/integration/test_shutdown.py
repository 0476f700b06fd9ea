"""Shutdown at every moment, from any thread, and what is left to call afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import leaks
import pytest
import ray
from probe_executor import ExecutorFactory, probe_config, run_step, within

from resilient_executor import (
    ExecutorState,
    ExecutorStopped,
    ResilientExecutor,
    ResilientExecutorError,
    StepLost,
)

pytestmark = pytest.mark.usefixtures("leak_check")


def assert_over(executor: ResilientExecutor, pids: list[int]) -> None:
    """Every public method answers at once, and no worker is there."""
    assert leaks.alive(pids) == []
    assert executor.state is ExecutorState.STOPPED
    calls: list[Callable[[], Any]] = [
        lambda: executor.execute_model("late"),
        lambda: executor.execute_model("late", non_block=True),
        lambda: executor.sample_tokens(None),
        lambda: executor.sample_tokens(None, non_block=True),
        lambda: executor.collective_rpc("echo"),
        lambda: executor.collective_rpc("echo", non_block=True),
        executor.check_health,
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(ExecutorStopped, match="shut down"):
            call()
        assert time.monotonic() - began < 0.5
    executor.shutdown()
    executor.register_failure_callback(lambda: pytest.fail("a shutdown is no failure"))
    executor.add_listener(lambda event: None)
    assert executor.incidents == ()
    assert executor.max_concurrent_batches >= 1
    assert isinstance(executor.workers, tuple)
    assert isinstance(executor.start_phases, dict)
    assert ray.is_initialized(), "a Ray that was there before stays"


def pids_of(executor: ResilientExecutor) -> list[int]:
    return [worker.process.pid for worker in executor.workers]


class TestIdle:
    @pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.long)], ids=["graph", "no graph"])
    def test_before_the_first_step(self, make_executor: ExecutorFactory, eager: bool) -> None:
        executor = make_executor(tensor_parallel_size=2, eager_graph=eager)
        pids = pids_of(executor)
        executor.shutdown()
        assert_over(executor, pids)

    def test_from_many_threads_at_once(self, make_executor: ExecutorFactory) -> None:
        executor = make_executor(eager_graph=False)
        pids = pids_of(executor)
        threads = [threading.Thread(target=executor.shutdown) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert_over(executor, pids)

    def test_at_the_end_of_a_with_block(self, ray_cluster: str) -> None:
        with ResilientExecutor(probe_config(eager_graph=False)) as executor:
            pids = pids_of(executor)
        assert_over(executor, pids)

    def test_workers_may_put_their_things_in_order(self, make_executor: ExecutorFactory, tmp_path: Path) -> None:
        executor = make_executor({"farewell": str(tmp_path / "farewell")}, tensor_parallel_size=2, eager_graph=False)
        executor.shutdown()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["farewell.0", "farewell.1"]


class TestInTheMiddle:
    def test_of_steps(self, make_executor: ExecutorFactory, tmp_path: Path) -> None:
        """F14: every future gets a typed error at once, whenever and however it is asked for."""
        executor = make_executor(pipeline_parallel_size=2, uses_sampler=False)
        pids = pids_of(executor)
        began_step = tmp_path / "began"
        stuck = {"do": {1: [("touch", str(began_step)), ("sleep", 60)]}}
        futures: list[Future[Any]] = [executor.execute_model(stuck, non_block=True) for _ in range(3)]
        blocked = Future[Any]()
        waiter = threading.Thread(target=lambda: blocked.set_result(futures[0].exception()))
        waiter.start()
        within(10, began_step.exists, "the step has begun")
        called: list[Future[Any]] = []
        futures[2].add_done_callback(called.append)

        began = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - began < 5
        for future in futures:
            began = time.monotonic()
            with pytest.raises(ResilientExecutorError) as raised:
                future.result(timeout=5)
            assert isinstance(raised.value, (StepLost, ExecutorStopped))
            assert time.monotonic() - began < 0.5
            assert future.done()
        assert isinstance(blocked.result(timeout=5), ResilientExecutorError)
        waiter.join(5)
        assert not waiter.is_alive()
        assert called == [futures[2]]
        assert_over(executor, pids)

    def test_of_steps_that_are_finished_and_not_fetched(self, make_executor: ExecutorFactory) -> None:
        """F14: not a hang, not zeros: the value, or a typed error."""
        executor = make_executor(uses_sampler=False)
        assert executor.execute_model("fetched")["scheduler"] == "fetched"
        future: Future[Any] = executor.execute_model("not fetched", non_block=True)
        time.sleep(0.2)
        executor.shutdown()
        began = time.monotonic()
        assert isinstance(future.exception(timeout=5), (StepLost, ExecutorStopped))
        assert time.monotonic() - began < 0.5

    def test_of_a_blocking_step(self, make_executor: ExecutorFactory, tmp_path: Path) -> None:
        executor = make_executor(tensor_parallel_size=2)
        began_step = tmp_path / "began"
        executor.execute_model({"do": {1: [("touch", str(began_step)), ("sleep", 60)]}})

        def stop() -> None:
            within(10, began_step.exists, "the step has begun")
            executor.shutdown()

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises((StepLost, ExecutorStopped)):
            executor.sample_tokens(None)
        stopper.join(15)
        assert not stopper.is_alive()

    def test_of_a_call(self, make_executor: ExecutorFactory) -> None:
        executor = make_executor(tensor_parallel_size=2, eager_graph=False)
        future: Future[Any] = executor.collective_rpc("nap", args=({1: 60.0},), non_block=True)
        time.sleep(0.3)
        began = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - began < 5
        assert isinstance(future.exception(timeout=5), ResilientExecutorError)

    def test_of_a_stored_step(self, make_executor: ExecutorFactory) -> None:
        executor = make_executor(eager_graph=False)
        executor.execute_model("stored")
        executor.shutdown()
        with pytest.raises(ExecutorStopped):
            executor.sample_tokens(None)

    def test_of_a_rebuild(self, make_executor: ExecutorFactory, tmp_path: Path) -> None:
        slow = tmp_path / "slow"
        executor = make_executor({"slow_while": str(slow)}, tensor_parallel_size=2)
        assert run_step(executor, "before")["scheduler"] == "before"
        slow.touch()
        future: Future[Any] = executor.collective_rpc("die", args=(1, 3), non_block=True)
        within(20, lambda: executor.epoch == 2 and len(executor.workers) == 2, "the replacements are starting")
        waiting: Future[Any] = executor.collective_rpc("echo", non_block=True)
        pids = pids_of(executor)
        began = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - began < 5
        assert leaks.alive(pids) == []
        assert isinstance(future.exception(timeout=5), ResilientExecutorError)
        assert isinstance(waiting.exception(timeout=5), ExecutorStopped)

    @pytest.mark.parametrize("moment", ["at once", "spawning", pytest.param("constructing", marks=pytest.mark.long)])
    def test_of_a_start(self, tmp_path: Path, moment: str) -> None:
        """From another thread: whoever waits for the start is released."""
        executor = ResilientExecutor.__new__(ResilientExecutor)
        config = probe_config({"start_s": 60, "mark": str(tmp_path / "mark")}, tensor_parallel_size=2)
        outcome = Future[BaseException | None]()

        def start() -> None:
            try:
                executor.__init__(config)  # type: ignore[misc]  # so that the other thread has it before it is ready
                outcome.set_result(None)
            except BaseException as error:  # noqa: BLE001 - judged below
                outcome.set_result(error)

        starter = threading.Thread(target=start)
        starter.start()
        conditions: dict[str, Callable[[], object]] = {
            "at once": lambda: getattr(executor, "_at_exit", None) is not None,
            "spawning": lambda: executor.epoch == 1,
            "constructing": lambda: list(tmp_path.glob("mark.*")),
        }
        within(20, lambda: hasattr(executor, "_lifecycle"), "the start has begun")
        within(20, conditions[moment], moment)
        began = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - began < 5
        assert isinstance(outcome.result(timeout=10), ResilientExecutorError)
        assert time.monotonic() - began < 15
        starter.join(5)


def test_two_executors_of_one_name_live_in_one_cluster() -> None:
    """The name is a label; two servers with default settings have the same one."""
    first = ResilientExecutor(probe_config(name="twin"))
    try:
        second = ResilientExecutor(probe_config(name="twin"))
        try:
            run_step(first, "hello")
            assert second.epoch == 1, "no attempt was wasted on a name that is taken"
            run_step(second, "hello")
            assert not {w.process.pid for w in first.workers} & {w.process.pid for w in second.workers}
        finally:
            second.shutdown()
        run_step(first, "hello")
    finally:
        first.shutdown()
