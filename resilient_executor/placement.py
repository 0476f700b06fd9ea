"""Bundles for the workers: reserved in a placement group of our own, or taken from one that the user brings."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import ConfigError, ExecutorStopped, PlacementError

#: A wait looks this often, in seconds, whether the executor is being shut down.
_SLICE_S: Final = 0.5


@dataclass(frozen=True)
class Reservation:
    """One bundle for each worker, in order of creation."""

    group: PlacementGroup
    bundle_indices: tuple[int, ...]
    owned: bool

    def strategy(self, created_rank: int) -> PlacementGroupSchedulingStrategy:
        """Pin one worker to its bundle."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundle_indices[created_rank],
            placement_group_capture_child_tasks=True,
        )

    def nodes(self) -> set[str]:
        """Ids of the nodes of the bundles, once they are there."""
        where = ray.util.placement_group_table(self.group).get("bundles_to_node_id", {})
        return {where[index] for index in self.bundle_indices if where.get(index)}

    def release(self) -> None:
        """Give the bundles back; whatever still runs in them is killed by Ray. A user's group stays. Twice is fine."""
        if self.owned:
            remove_placement_group(self.group)


def bundle_of(config: ExecutorConfig) -> dict[str, float]:
    """What one worker's bundle holds.

    A worker on an accelerator takes no CPU, as in vLLM: the bundle names the accelerator alone.
    """
    return {config.device_key: config.devices_per_worker}


def worker_options(config: ExecutorConfig) -> dict[str, Any]:
    """Arguments of ``ray.remote`` that claim the bundle's device."""
    amount = config.devices_per_worker
    if config.device_key == "CPU":
        return {"num_cpus": amount, "num_gpus": 0}
    if config.device_key == "GPU":
        return {"num_cpus": 0, "num_gpus": amount}
    return {"num_cpus": 0, "num_gpus": 0, "resources": {config.device_key: amount}}


def check_capacity(config: ExecutorConfig) -> None:
    """Refuse what this cluster can never hold, before anything waits for it.

    Raises:
        PlacementError: too few devices in all; names what is there and what is needed.
        ConfigError: the user's placement group cannot hold the workers.
    """
    if config.placement_group is not None:
        _choose_bundles(config, config.placement_group)
        return
    needed = config.world_size * config.devices_per_worker
    present = ray.cluster_resources().get(config.device_key, 0.0)
    if present < needed:
        raise PlacementError(
            f"{config.world_size} workers (tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
            f"{config.pipeline_parallel_size}) need {needed:g} {config.device_key}, but the cluster has {present:g}. "
            "Reduce the parallel sizes, add nodes, or set device_key or devices_per_worker"
        )


def with_current_group(config: ExecutorConfig) -> ExecutorConfig:
    """Use the placement group that this process itself runs in, if there is one and none was given."""
    if config.placement_group is not None:
        return config
    current = ray.util.get_current_placement_group()
    return config if current is None else dataclasses.replace(config, placement_group=current)


def reserve(config: ExecutorConfig, *, label: str, avoid: Collection[str] = ()) -> Reservation:
    """Ask for bundles; :func:`wait_ready` waits for them. Two calls, so that the bundles of a dead epoch can be
    released between them: the new ones take their place as soon as they are free.

    Args:
        config: how many, of what, and how they are spread.
        label: the placement group's name.
        avoid: ids of nodes that must not be used; see :func:`has_room_without`.

    Raises:
        ConfigError: the user's placement group cannot hold the workers.
    """
    if config.placement_group is not None:
        return Reservation(config.placement_group, _choose_bundles(config, config.placement_group), owned=False)
    bundles = [bundle_of(config)] * config.world_size
    options: dict[str, Any] = {}
    if avoid:
        elsewhere = {"ray.io/node-id": f"!in({', '.join(sorted(avoid))})"}
        options["bundle_label_selector"] = [elsewhere] * config.world_size
    group = placement_group(bundles, strategy=config.placement_strategy, name=label, **options)
    return Reservation(group, config.bundle_indices or tuple(range(config.world_size)), owned=True)


def has_room_without(config: ExecutorConfig, avoid: Collection[str]) -> bool:
    """Whether the other nodes that are alive could hold the workers, if nothing else used them."""
    if (
        config.placement_group is not None
        or "bundle_label_selector" not in inspect.signature(placement_group).parameters
    ):
        return False
    needed = config.devices_per_worker
    room = sum(
        int(node["Resources"].get(config.device_key, 0.0) / needed)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in avoid
    )
    return room >= config.world_size


def shortage(config: ExecutorConfig, avoid: Collection[str] = ()) -> str:
    """What is needed and what is free, for people: ``need 2 x {'CPU': 1.0}, free {...}``."""
    free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
    without = f", {len(avoid)} nodes are left out" if avoid else ""
    return f"need {config.world_size} x {bundle_of(config)}, free {free}{without}"


def wait_ready(
    reservation: Reservation, config: ExecutorConfig, stopping: threading.Event, timeout_s: float | None = None
) -> None:
    """Wait until the bundles are there, at most ``timeout_s``; None takes ``placement_timeout_s``.

    Raises:
        PlacementError: they are not within ``placement_timeout_s``; the message says what the cluster has.
        ExecutorStopped: ``stopping`` was set meanwhile.
    """
    timeout_s = config.placement_timeout_s if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    while (remaining := deadline - time.monotonic()) > 0:
        if reservation.group.wait(timeout_seconds=min(remaining, _SLICE_S)):
            return
        if stopping.is_set():
            raise ExecutorStopped("the executor is being shut down")
    free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
    raise PlacementError(
        f"no room for {config.world_size} x {bundle_of(config)} within {timeout_s:g} s "
        f"(placement_timeout_s); free now: {free}"
    )


def _choose_bundles(config: ExecutorConfig, group: PlacementGroup) -> tuple[int, ...]:
    """The bundles of a user's group that workers go to."""
    if ray.util.placement_group_table(group).get("state") == "REMOVED":
        raise ConfigError(f"the placement group {group.id.hex()} has been removed; pass one that exists, or none")
    specs: list[Mapping[str, float]] = group.bundle_specs
    fitting = tuple(i for i, spec in enumerate(specs) if spec.get(config.device_key, 0.0) >= config.devices_per_worker)
    if config.bundle_indices is not None:
        if unfit := [i for i in config.bundle_indices if i not in fitting]:
            raise ConfigError(
                f"bundles {unfit} of the placement group do not hold {config.devices_per_worker:g} "
                f"{config.device_key}; those that do are {list(fitting)}"
            )
        return config.bundle_indices
    if len(fitting) < config.world_size:
        raise ConfigError(
            f"the placement group has {len(fitting)} bundles with {config.devices_per_worker:g} {config.device_key}, "
            f"and {config.world_size} are needed (tensor_parallel_size x pipeline_parallel_size)"
        )
    return fitting[: config.world_size]


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Pin an actor without resources to a node, outside every placement group."""
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
