"""Two raylets on one address, run by test_topology.py in a process of its own; prints what was raised and left."""

from __future__ import annotations

import time

import leaks
import ray
from probe_executor import probe_config
from ray.cluster_utils import Cluster

from resilient_executor import ResilientExecutor, TopologyError


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    before = leaks.holdings()
    began = time.monotonic()
    try:
        ResilientExecutor(probe_config(tensor_parallel_size=2))
    except TopologyError as error:
        print(f"raised after {time.monotonic() - began:.1f} s: {error}")
    deadline = time.monotonic() + 5
    while (left := leaks.holdings().beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"left: {left}")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
