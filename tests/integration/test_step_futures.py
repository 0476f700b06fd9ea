"""Several steps in flight through two stages, and every way of asking for their results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
from probe_executor import serving
from probe_worker import ProbeError

from resilient_executor import ResilientExecutor, StepLost

MIB = 1 << 20


@pytest.fixture(scope="module")
def executor(ray_cluster: str) -> Iterator[ResilientExecutor]:
    """Two stages; three steps fit into the graph."""
    with serving(pipeline_parallel_size=2, uses_sampler=False) as running:
        yield running


def submit(executor: ResilientExecutor, command: Any) -> Future[Any]:
    future: Future[Any] = executor.execute_model(command, non_block=True)
    return future


def slow(number: int, seconds: float = 0.3) -> dict[str, Any]:
    return {"id": number, "do": {1: [("sleep", seconds)]}}


class TestAsking:
    def test_the_standard_library_can_wait_for_them(self, executor: ResilientExecutor) -> None:
        """The first test of this module: nobody has asked for a reader thread yet."""
        futures = [submit(executor, number) for number in range(3)]
        done, missing = concurrent.futures.wait(futures, timeout=10)
        assert (len(done), len(missing)) == (3, 0)
        futures = [submit(executor, number) for number in range(3)]
        ready = concurrent.futures.as_completed(futures, timeout=10)
        assert sorted(future.result()["scheduler"] for future in ready) == [0, 1, 2]

    def test_results_may_be_asked_for_in_any_order(self, executor: ResilientExecutor) -> None:
        for order in ([2, 1, 0], [1, 2, 0], [0, 2, 1]):
            futures = [submit(executor, {"id": number}) for number in range(3)]
            assert [futures[n].result()["scheduler"]["id"] for n in order] == order

    def test_more_steps_than_fit_are_taken_all_the_same(self, executor: ResilientExecutor) -> None:
        futures = [submit(executor, number) for number in range(50)]
        assert [future.result()["scheduler"] for future in reversed(futures)] == list(reversed(range(50)))

    def test_a_blocking_step_goes_behind_those_in_flight(self, executor: ResilientExecutor) -> None:
        futures = [submit(executor, number) for number in range(2)]
        assert executor.execute_model("last")["scheduler"] == "last"
        assert [future.result()["scheduler"] for future in futures] == [0, 1]

    def test_futures_that_nobody_reads_are_no_burden(self, executor: ResilientExecutor) -> None:
        for number in range(100):
            submit(executor, {"id": number, "blob": bytes(1000)})
        assert executor.execute_model("after")["scheduler"] == "after"

    def test_done_does_not_wait_and_comes_true_by_itself(self, executor: ResilientExecutor) -> None:
        future = submit(executor, slow(1))
        began = time.monotonic()
        assert not future.done()
        assert time.monotonic() - began < 0.2
        deadline = time.monotonic() + 10
        while not future.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert future.result()["scheduler"]["id"] == 1

    def test_a_timeout_leaves_the_step_alone(self, executor: ResilientExecutor) -> None:
        future = submit(executor, slow(2, 0.6))
        for ask in (future.result, future.exception):
            began = time.monotonic()
            with pytest.raises(concurrent.futures.TimeoutError):
                ask(timeout=0.05)
            assert time.monotonic() - began < 0.4
        assert future.exception(timeout=10) is None
        assert future.result()["scheduler"]["id"] == 2

    def test_a_step_cannot_be_cancelled(self, executor: ResilientExecutor) -> None:
        future = submit(executor, slow(3))
        assert not future.cancel()
        assert future.result()["scheduler"]["id"] == 3

    def test_a_callback_comes_without_anybody_waiting(self, executor: ResilientExecutor) -> None:
        called = threading.Event()
        seen: list[Any] = []
        future = submit(executor, slow(4))

        def callback(done: Future[Any]) -> None:
            seen.append(done.result()["scheduler"]["id"])
            called.set()

        future.add_done_callback(callback)
        assert called.wait(10)
        late: list[Any] = []
        future.add_done_callback(late.append)
        assert (seen, late) == ([4], [future])

    def test_a_callback_may_submit_the_next_step(self, executor: ResilientExecutor) -> None:
        """The way an engine's loop keeps its pipeline full."""
        results: list[int] = []
        finished = threading.Event()

        def go_on(done: Future[Any]) -> None:
            results.append(done.result()["scheduler"])
            if len(results) == 30:
                finished.set()
            else:
                submit(executor, len(results)).add_done_callback(go_on)

        submit(executor, 0).add_done_callback(go_on)
        assert finished.wait(20)
        assert results == list(range(30))

    def test_callbacks_may_submit_while_other_threads_submit(self, executor: ResilientExecutor) -> None:
        """At the limit, whoever submits reads, and runs callbacks, that submit: no lock may be held then."""
        count, chains, finished = 200, 3, threading.Event()
        results: list[int] = []

        def go_on(done: Future[Any]) -> None:
            results.append(done.result()["scheduler"])
            if len(results) < count:
                submit(executor, len(results)).add_done_callback(go_on)
            else:
                finished.set()

        def feed() -> None:
            while not finished.is_set():
                submit(executor, -1)

        feeders = [threading.Thread(target=feed, daemon=True) for _ in range(2)]
        for _ in range(chains):
            submit(executor, 0).add_done_callback(go_on)
        for thread in feeders:
            thread.start()
        assert finished.wait(60)
        for thread in feeders:
            thread.join(10)
            assert not thread.is_alive()

    def test_asyncio_can_wait_for_them(self, executor: ResilientExecutor) -> None:
        async def both() -> list[Any]:
            futures = [asyncio.wrap_future(submit(executor, number)) for number in range(3)]
            return await asyncio.wait_for(asyncio.gather(*futures), 10)

        assert [output["scheduler"] for output in asyncio.run(both())] == [0, 1, 2]

    def test_many_threads_may_ask_for_one_result(self, executor: ResilientExecutor) -> None:
        future = submit(executor, slow(5))
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(future.result, timeout) for timeout in (None, 10, None, 10, 10, None, 10, None)]
            assert [one.result()["scheduler"]["id"] for one in answers] == [5] * 8


