"""Asynchronous scheduling: a step is planned before the tokens of the one before are known, and both can be lost.

vLLM switches it off on CPUs, which have no stream to run ahead of. Here it is switched on again: the scheduler, the
batch queue and the runner's own path are vLLM's; only streams and events of CUDA are stood in for (``cuda_on_cpu.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engines import PROMPTS, core_of, dying, offline, tokens
from test_features import greedy
from test_mixture import ENGINE, everything_at_once

from resilient_executor.vllm import ResilientVllmExecutor
from resilient_executor.vllm.scheduler import Underway

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """The platform leaves the choice as it is made elsewhere."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(_: type, config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield


def asynchronous(**arguments: Any) -> Any:
    return offline(worker_extension_cls="cuda_on_cpu.Streams", **arguments)


def test_a_step_that_never_comes_back_is_not_waited_for() -> None:
    """It raised, and the engine went on: a pause for the steps under way must end all the same."""
    first, second, empty = (SimpleNamespace(total_num_scheduled_tokens=tokens) for tokens in (4, 4, 0))
    underway = Underway()
    assert not underway
    underway.begin(first)
    underway.begin(second)
    assert underway
    underway.end(second)
    assert not underway
    underway.begin(empty)
    assert not underway, "a step without tokens draws nothing"


@pytest.mark.long
def test_preemption_under_a_small_cache() -> None:
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS]
    with asynchronous(
        tensor_parallel_size=2, enable_prefix_caching=False, block_size=32, num_gpu_blocks_override=18
    ) as llm:
        undisturbed = tokens(llm.generate(prompts, greedy(max_tokens=60), use_tqdm=False))
        with dying(llm, 10, 40, 90) as killed:
            assert tokens(llm.generate(prompts, greedy(max_tokens=60), use_tqdm=False)) == undisturbed
        assert len(killed) == 3


@pytest.fixture(scope="module")
def one_by_one(as_on_a_gpu: None) -> list[list[list[int]]]:
    """Tokens of the same engine with synchronous scheduling."""
    with offline(tensor_parallel_size=2, async_scheduling=False, **ENGINE) as engine:
        return tokens(engine.generate(list(PROMPTS), greedy(), use_tqdm=False))


@pytest.fixture(scope="module")
def llm(one_by_one: list[list[list[int]]]) -> Iterator[Any]:
    with asynchronous(tensor_parallel_size=2, **ENGINE) as engine:
        yield engine


def test_it_is_on_by_default(llm: Any) -> None:
    """As under vLLM's own executors, and two steps are in flight at once."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert ResilientVllmExecutor.supports_async_scheduling()
    engine = llm.llm_engine.engine_core.engine_core
    assert engine.vllm_config.scheduler_config.async_scheduling
    assert isinstance(engine.scheduler, AsyncScheduler)
    assert engine.batch_queue_size == 2


def test_everything_at_once(llm: Any) -> None:
    everything_at_once(llm)


def test_the_tokens_are_those_of_synchronous_scheduling(llm: Any, one_by_one: list[list[list[int]]]) -> None:
    before = core_of(llm).epoch
    with dying(llm, 3, 4, 11):
        assert tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False)) == one_by_one
    assert core_of(llm).epoch >= before + 2
