"""Accelerators, bundles and ranks, on devices that only Ray believes in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from probe_executor import ExecutorFactory, await_epoch, run_step
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from resilient_executor import ResilientExecutor

BUNDLES = [{"CPU": 1}, {"GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1}, {"GPU": 1}]


@pytest.fixture
def interleaved(ray_cluster: str) -> Iterator[PlacementGroup]:
    """A user's placement group, whose GPU bundles stand among others. It outlives the executors in it."""
    group = placement_group(BUNDLES)
    assert group.wait(20)
    yield group
    assert ray.util.placement_group_table(group)["state"] == "CREATED", "the user's own group was removed"
    remove_placement_group(group)


def device_in(group: PlacementGroup, bundle: int) -> str:
    """The GPU that a bundle holds."""

    def ask() -> list[str]:
        return [str(device) for device in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    task = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=strategy)(ask)
    [device] = ray.get(task.remote(), timeout=30)
    return str(device)


def views(executor: ResilientExecutor) -> list[tuple[int, tuple[str, ...], str | None]]:
    """What each worker knows of devices: its rank, its node's ids, and its own."""

    def view(worker: Any) -> tuple[int, tuple[str, ...], str | None]:
        return worker.assignment.rank, worker.assignment.device_ids, os.environ.get("CUDA_VISIBLE_DEVICES")

    seen: list[tuple[int, tuple[str, ...], str | None]] = executor.collective_rpc(view)
    return seen


def test_each_worker_has_its_gpu_and_knows_those_of_its_node(make_executor: ExecutorFactory) -> None:
    executor = make_executor(tensor_parallel_size=2, device_key="GPU", eager_graph=False)
    own = [worker.device_ids for worker in executor.workers]
    assert [len(ids) for ids in own] == [1, 1]
    node = tuple(sorted({ids[0] for ids in own}, key=int))
    assert len(node) == 2
    assert views(executor) == [(rank, node, own[rank][0]) for rank in (0, 1)]


def test_device_ids_are_sorted_as_numbers(make_executor: ExecutorFactory) -> None:
    executor = make_executor(tensor_parallel_size=2, device_key="GPU", devices_per_worker=6, eager_graph=False)
    assert [ids for _, ids, _ in views(executor)] == [tuple(str(n) for n in range(12))] * 2


def test_workers_may_share_a_device(make_executor: ExecutorFactory) -> None:
    executor = make_executor(tensor_parallel_size=2, device_key="GPU", devices_per_worker=0.5, eager_graph=False)
    [shared] = {worker.device_ids for worker in executor.workers}
    assert len(shared) == 1
    assert views(executor) == [(rank, shared, shared[0]) for rank in (0, 1)]


@pytest.mark.parametrize("key", ["NPU", "XPU"])
def test_other_accelerators(make_executor: ExecutorFactory, key: str) -> None:
    """One that Ray knows and numbers, and one that is only a name to it."""
    before = ray.available_resources()[key]
    executor = make_executor(tensor_parallel_size=2, device_key=key, eager_graph=False)
    assert ray.available_resources().get(key, 0.0) == before - 2
    numbered = {"NPU": [("0",), ("1",)], "XPU": [(), ()]}[key]
    assert sorted(worker.device_ids for worker in executor.workers) == numbered
    [told] = {ids for _, ids, _ in views(executor)}
    assert told == {"NPU": ("0", "1"), "XPU": ()}[key]


def test_without_indices_the_first_fitting_bundles_are_taken(
    interleaved: PlacementGroup, make_executor: ExecutorFactory
) -> None:
    first, second = device_in(interleaved, 1), device_in(interleaved, 2)
    executor = make_executor(tensor_parallel_size=2, device_key="GPU", placement_group=interleaved, eager_graph=False)
    assert [worker.device_ids for worker in executor.workers] == [(first,), (second,)]


def test_chosen_bundles_keep_ranks_and_devices_through_a_rebuild(
    interleaved: PlacementGroup, make_executor: ExecutorFactory
) -> None:
    """F21, and a group that is not ours: the replacements go into the very bundles of the dead."""
    last, second = device_in(interleaved, 4), device_in(interleaved, 1)
    executor = make_executor(
        pipeline_parallel_size=2, device_key="GPU", placement_group=interleaved, bundle_indices=(4, 1)
    )
    node = tuple(sorted((last, second), key=int))
    expected = [(0, node, last), (1, node, second)]
    assert views(executor) == expected

    assert run_step(executor, "before")["trail"] == [(0, 0, 0), (1, 0, 1)]
    for epoch, victim in ((2, 0), (3, 1)):
        os.kill(executor.workers[victim].process.pid, signal.SIGKILL)
        await_epoch(executor, epoch)
        assert views(executor) == expected
        assert run_step(executor, "after")["trail"] == [(0, 0, 0), (1, 0, 1)]
