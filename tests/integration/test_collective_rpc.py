"""Collective RPC: how methods are named, what they are given, and what comes back."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from probe_executor import serving
from probe_worker import ProbeError

from resilient_executor import ExecutorState, ResilientExecutor, RpcTimeout, StateError


@pytest.fixture(scope="module")
def executor(ray_cluster: str) -> Iterator[ResilientExecutor]:
    """Two workers without a graph: a call does not need one."""
    with serving(tensor_parallel_size=2, eager_graph=False) as running:
        yield running


class TestCalls:
    def test_by_name(self, executor: ResilientExecutor) -> None:
        answers = executor.collective_rpc("echo", args=(1, "two"), kwargs={"three": 3})
        assert answers == [(0, (1, "two"), {"three": 3}), (1, (1, "two"), {"three": 3})]

    def test_by_callable(self, executor: ResilientExecutor) -> None:
        factor = 10

        def scaled(worker: Any, addend: int, *, sign: int) -> int:
            return sign * (factor * int(worker.assignment.rank) + addend)

        assert executor.collective_rpc(scaled, args=(3,), kwargs={"sign": -1}) == [-3, -13]
        assert executor.collective_rpc(lambda worker: worker.assignment.tp_rank) == [0, 1]

    def test_with_arguments_of_its_own_for_each_rank(self, executor: ResilientExecutor) -> None:
        answers = executor.collective_rpc("echo", per_rank_args=[("a",), ("b", "c")], kwargs={"k": 1})
        assert answers == [(0, ("a",), {"k": 1}), (1, ("b", "c"), {"k": 1})]
        with pytest.raises(StateError, match=r"per_rank_args has 3 entries for 2 ranks"):
            executor.collective_rpc("echo", per_rank_args=[(), (), ()])

    def test_without_blocking(self, executor: ResilientExecutor) -> None:
        began = time.monotonic()
        future = executor.collective_rpc("nap", args=({0: 0.3},), non_block=True)
        assert time.monotonic() - began < 0.25
        assert future.result(timeout=10) == [0, 1]

    def test_large_arguments_and_results(self, executor: ResilientExecutor) -> None:
        blob = bytes(range(256)) * 20_000
        assert executor.collective_rpc("echo", args=(blob,)) == [(0, (blob,), {}), (1, (blob,), {})]

    def test_workers_were_made_in_order(self, executor: ResilientExecutor) -> None:
        for history, _ in executor.collective_rpc("past"):
            assert history[:3] == ["init_worker", "init_device", "load_model"]


class TestTimeouts:
    def test_a_timeout_is_kept_and_names_the_ranks(self, executor: ResilientExecutor) -> None:
        began = time.monotonic()
        with pytest.raises(RpcTimeout) as raised:
            executor.collective_rpc("nap", timeout=0.3, args=({1: 1.0},))
        assert time.monotonic() - began < 0.9
        assert (raised.value.method, raised.value.ranks, raised.value.timeout_s) == ("nap", (1,), 0.3)
        assert "ranks [1] within 0.3 s" in str(raised.value)

    def test_the_next_call_gets_answers_of_its_own(self, executor: ResilientExecutor) -> None:
        """F9: a late reply to an earlier call is nobody's."""
        with pytest.raises(RpcTimeout):
            executor.collective_rpc("nap", timeout=0.2, args=({0: 0.8},))
        assert executor.collective_rpc("echo", args=("mine",)) == [(0, ("mine",), {}), (1, ("mine",), {})]
        executor.check_health()
        assert executor.epoch == 1

    def test_a_future_has_the_timeout_too(self, executor: ResilientExecutor) -> None:
        future = executor.collective_rpc("nap", timeout=0.2, args=({0: 0.6, 1: 0.6},), non_block=True)
        with pytest.raises(RpcTimeout) as raised:
            future.result(timeout=5)
        assert raised.value.ranks == (0, 1)


class TestErrors:
    """F16 for calls: the exception goes to the caller, and the workers go on."""

    @pytest.fixture(autouse=True)
    def _nothing_is_rebuilt(self, executor: ResilientExecutor) -> Iterator[None]:
        yield
        executor.check_health()
        assert executor.collective_rpc("nap", args=({},)) == [0, 1]
        assert (executor.epoch, executor.incidents) == (1, ())
        deadline = time.monotonic() + 5
        while executor.state is not ExecutorState.HEALTHY:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @pytest.mark.parametrize("ranks", [[1], [0], [0, 1]], ids=str)
    def test_an_exception_comes_as_it_is(self, executor: ResilientExecutor, ranks: list[int]) -> None:
        with pytest.raises(ProbeError) as raised:
            executor.collective_rpc("fail", args=("probe", ranks))
        assert raised.value.rank in ranks
        shown = "".join(traceback.format_exception(raised.value))
        assert f"raised by rank {raised.value.rank} in fail (epoch 1" in shown
        assert "probe_worker.py" in shown

    def test_a_future_holds_the_exception(self, executor: ResilientExecutor) -> None:
        future = executor.collective_rpc("fail", args=("probe", [1]), non_block=True)
        assert isinstance(future.exception(timeout=10), ProbeError)

    @pytest.mark.parametrize(
        ("kind", "summary"), [("locked", "LockedError: holds a lock"), ("tangled", "TangledError: one and two")]
    )
    def test_an_exception_that_cannot_travel_is_told_in_words(
        self, executor: ResilientExecutor, kind: str, summary: str
    ) -> None:
        with pytest.raises(Exception, match=summary) as raised:
            executor.collective_rpc("fail", args=(kind, [1]))
        assert "in fail" in "".join(traceback.format_exception(raised.value))

    def test_a_result_that_cannot_be_pickled(self, executor: ResilientExecutor) -> None:
        with pytest.raises(TypeError, match="cannot pickle") as raised:
            executor.collective_rpc("unpicklable")
        assert "raised by rank" in "".join(traceback.format_exception(raised.value))

    def test_an_argument_that_cannot_be_pickled(self, executor: ResilientExecutor) -> None:
        with pytest.raises(TypeError, match="cannot pickle"):
            executor.collective_rpc("echo", args=((n for n in range(3)),))

    def test_a_method_that_does_not_exist(self, executor: ResilientExecutor) -> None:
        with pytest.raises(AttributeError, match="no_such_method"):
            executor.collective_rpc("no_such_method")

    def test_arguments_that_do_not_fit(self, executor: ResilientExecutor) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'surprise'"):
            executor.collective_rpc("who", kwargs={"surprise": 1})


def test_the_graph_is_built_at_the_first_step(executor: ResilientExecutor) -> None:
    """With ``eager_graph`` off; calls and steps then go side by side."""
    executor.execute_model({"id": "first", "do": {0: [("sleep", 1.0)]}})
    future = executor.sample_tokens(None, non_block=True)
    assert executor.collective_rpc("nap", timeout=5, args=({},)) == [0, 1]
    assert not future.done()
    assert future.result(timeout=30)["scheduler"]["id"] == "first"
