"""Accelerators, bundles and ranks, on devices that only Ray believes in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import leaks
import pytest
import ray
from probe_executor import ExecutorFactory, await_epoch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from resilient_executor import ResilientExecutor

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture
def interleaved(leak_check: None) -> Iterator[PlacementGroup]:
    """A user's placement group whose GPU bundles stand among others."""
    group = placement_group([{"CPU": 1}, {"GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1}, {"GPU": 1}])
    assert group.wait(20)
    yield group
    assert ray.util.placement_group_table(group)["state"] == "CREATED", "the user's own group was removed"
    remove_placement_group(group)


def view(worker: Any) -> tuple[int, tuple[str, ...], str | None, list[int]]:
    """What a worker knows of its devices: rank, the node's ids, its own in the environment, its bundles."""
    amounts = ray.get_runtime_context().get_assigned_resources()
    bundles = [int(name.split("_group_")[1].split("_")[0]) for name in amounts if name.count("_group_") and "_group_" in name and name.split("_group_")[1].count("_")]
    me = worker.assignment
    return me.rank, me.device_ids, os.environ.get("CUDA_VISIBLE_DEVICES"), bundles


def test_each_worker_has_its_gpu_and_knows_those_of_its_node(make_executor: ExecutorFactory) -> None:
    executor = make_executor(tensor_parallel_size=2, device_key="GPU", eager_graph=False)
    views = executor.collective_rpc(view)
    print(views, executor.workers)
    assert 0
