"""A node where workers die again and again, run by test_avoidance.py in a process of its own; prints where they ran."""

from __future__ import annotations

import logging
import os
import signal
import sys

import ray
from probe_executor import await_epoch, probe_config, run_step
from ray.cluster_utils import Cluster

from resilient_executor import ResilientExecutor


def main() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    with ResilientExecutor(probe_config(avoid_after=2)) as executor:
        first = executor.workers[0].process.node_id
        deaths = {first: 0}
        for epoch in range(1, 6):
            await_epoch(executor, epoch)
            run_step(executor, epoch)
            process = executor.workers[0].process
            print(f"epoch {epoch}: node {process.node_id[:8]} with {deaths.get(process.node_id, 0)} deaths", flush=True)
            if epoch < 5:
                os.kill(process.pid, signal.SIGKILL)
                deaths[process.node_id] = deaths.get(process.node_id, 0) + 1
                await_epoch(executor, epoch + 1)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