class TestErrorsInFlight:
    def test_an_exception_belongs_to_its_own_step(self, executor: ResilientExecutor) -> None:
        for rank in (0, 1):
            failing = {"do": {rank: [("raise", "mine")]}}
            futures = [submit(executor, command) for command in ("before", failing, "after")]
            assert futures[2].result()["scheduler"] == "after"
            assert isinstance(futures[1].exception(), ProbeError)
            assert futures[0].result()["scheduler"] == "before"
        assert executor.epoch == 1

    def test_what_the_next_stage_cannot_be_sent_fails_the_step_alone(self, executor: ResilientExecutor) -> None:
        began = time.monotonic()
        with pytest.raises(TypeError, match="cannot pickle"):
            executor.execute_model({"do": {0: [("unpicklable",)]}})
        assert time.monotonic() - began < 10
        assert executor.execute_model("next")["scheduler"] == "next"
        assert executor.epoch == 1


class TestPayloads:
    @pytest.mark.parametrize("size", [5 * MIB, 12 * MIB], ids=["5 MiB", "12 MiB"])
    def test_messages_larger_than_the_channels_pass(self, executor: ResilientExecutor, size: int) -> None:
        """In both directions, and between the stages."""
        blob = random.Random(size).randbytes(size)
        output = executor.execute_model({"blob": blob})
        assert output["blob"] == blob
        assert output["scheduler"]["blob"] == blob
        assert executor.execute_model("small")["scheduler"] == "small"

    def test_large_messages_may_be_in_flight_together(self, executor: ResilientExecutor) -> None:
        blobs = [bytes([number]) * (3 * MIB) for number in range(6)]
        futures = [submit(executor, {"blob": blob}) for blob in blobs]
        assert [future.result()["blob"] for future in futures] == blobs

    def test_a_result_stays_as_it_is_while_later_steps_use_its_channel(self, executor: ResilientExecutor) -> None:
        """Ray hands out views into a channel's buffer, which the next steps overwrite."""
        results = []
        for number in range(50):
            output = executor.execute_model({"do": {1: [("numpy", 100_000, number), ("bytes", 50_000, number)]}})
            output["array"][0] += 0  # it is the caller's own: it can be written to
            results.append(output)
        for _ in range(50):
            executor.execute_model({"do": {1: [("numpy", 100_000, -1)]}})
        for number, output in enumerate(results):
            assert (output["array"] == number).all()
            assert output["bytes"] == bytes([number]) * 50_000


