"""A request that crashes its workers every time fails alone; the others finish (F17)."""

from __future__ import annotations

import pytest
from stuck_worker import PoisonedWorker

from resilient_executor import ExecutorConfig, ExecutorState, ResilientExecutor, WorkerSpec
from resilient_executor.reference import ReferenceEngine, SamplingParams
from resilient_executor.reference.bench import JOURNALLED
from resilient_executor.reference.errors import PoisonRequest


@pytest.mark.timeout(240)
def test_the_culprit_alone_fails(ray_cluster: str) -> None:
    config = ExecutorConfig(
        worker=WorkerSpec("stuck_worker:PoisonedWorker"),
        rpc_policies=JOURNALLED,
        backoff_initial_s=0.01,
        backoff_max_s=0.01,
        name="poison",
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with ResilientExecutor(config) as executor:
        engine = ReferenceEngine(executor)
        [expected] = engine.generate(["My dear Emma,"], params)
        before, culprit, after = engine.generate(["My dear Emma,", [0, PoisonedWorker.POISON], "My dear Emma,"], params)
        assert before.token_ids == after.token_ids == expected.token_ids
        assert isinstance(culprit.error, PoisonRequest)
        assert len(executor.incidents) == 3, "twice together, once alone"
        assert executor.state is ExecutorState.HEALTHY
