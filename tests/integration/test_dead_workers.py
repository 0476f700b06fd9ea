"""What is known of workers that are long dead: nothing, in any process.

Ray keeps a record of an actor, in the driver and in the cluster's head, as long as one process refers to it.
"""

from __future__ import annotations

import gc
import os
import signal
import time

import ray
from probe_executor import run_step, serving
from ray._private.internal_api import node_stats

from resilient_executor import ExecutorState, ResilientExecutor

REBUILDS = 4


def referred_to() -> dict[str, set[int]]:
    """Actor id -> the pids of the processes that refer to it."""
    [node] = [node for node in ray.nodes() if node["Alive"]]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=True)
    found: dict[str, set[int]] = {}
    for process in stats.core_workers_stats:
        for reference in process.object_refs:
            object_id = reference.object_id.hex()
            if object_id.startswith("f" * 16):  # that of an actor itself, not of what it has answered
                found.setdefault(object_id[16:48], set()).add(process.pid)
    return found


def lose_a_worker(executor: ResilientExecutor, rank: int) -> None:
    epoch = executor.epoch
    os.kill(executor.workers[rank].process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while executor.epoch == epoch or executor.state is not ExecutorState.HEALTHY:
        assert time.monotonic() < deadline, executor.state
        time.sleep(0.05)


def test_nobody_refers_to_workers_of_earlier_generations(ray_cluster: str) -> None:
    with serving(tensor_parallel_size=1, pipeline_parallel_size=2, max_restarts=REBUILDS) as executor:
        generations: list[set[str]] = []
        for number in range(REBUILDS):
            run_step(executor, number)
            generations.append({worker.actor_id for worker in executor.workers})
            lose_a_worker(executor, number % 2)
        dead = set().union(*generations[:-1])  # what became of the last ones may still be asked
        deadline = time.monotonic() + 10
        while kept := {actor: pids for actor, pids in referred_to().items() if actor in dead}:
            assert time.monotonic() < deadline, f"this is {os.getpid()}; actors and who keeps them: {kept}"
            time.sleep(0.2)
            gc.collect()  # this process is busy enough elsewhere; the supervisor is not, and must not need it
        present = {worker.actor_id for worker in executor.workers}
        assert present <= referred_to().keys(), "this is how references are found"
