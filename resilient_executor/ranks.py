"""Who gets which rank, and what each rank is told. Pure: no Ray, no clock, no network.

Ray creates actors in the order that it likes, so the order of creation says nothing about where a worker landed. Ranks
are given out afterwards, from what the workers report of themselves, by the rule that vLLM's Ray executor uses:

1. the driver's node first (the driver talks to rank 0 most);
2. then nodes with fewer workers of this group;
3. then the node with the smaller address, compared as an address (``10.0.0.9`` before ``10.0.0.10``);
4. within one node, the order of creation.

The same function runs after every rebuild, so a replacement on another node moves ranks by the same rule. The workers
of one node are always neighbours in rank: a TP group spans as few nodes as the placement allows.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from resilient_executor.errors import TopologyError
from resilient_executor.protocol import RankAssignment, WorkerInfo

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig

LOOPBACK: Final = "127.0.0.1"

#: Sorts addresses: kind (0 address, 1 text), IP version, value, text.
_AddressKey = tuple[int, int, int, str]


def order_ranks(workers: Sequence[WorkerInfo], driver_node_id: str) -> list[WorkerInfo]:
    """Put workers in rank order: the position in the result is the new rank.

    Args:
        workers: in any order; the result does not depend on it.
        driver_node_id: Ray's id of the driver's node, hexadecimal. It need not hold a worker.
    """
    counts = Counter(worker.process.node_id for worker in workers)
    addresses: dict[str, _AddressKey] = {}
    for worker in workers:
        # One key a node, whatever its workers report: otherwise a node with two addresses would be torn apart.
        key, node_id = _address_key(worker.node_ip), worker.process.node_id
        addresses[node_id] = min(key, addresses.get(node_id, key))

    def position(worker: WorkerInfo) -> tuple[bool, int, _AddressKey, str, int]:
        node_id = worker.process.node_id
        return node_id != driver_node_id, counts[node_id], addresses[node_id], node_id, worker.created_rank

    return sorted(workers, key=position)


def rank_mapping(ordered: Sequence[WorkerInfo]) -> dict[int, int]:
    """Map created rank to rank, for the workers' ``adjust_rank``.

    Args:
        ordered: the result of :func:`order_ranks`.
    """
    return {worker.created_rank: rank for rank, worker in enumerate(ordered)}


def devices_by_node(workers: Sequence[WorkerInfo]) -> dict[str, tuple[str, ...]]:
    """Map each node id to the ids of all devices that the group has there, each once.

    Ids that are numbers are sorted as numbers (``2`` before ``10``); others (UUIDs, MIG ids) come after, as text.
    """
    devices: defaultdict[str, set[str]] = defaultdict(set)
    for worker in workers:
        devices[worker.process.node_id].update(worker.device_ids)
    return {node_id: tuple(sorted(ids, key=_device_key)) for node_id, ids in devices.items()}


def check_topology(workers: Sequence[WorkerInfo], expected: int) -> None:
    """Check that the workers that came up can form one group.

    Args:
        workers: what the workers report.
        expected: the world size.

    Raises:
        TopologyError: the number of workers is wrong, two created ranks or two processes are the same, nodes share an
            address, or a node shows more than one.
    """
    if len(workers) != expected:
        raise TopologyError(
            f"{len(workers)} workers came up, and the group needs {expected} (tensor_parallel_size x "
            "pipeline_parallel_size). This is a fault of the executor or of bundle_indices, not of the cluster"
        )
    _check_processes(workers)
    _check_addresses(workers)


def rendezvous_host(ordered: Sequence[WorkerInfo]) -> str:
    """Return the host where the group meets: loopback when all workers share a node, else rank 0's node address.

    Loopback spares a single node every question of firewalls and interfaces.

    Raises:
        TopologyError: there are no workers.
    """
    if not ordered:
        raise TopologyError("there are no workers to form a group")
    if len({worker.process.node_id for worker in ordered}) == 1:
        return LOOPBACK
    return ordered[0].node_ip


def init_method(host: str, port: int) -> str:
    """Compose ``tcp://host:port`` for ``torch.distributed``; an IPv6 address gets its brackets here.

    Raises:
        ValueError: the port is not in 1 .. 65535.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"port must be in 1 .. 65535, not {port}")
    bare = host.removeprefix("[").removesuffix("]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def grid(tp_size: int, pp_size: int) -> list[list[int]]:
    """Return the ranks of each stage: ``grid(tp, pp)[pp_rank][tp_rank] == pp_rank * tp + tp_rank``."""
    return [[stage * tp_size + column for column in range(tp_size)] for stage in range(pp_size)]


def assignments(
    ordered: Sequence[WorkerInfo], *, config: ExecutorConfig, epoch: int, init_method: str
) -> list[RankAssignment]:
    """Build what each rank is told about itself and the group, in rank order.

    Args:
        ordered: the result of :func:`order_ranks`.
        config: gives the sizes, the output rank and whether an aggregator wants the whole last stage's output.
        epoch: the generation that the assignments are for.
        init_method: ``tcp://host:port`` of this epoch, see :func:`init_method`.

    Raises:
        TopologyError: there are not as many workers as the config needs.
    """
    if len(ordered) != config.world_size:
        raise TopologyError(f"{len(ordered)} workers cannot fill {config.world_size} ranks")
    devices = devices_by_node(ordered)
    seen_on_node: Counter[str] = Counter()
    result: list[RankAssignment] = []
    for pp_rank, stage in enumerate(grid(config.tensor_parallel_size, config.pipeline_parallel_size)):
        last_stage = pp_rank == config.pipeline_parallel_size - 1
        for tp_rank, rank in enumerate(stage):
            node_id = ordered[rank].process.node_id
            is_output_rank = rank == config.output_rank
            result.append(
                RankAssignment(
                    rank=rank,
                    world_size=config.world_size,
                    local_rank=seen_on_node[node_id],
                    tp_rank=tp_rank,
                    tp_size=config.tensor_parallel_size,
                    pp_rank=pp_rank,
                    pp_size=config.pipeline_parallel_size,
                    epoch=epoch,
                    is_output_rank=is_output_rank,
                    wants_output=is_output_rank or (last_stage and config.output_aggregator is not None),
                    distributed_init_method=init_method,
                    device_ids=devices[node_id],
                    node_id=node_id,
                )
            )
            seen_on_node[node_id] += 1
    return result


def _check_processes(workers: Sequence[WorkerInfo]) -> None:
    """Raise TopologyError where two workers claim one created rank or one process."""
    by_created_rank: dict[int, WorkerInfo] = {}
    by_process: dict[tuple[str, int], WorkerInfo] = {}
    for worker in workers:
        if worker.created_rank in by_created_rank:
            raise TopologyError(f"two workers say that they were created as number {worker.created_rank}")
        by_created_rank[worker.created_rank] = worker
        process = (worker.process.node_id, worker.process.pid)
        if (other := by_process.get(process)) is not None:
            raise TopologyError(
                f"workers {other.created_rank} and {worker.created_rank} share process {worker.process.pid} on node "
                f"{worker.node_ip}: every worker needs a process of its own"
            )
        by_process[process] = worker


def _check_addresses(workers: Sequence[WorkerInfo]) -> None:
    """Raise TopologyError unless nodes and addresses map one to one."""
    ips_of: defaultdict[str, set[str]] = defaultdict(set)
    nodes_of: defaultdict[str, set[str]] = defaultdict(set)
    for worker in workers:
        ips_of[worker.process.node_id].add(worker.node_ip)
        nodes_of[worker.node_ip].add(worker.process.node_id)
    problems = [f"nodes {', '.join(sorted(nodes))} all have address {ip}" for ip, nodes in _ambiguous(nodes_of)] + [
        f"node {node} shows the addresses {', '.join(sorted(ips))}" for node, ips in _ambiguous(ips_of)
    ]
    if problems:
        raise TopologyError(
            f"every node needs exactly one address of its own, but {'; '.join(problems)}. Start Ray on each node with "
            "a unique one: ray start --node-ip-address=ADDRESS"
        )


def _ambiguous(mapping: Mapping[str, set[str]]) -> list[tuple[str, set[str]]]:
    return sorted((key, values) for key, values in mapping.items() if len(values) > 1)


def _address_key(ip: str) -> _AddressKey:
    """Sort key of an address; host names, which Ray accepts too, come after addresses."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return 1, 0, 0, ip
    return 0, address.version, int(address), ip


def _device_key(device_id: str) -> tuple[int, int, str]:
    """Sort key of a device id. ``isdecimal`` alone would admit digits that are not ASCII."""
    if device_id.isascii() and device_id.isdecimal():
        return 0, int(device_id), device_id
    return 1, 0, device_id
