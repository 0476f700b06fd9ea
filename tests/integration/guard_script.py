"""Kills the writer of a channel that this process has not read yet, and closes the channel. Run by test_ray_guard.py.

Usage: guard_script.py ADDRESS guarded|bare
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import ray
from ray.dag import InputNode, MultiOutputNode

from resilient_executor import ray_guard


class Echo:
    def pid(self) -> int:
        return os.getpid()

    def step(self, value: Any) -> Any:
        time.sleep(30)
        return value


def main(address: str, how: str) -> None:
    ray.init(address=address, log_to_driver=False, namespace="guard")
    if how == "guarded":
        ray_guard.install()
    actor = ray.remote(num_cpus=0)(Echo).remote()
    pid = ray.get(actor.pid.remote(), timeout=30)
    with InputNode() as value:
        node = MultiOutputNode([actor.step.bind(value)])
    graph = node.experimental_compile()
    graph.execute(b"step")
    time.sleep(float(os.environ.get("D","1")))
    os.kill(pid, signal.SIGKILL)
    time.sleep(1.0)
    graph.teardown()
    print("survived", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
