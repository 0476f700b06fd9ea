"""Steps through stages of ranks: where values travel, what comes out, what raises, and the two-stage protocol."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from probe_executor import run_step, serving
from probe_worker import ProbeError

from resilient_executor import ExecutorState, ResilientExecutor, StateError


def tagged(outputs: Sequence[Any]) -> tuple[str, list[Any]]:
    """An aggregator that shows what it was given, and fails when it is told to."""
    if outputs[0]["scheduler"] == "spoil":
        raise LookupError("the aggregator was told to fail")
    return "aggregated", list(outputs)


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, 1), marks=pytest.mark.long), pytest.param((1, 2), marks=pytest.mark.long), (2, 2)],
    ids=lambda size: f"tp{size[0]}-pp{size[1]}",
)
def aggregating(ray_cluster: str, request: pytest.FixtureRequest) -> Iterator[tuple[ResilientExecutor, int, int]]:
    tp, pp = request.param
    with serving(tensor_parallel_size=tp, pipeline_parallel_size=pp, output_aggregator=tagged) as executor:
        yield executor, tp, pp


@pytest.fixture(scope="module")
def pair(ray_cluster: str) -> Iterator[ResilientExecutor]:
    """Two ranks in one stage; rank 0 is the output rank."""
    with serving(tensor_parallel_size=2) as executor:
        yield executor


@pytest.fixture(scope="module")
def single(ray_cluster: str) -> Iterator[ResilientExecutor]:
    with serving(uses_sampler=False) as executor:
        yield executor


def step(executor: ResilientExecutor, command: Any, non_block: bool = False) -> Any:
    executor.execute_model(command)
    return executor.sample_tokens(None, non_block=non_block)


class TestGrid:
    def test_values_travel_between_stages_within_their_column(
        self, aggregating: tuple[ResilientExecutor, int, int]
    ) -> None:
        executor, tp, pp = aggregating
        for number in range(20):
            command = {"id": number, "blob": bytes([number]) * 100}
            assert executor.execute_model(command) is None
            kind, outputs = executor.sample_tokens(("grammar", number))

            assert kind == "aggregated"
            assert [one["trail"] for one in outputs] == [
                [(stage, column, stage * tp + column) for stage in range(pp)] for column in range(tp)
            ]
            assert all(one["blob"] == command["blob"] for one in outputs)
            assert all(one["scheduler"] == command and one["grammar"] == ("grammar", number) for one in outputs)
        seen = executor.collective_rpc("past")
        assert [steps for _, steps in seen] == [list(range(20))] * (tp * pp)

    def test_every_rank_is_told_who_it_is(self, aggregating: tuple[ResilientExecutor, int, int]) -> None:
        executor, tp, pp = aggregating
        told = [one["assignment"] for one in executor.collective_rpc("who")]
        assert [one.rank for one in told] == list(range(tp * pp))
        assert [(one.pp_rank, one.tp_rank) for one in told] == [(s, c) for s in range(pp) for c in range(tp)]
        assert {(one.world_size, one.tp_size, one.pp_size, one.epoch) for one in told} == {(tp * pp, tp, pp, 1)}
        assert [one.local_rank for one in told] == list(range(tp * pp))
        assert [one.is_output_rank for one in told] == [rank == (pp - 1) * tp for rank in range(tp * pp)]
        assert [one.wants_output for one in told] == [rank >= (pp - 1) * tp for rank in range(tp * pp)]
        [method] = {one.distributed_init_method for one in told}
        assert method.startswith("tcp://127.0.0.1:")

    def test_workers_are_made_in_order(self, aggregating: tuple[ResilientExecutor, int, int]) -> None:
        executor, _, _ = aggregating
        step(executor, "any")
        for history, _ in executor.collective_rpc("past"):
            assert history == ["init_worker", "init_device", "load_model", "bind_thread"]

    def test_an_aggregator_that_raises_fails_its_step_alone(
        self, aggregating: tuple[ResilientExecutor, int, int]
    ) -> None:
        executor, _, _ = aggregating
        with pytest.raises(LookupError, match="told to fail"):
            step(executor, "spoil")
        assert step(executor, "fine")[0] == "aggregated"


class TestWithoutSampler:
    def test_a_step_runs_at_once(self, single: ResilientExecutor) -> None:
        assert single.execute_model("input")["scheduler"] == "input"
        future = single.execute_model("later", non_block=True)
        assert future.result(timeout=10)["scheduler"] == "later"

    def test_there_is_nothing_to_sample(self, single: ResilientExecutor) -> None:
        single.execute_model("input")
        with pytest.raises(StateError, match="execute_model"):
            single.sample_tokens(None)
        assert single.execute_model("again")["scheduler"] == "again"


class TestTwoStages:
    def test_a_second_step_is_refused_while_the_first_waits(self, pair: ResilientExecutor) -> None:
        assert pair.execute_model("first") is None
        with pytest.raises(StateError, match="sample_tokens"):
            pair.execute_model("second")
        assert pair.sample_tokens("grammar")["scheduler"] == "first"

    def test_sampling_needs_a_step(self, pair: ResilientExecutor) -> None:
        with pytest.raises(StateError, match="execute_model"):
            pair.sample_tokens(None)
        step(pair, "one")
        with pytest.raises(StateError, match="execute_model"):
            pair.sample_tokens(None)
        assert step(pair, "two")["scheduler"] == "two"

    def test_without_blocking_both_stages_give_futures(self, pair: ResilientExecutor) -> None:
        stored = pair.execute_model("input", non_block=True)
        assert stored.done()
        assert stored.result() is None
        assert pair.sample_tokens("grammar", non_block=True).result(timeout=10)["grammar"] == "grammar"

    def test_a_step_that_raised_leaves_no_state_behind(self, pair: ResilientExecutor) -> None:
        """F12: the caller sees the first error, and the next step starts clean."""
        for _ in range(3):
            with pytest.raises(ProbeError, match="once"):
                step(pair, {"do": {0: [("raise", "once")], 1: [("raise", "once")]}})
            assert step(pair, "next")["scheduler"] == "next"

    def test_the_output_is_the_output_rank_s(self, pair: ResilientExecutor) -> None:
        assert step(pair, "input")["trail"] == [(0, 0, 0)]

    def test_an_output_that_nobody_wants_is_not_even_pickled(self, pair: ResilientExecutor) -> None:
        assert step(pair, {"do": {1: [("unpicklable",)]}})["trail"] == [(0, 0, 0)]


@pytest.mark.parametrize("non_block", [False, True], ids=["blocking", "future"])
class TestApplicationErrors:
    """F16, F9: a live worker's exception is the caller's business, and nothing is rebuilt."""

    @pytest.mark.parametrize("ranks", [[0, 1], [1], [0]], ids=["all ranks", "not the output rank", "the output rank"])
    def test_an_exception_reaches_the_caller_as_it_is(
        self, pair: ResilientExecutor, ranks: list[int], non_block: bool
    ) -> None:
        epoch, incidents = pair.epoch, len(pair.incidents)
        command = {"do": {rank: [("raise", "told to")] for rank in ranks}}
        with pytest.raises(ProbeError) as raised:
            self.run(pair, command, non_block)

        error = raised.value
        assert error.text == "told to"
        assert error.rank in ranks
        shown = "".join(traceback.format_exception(error))
        assert f"raised by rank {error.rank} in execute_stage (epoch {epoch}" in shown
        assert "probe_worker.py" in shown
        assert "in _act" in shown

        assert step(pair, "next")["scheduler"] == "next"
        pair.check_health()
        assert (pair.epoch, len(pair.incidents)) == (epoch, incidents)
        assert pair.state is ExecutorState.HEALTHY

    def test_an_exception_that_cannot_be_pickled_is_told_in_words(
        self, pair: ResilientExecutor, non_block: bool
    ) -> None:
        with pytest.raises(Exception, match="LockedError: holds a lock") as raised:
            self.run(pair, {"do": {1: [("raise locked", "holds a lock")]}}, non_block)
        assert "in _act" in "".join(traceback.format_exception(raised.value))
        assert step(pair, "next")["scheduler"] == "next"

    def test_an_output_that_cannot_be_pickled_fails_its_step_alone(
        self, pair: ResilientExecutor, non_block: bool
    ) -> None:
        with pytest.raises(TypeError, match="cannot pickle"):
            self.run(pair, {"do": {0: [("unpicklable",)]}}, non_block)
        assert step(pair, "next")["scheduler"] == "next"
        assert pair.epoch == 1

    def test_an_input_that_cannot_be_pickled_fails_before_it_is_sent(
        self, pair: ResilientExecutor, non_block: bool
    ) -> None:
        with pytest.raises(TypeError, match="cannot pickle"):
            self.run(pair, {"generator": (n for n in range(3))}, non_block)
        assert step(pair, "next")["scheduler"] == "next"
        assert pair.epoch == 1

    @staticmethod
    def run(executor: ResilientExecutor, command: Any, non_block: bool) -> Any:
        outcome = step(executor, command, non_block)
        return outcome.result(timeout=10) if non_block else outcome


@pytest.mark.parametrize("wires", [True, False])
def test_workers_of_an_engine_without_torch_do_not_import_it(ray_cluster: str, wires: bool) -> None:
    """Ray's graph would, in every worker: three times the memory, and most of the time of a start or a rebuild."""
    with serving(pipeline_parallel_size=2, wires=wires) as executor:
        assert run_step(executor, 1)["scheduler"] == 1
        assert executor.collective_rpc(knows_torch) == [False, False]


def knows_torch(_: object) -> bool:
    return "torch" in sys.modules
