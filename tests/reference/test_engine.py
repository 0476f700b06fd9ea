"""The engine over a real worker in this process; the executor beneath loses it on demand and builds another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from resilient_executor.errors import ExecutorFailed, ExecutorStopped, StepLost
from resilient_executor.protocol import RankAssignment
from resilient_executor.reference import (
    EmptyPrompt,
    FinishReason,
    InvalidConfiguration,
    InvalidRequest,
    InvalidSamplingParams,
    PoisonRequest,
    PromptTooLong,
    ReferenceEngine,
    ReferenceWorker,
    RequestFailed,
    SamplingParams,
    SchedulerOutput,
    UnknownToken,
)

PROMPTS: list[str | list[int]] = [
    "It is a truth universally acknowledged, that",
    "Anne",
    "The next morning, before breakfast was over,",
    '"My dear Mr. Bennet," said his lady',
    [0, *range(300, 370)],
]
MIXED = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.7, seed=2**63, top_k=40, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=28, temperature=1.2, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=11, ignore_eos=True),
]


class InProcessExecutor:
    """The executor's contract with one worker in this process. Steps run when their result is first needed.

    ``before_step(step)`` may raise: StepLost loses the worker (all steps in flight are lost with it, and the next call
    finds a new worker, on which the control-plane calls have been replayed); ExecutorFailed is for good; anything
    else stands for an exception of the worker's own.
    """

    def __init__(self, max_concurrent_batches: int = 1, **settings: Any) -> None:
        self.max_concurrent_batches = max_concurrent_batches
        self.settings = settings
        self.journal: list[tuple[str, tuple[Any, ...]]] = []
        self.before_step: Callable[[SchedulerOutput], None] = lambda step: None
        self.before_submit: Callable[[SchedulerOutput], None] = lambda step: None
        self.steps: list[SchedulerOutput] = []
        self.epoch = 0
        self.lost: StepLost | None = None
        self._start()

    def _start(self) -> None:
        self.worker = ReferenceWorker(RankAssignment(0, 1, 0, 0, 1, 0, 1, self.epoch, True, True, ""), **self.settings)
        self.worker.init_device()
        self.worker.load_model()
        for method, args in self.journal:
            getattr(self.worker, method)(*args)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        assert isinstance(method, str)
        self.journal.append((method, args))
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> None:
        self.before_submit(scheduler_output)
        self._step = scheduler_output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Future[Any]:
        assert non_block
        return _Step(self, self._step, self.epoch)

    def run(self, step: SchedulerOutput, epoch: int) -> Any:
        if epoch != self.epoch:
            raise StepLost(epoch, step.step_id)
        try:
            self.before_step(step)
        except StepLost:
            self.epoch += 1
            self._start()
            raise
        self.steps.append(step)
        return self.worker.execute_stage(step, None, None)


class _Step(Future[Any]):
    def __init__(self, executor: InProcessExecutor, step: SchedulerOutput, epoch: int) -> None:
        super().__init__()
        self.call = (executor, step, epoch)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            executor, step, epoch = self.call
            try:
                self.set_result(executor.run(step, epoch))
            except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
                self.set_exception(error)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            return error
        return None


class FailAt:
    """Raises ``make(step)`` at the steps with the given numbers, counted from 1 over all steps that are run."""

    def __init__(self, make: Callable[[SchedulerOutput], Exception], *numbers: int) -> None:
        self.make, self.numbers, self.count = make, numbers, 0

    def __call__(self, step: SchedulerOutput) -> None:
        self.count += 1
        if self.count in self.numbers:
            raise self.make(step)


def lost(step: SchedulerOutput) -> StepLost:
    return StepLost(0, step.step_id)


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[int, ...]]:
    """Each request alone, without any fault."""
    engine = ReferenceEngine(InProcessExecutor())
    return [engine.generate([p], params)[0].token_ids for p, params in zip(PROMPTS, MIXED, strict=True)]


def tokens_of(engine: ReferenceEngine) -> list[tuple[int, ...]]:
    completions = engine.generate(PROMPTS, MIXED)
    assert [c.error for c in completions] == [None] * len(PROMPTS)
    assert [c.finish_reason for c in completions] == [FinishReason.LENGTH] * len(PROMPTS)
    return [c.token_ids for c in completions]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_batch_tokens": 7},
        {"max_num_requests": 2},
        {"max_batch_tokens": 64, "max_concurrent_steps": 3},
        {"max_num_requests": 5, "max_model_len": 96},
    ],
)
def test_batching_and_chunks_do_not_change_tokens(undisturbed: list[tuple[int, ...]], limits: dict[str, int]) -> None:
    small = {"kv_capacity_tokens": 96} if "max_model_len" in limits else {}
    executor = InProcessExecutor(**small)
    assert tokens_of(ReferenceEngine(executor, **limits)) == undisturbed  # type: ignore[arg-type]
    if small:
        starts = [r.request_id for step in executor.steps for r in step.requests if r.start == 0]
        assert len(starts) > len(PROMPTS), "the cache was small enough for preemption"


@pytest.mark.parametrize("concurrent", [1, 2, 3])
@pytest.mark.parametrize("numbers", [(1,), (4,), (3, 9, 20), (5, 6)])
def test_lost_steps_do_not_change_tokens(
    undisturbed: list[tuple[int, ...]], concurrent: int, numbers: tuple[int, ...]
) -> None:
    executor = InProcessExecutor(concurrent)
    executor.before_step = FailAt(lost, *numbers)
    engine = ReferenceEngine(executor, max_batch_tokens=32)
    assert tokens_of(engine) == undisturbed
    assert engine.recoveries == executor.epoch == len(numbers)
    assert len(numbers) <= engine.lost_steps <= concurrent * len(numbers)
    assert executor.journal == [("determine_kv_capacity", ()), ("initialize_kv_cache", (16384,))]


def test_steps_refused_at_submission_are_lost_too(undisturbed: list[tuple[int, ...]]) -> None:
    executor = InProcessExecutor(2)
    executor.before_submit = FailAt(lost, 1, 2, 3, 8)
    engine = ReferenceEngine(executor)
    assert tokens_of(engine) == undisturbed
    assert engine.recoveries == 4


def test_an_exception_of_the_worker_ends_its_requests_only(undisturbed: list[tuple[int, ...]]) -> None:
    executor = InProcessExecutor()
    engine = ReferenceEngine(executor, max_num_requests=2)
    executor.before_step = FailAt(lambda step: ZeroDivisionError("bad kernel"), 3)
    completions = engine.generate(PROMPTS, MIXED)
    assert [c.finish_reason.value for c in completions] == ["error", "error", "length", "length", "length"]
    assert [c.token_ids for c in completions[2:]] == undisturbed[2:]
    for completion, whole in zip(completions[:2], undisturbed, strict=False):
        assert completion.token_ids == whole[:2], "what was generated before is kept"
        assert isinstance(completion.error, RequestFailed)
        assert "ZeroDivisionError: bad kernel" in str(completion.error)
        assert isinstance(completion.error.__cause__, ZeroDivisionError)
    assert tokens_of(engine) == undisturbed


def test_a_poison_request_is_given_up_and_the_others_go_on(undisturbed: list[tuple[int, ...]]) -> None:
    executor = InProcessExecutor()
    engine = ReferenceEngine(executor)

    def kill(step: SchedulerOutput) -> None:
        if any(2047 in r.token_ids for r in step.requests):
            raise lost(step)

    executor.before_step = kill
    completions = engine.generate([*PROMPTS, [0, 2047]], [*MIXED, SamplingParams()])
    assert [c.token_ids for c in completions[:-1]] == undisturbed
    assert isinstance(completions[-1].error, PoisonRequest)


def test_a_failed_executor_ends_everything() -> None:
    executor = InProcessExecutor(2)
    executor.before_step = FailAt(lambda step: ExecutorFailed("the restart budget is spent"), 5)
    engine = ReferenceEngine(executor)
    completions = engine.generate(PROMPTS, MIXED)
    assert {type(c.error) for c in completions} == {ExecutorFailed}
    assert any(c.token_ids for c in completions)
    assert not engine.has_unfinished_requests
    with pytest.raises(ExecutorFailed, match="budget"):
        engine.add_request("More?")


def test_requests_outlive_an_executor_that_takes_no_step(undisturbed: list[tuple[int, ...]]) -> None:
    executor = InProcessExecutor()
    engine = ReferenceEngine(executor)
    name = engine.add_request(PROMPTS[0], MIXED[0])
    executor.before_submit = FailAt(lambda step: ExecutorStopped("not now"), 4)
    tokens: list[int | None] = []
    raised = 0
    while engine.has_unfinished_requests:
        try:
            tokens += [event.token_id for event in engine.step() if event.request_id == name]
        except ExecutorStopped:
            raised += 1
    assert (raised, tuple(tokens)) == (1, undisturbed[0])
    executor.before_submit = FailAt(lambda step: ExecutorStopped("not now"), 1)
    with pytest.raises(ExecutorStopped):
        engine.generate(PROMPTS, MIXED)
    assert not engine.has_unfinished_requests, "generate has withdrawn its requests"


def test_streaming_with_requests_that_come_and_go(undisturbed: list[tuple[int, ...]]) -> None:
    executor = InProcessExecutor(2)
    executor.before_step = FailAt(lost, 6)
    engine = ReferenceEngine(executor)
    first, second = engine.add_request(PROMPTS[0], MIXED[0]), engine.add_request(PROMPTS[1], MIXED[1])
    third = ""
    events: dict[str, list[Any]] = {first: [], second: []}
    for event in engine.stream():
        events[event.request_id].append(event)
        if event.request_id == second and event.index == 4 and event.finish_reason is None:
            assert engine.abort(second)
            assert not engine.abort(second)
            third = engine.add_request(PROMPTS[2], MIXED[2], request_id="third")
            events[third] = []
    for name, whole in ((first, undisturbed[0]), (third, undisturbed[2])):
        assert [event.token_id for event in events[name]] == list(whole)
        assert [event.index for event in events[name]] == list(range(len(whole)))
        assert [event.finish_reason for event in events[name]].count(None) == len(whole) - 1
    assert [event.token_id for event in events[second]] == [*undisturbed[1][:5], None]
    assert events[second][-1].finish_reason is FinishReason.ABORT
    text = "".join(event.text_delta for event in events[first])
    assert text == engine.generate([PROMPTS[0]], MIXED[0])[0].text


def test_generate_leaves_the_events_of_other_requests(undisturbed: list[tuple[int, ...]]) -> None:
    engine = ReferenceEngine(InProcessExecutor())
    other = engine.add_request(PROMPTS[1], MIXED[1])
    assert engine.generate([PROMPTS[0]], MIXED[0])[0].token_ids == undisturbed[0]
    assert [event.token_id for event in engine.stream() if event.request_id == other] == list(undisturbed[1])


def test_stop_tokens_end_a_request() -> None:
    engine = ReferenceEngine(InProcessExecutor())
    free = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=20))[0]
    stop = free.token_ids[7]
    params = SamplingParams(max_tokens=20, stop_token_ids=[stop])
    assert engine.generate([PROMPTS[0]], params)[0].finish_reason is FinishReason.STOP
    assert engine.generate([PROMPTS[0]], params)[0].token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_unseeded_sampling_differs_and_seeded_does_not() -> None:
    engine = ReferenceEngine(InProcessExecutor())
    seeded, free = SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=1.0)
    same = engine.generate([PROMPTS[0]] * 2, seeded)
    assert same[0].token_ids == same[1].token_ids
    other = engine.generate([PROMPTS[0]] * 2, free)
    assert other[0].token_ids != other[1].token_ids


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", EmptyPrompt, "is empty"),
        ([], EmptyPrompt, "is empty"),
        ([0] * 64, PromptTooLong, "64 tokens; at most 63"),
        ([0, 2048], UnknownToken, "2048 is not in the vocabulary"),
        ([-1], UnknownToken, "-1"),
    ],
)
def test_bad_prompts_are_refused(prompt: str | list[int], error: type[Exception], message: str) -> None:
    engine = ReferenceEngine(InProcessExecutor(), max_model_len=64)
    assert issubclass(error, ValueError)
    with pytest.raises(error, match=message):
        engine.generate(["A good one.", prompt])
    assert not engine.has_unfinished_requests, "nothing was queued"


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"seed": -1},
        {"seed": 2**64},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_bad_parameters_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"{next(iter(values))} is"):
        SamplingParams(**values)


def test_other_mistakes_are_named() -> None:
    executor = InProcessExecutor(kv_capacity_tokens=512)
    with pytest.raises(InvalidConfiguration, match="holds 512 tokens"):
        ReferenceEngine(executor)
    with pytest.raises(InvalidConfiguration, match="has 1024 positions"):
        ReferenceEngine(executor, max_model_len=2000)
    engine = ReferenceEngine(executor, max_model_len=128)
    engine.add_request("One", request_id="same")
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request("Two", request_id="same")
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 sets"):
        engine.generate(["a", "b"], [SamplingParams()])


def test_importing_the_engine_does_not_import_torch() -> None:
    code = "import sys, resilient_executor.reference; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
