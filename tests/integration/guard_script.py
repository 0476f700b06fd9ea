"""Registers as reader of a channel whose writer has died: what Ray does at the first read and at every close.

Usage: guard_script.py guarded|bare. Prints "survived" if this process does.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import ray
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayChannelError
from ray.experimental.channel.shared_memory_channel import Channel

from resilient_executor import ray_guard


class Echo:
    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: bytes) -> bytes:
        return value


def main(how: str) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    if how == "guarded":
        ray_guard.install()
    register = Channel.ensure_registered_as_reader
    # A death in the middle of the compilation, made slow: nothing is registered until the writer is gone.
    Channel.ensure_registered_as_reader = lambda self: None
    actor = ray.remote(num_cpus=0)(Echo).remote()
    pid = ray.get(actor.pid.remote())
    with InputNode() as request:
        graph = MultiOutputNode([actor.echo.bind(request)]).experimental_compile()
    buffers = [buffer for channel in graph.dag_output_channels[0]._channels for buffer in channel._buffers]
    os.kill(pid, signal.SIGKILL)
    store = ray._private.worker.global_worker.core_worker
    while store.object_exists(buffers[0]._local_reader_ref):
        time.sleep(0.02)
    try:
        register(buffers[0])
    except RayChannelError:
        Channel.ensure_registered_as_reader = register
        buffers[0].close()
        print("survived", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
