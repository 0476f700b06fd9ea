"""Each class of actors is made once: Ray keeps every one that is ever made, in every process that meets it."""

from __future__ import annotations

from resilient_executor import ExecutorConfig, WorkerSpec
from resilient_executor.actors import actor_class
from resilient_executor.supervisor.agent import NodeAgent
from resilient_executor.worker_group import worker_class


def test_epochs_and_executors_share_their_classes() -> None:
    first, second = (ExecutorConfig(worker=WorkerSpec(f"a:{name}"), tensor_parallel_size=2) for name in "BC")
    assert worker_class(first) is worker_class(second)
    assert actor_class(NodeAgent) is actor_class(NodeAgent)


def test_chaos_is_a_class_of_its_own() -> None:
    plain = ExecutorConfig(worker=WorkerSpec("a:B"))
    allowed = ExecutorConfig(worker=WorkerSpec("a:B"), allow_chaos=True)
    assert worker_class(plain) is not worker_class(allowed)
