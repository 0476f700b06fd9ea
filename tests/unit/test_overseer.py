"""What is said of the dead: no Ray, no thread."""

from __future__ import annotations

import pytest

from resilient_executor import CauseKind, ExecutorConfig, WorkerSpec
from resilient_executor.lifecycle import Generation, Lifecycle, RpcInHand
from resilient_executor.overseer import Overseer
from resilient_executor.protocol import Phase, Progress
from resilient_executor.supervisor.actor import Finding


@pytest.mark.parametrize(("in_flight", "expected"), [("", "idle"), ("get_kv_cache_spec", "get_kv_cache_spec")])
def test_a_call_that_has_ended_is_not_what_a_rank_was_doing(in_flight: str, expected: str) -> None:
    """The last heartbeat may be older than the end of a call; the executor knows which one is in flight."""
    lifecycle = Lifecycle()
    overseer = Overseer(ExecutorConfig(worker=WorkerSpec("some.engine:Worker")), lifecycle)
    generation = lifecycle.current = Generation(
        epoch=1, served=True, rpcs=[RpcInHand(0, in_flight, 0.0)] if in_flight else []
    )
    heartbeat = Progress(0, 1, Phase.SERVING, -1, 0.0, 3, (), "get_kv_cache_spec")
    overseer.on_finding(Finding(1, CauseKind.PROCESS_EXIT, 0, 0.0, "its process ended", doing=heartbeat))
    assert generation.doing[0] == expected