def test_thousands_of_steps_leave_nothing_behind(executor: ResilientExecutor) -> None:
    """F15: whatever is read, dropped, polled or raised."""
    dice = random.Random(15)
    me = psutil.Process()

    def some_steps(count: int) -> None:
        kept: list[tuple[int, Future[Any]]] = []
        for number in range(count):
            draw = dice.random()
            if draw < 0.02:
                with pytest.raises(ProbeError):
                    executor.execute_model({"do": {dice.randrange(2): [("raise", "once")]}})
            elif draw < 0.2:
                assert executor.execute_model({"id": number, "blob": bytes(20_000)})["scheduler"]["id"] == number
            elif draw < 0.4:
                submit(executor, number)
            elif draw < 0.5:
                submit(executor, number).add_done_callback(lambda done: None)
            else:
                kept.append((number, submit(executor, number)))
            if len(kept) > dice.randrange(1, 8):
                dice.shuffle(kept)
                for expected, future in kept:
                    assert future.done() in (True, False)
                    assert future.result(timeout=30)["scheduler"] == expected
                kept.clear()

    some_steps(300)
    gc.collect()
    before = me.memory_info().rss
    some_steps(2000)
    assert executor.execute_model("last")["scheduler"] == "last"
    gc.collect()
    assert me.memory_info().rss - before < 8 * MIB
    assert executor.epoch == 1
    generation = executor._lifecycle.serving
    assert generation is not None
    assert generation.pipeline is not None
    assert generation.pipeline.oldest_step == -1


def test_a_step_that_a_dying_graph_takes_no_more_is_lost_at_once(executor: ResilientExecutor) -> None:
    """Also for whoever asks its future without a limit. Found by a soak: it spun for ever."""
    generation = executor._lifecycle.serving
    assert generation is not None
    assert generation.graph is not None
    generation.graph.tear_down(10.0)  # as Ray's own monitor does when a worker dies
    future = submit(executor, "late")
    asking = threading.Thread(target=future.exception, daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive()
    assert isinstance(future.exception(timeout=0), StepLost)
    assert executor.execute_model("next")["scheduler"] == "next"
    assert executor.epoch == 2


def test_callbacks_may_submit_when_their_steps_are_lost(executor: ResilientExecutor) -> None:
    """They wait for the rebuild then, so whoever rebuilds must not be the one who runs them."""
    epoch, finished = executor.epoch, threading.Event()
    ended: list[Any] = []

    def go_on(done: Future[Any]) -> None:
        lost = isinstance(done.exception(), StepLost)
        ended.append(lost)
        if lost:
            submit(executor, "again").add_done_callback(go_on)
        elif len(ended) >= 6:
            finished.set()

    futures = [submit(executor, slow(number, 0.5)) for number in range(3)]
    for future in futures:
        future.add_done_callback(go_on)
    os.kill(executor.workers[1].process.pid, signal.SIGKILL)
    assert finished.wait(60)
    assert executor.epoch == epoch + 1
    assert ended.count(False) == 3
