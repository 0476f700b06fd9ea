"""Ray's channel for accelerators, with the wires under it.

Usage: accelerator.py ADDRESS FOLDER NODES. Runs on a node of the cluster, or starts one (``local``).

There is no accelerator: files of this machine, in the folder that is the second argument, carry what NCCL would carry;
all else is what NCCL gets.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.dag import InputNode
from ray.experimental.channel.cpu_communicator import CPUCommunicator
from ray.experimental.channel.torch_tensor_accelerator_channel import _TorchTensorAcceleratorChannel as accelerator

from resilient_executor import readers, wire_channel
from resilient_executor.doorbell import BellPlan

FOLDER = sys.argv[2] if len(sys.argv) > 2 else ""


class PretendAccelerator(CPUCommunicator):  # type: ignore[misc]  # Ray has no types
    """Ray gives it the channel that NCCL gets. One rank sends, one receives."""

    number = 0

    def get_transport_name(self) -> str:
        return "accelerator"

    def _next(self) -> Path:
        self.number += 1
        return Path(FOLDER) / str(self.number)

    def send(self, tensor: torch.Tensor, peer_rank: int) -> None:
        path = self._next()
        torch.save(tensor, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def recv(self, shape: Any, dtype: torch.dtype, peer_rank: int, allocator: Any = None) -> torch.Tensor:
        path, deadline = self._next(), time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} does not come"
            time.sleep(0.001)
        tensor: torch.Tensor = torch.load(path)
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
        return tensor


@ray.remote(num_cpus=1)
class Rank:
    def serve(self) -> tuple[bool, str]:
        # All that they do is refuse a CPU.
        accelerator.ensure_registered_as_writer = accelerator.ensure_registered_as_reader = lambda _: None
        wire_channel.serve_worker(True, bytes_only=False)
        own = f"resilient-executor-test-{os.getpid()}"
        readers.listen_in_worker(BellPlan(own, (), remote=False, company=100, busy_wait_ms=None))
        return wire_channel.install(), ray.get_runtime_context().get_node_id()

    def wires(self) -> int:
        return len(wire_channel._outlets)

    def send(self, size: int) -> Any:
        return {"size": size, "tensor": torch.full((size,), float(size)), "words": ("a", b"b", [None] * 3)}

    def receive(self, message: Any) -> tuple[int, float, Any]:
        return message["size"], float(message["tensor"].sum()), message["words"]


def main() -> None:
    ray.init(address=sys.argv[1], logging_level="error", include_dashboard=False if sys.argv[1] == "local" else None)
    ranks = [Rank.options(scheduling_strategy="SPREAD").remote() for _ in range(2)]  # type: ignore[attr-defined]
    served = ray.get([rank.serve.remote() for rank in ranks])
    assert all(installed for installed, _ in served)
    assert len({node for _, node in served}) == int(sys.argv[3])
    with InputNode() as size:
        between = ranks[0].send.bind(size).with_tensor_transport(transport=PretendAccelerator(2, ranks))
        graph = ranks[1].receive.bind(between)
    with wire_channel.wired(True):
        compiled = graph.experimental_compile(_max_inflight_executions=3)
    references = [compiled.execute(size) for size in (1, 7, 100_000)]
    for reference, size in zip(references, (1, 7, 100_000), strict=True):
        assert reference.get(timeout=30) == (size, float(size) * size, ("a", b"b", [None] * 3))
    assert [path.name for path in sorted(Path(FOLDER).iterdir())] == ["1", "2", "3"]
    took = []
    for size in (2, 3, 4, 5):
        time.sleep(0.1)  # so that the reader sleeps
        began = time.monotonic()
        assert compiled.execute(size).get(timeout=30)[0] == size
        took.append(time.monotonic() - began)
    print("slowest", max(took))
    print("wires", ray.get([rank.wires.remote() for rank in ranks]))
    compiled.teardown(kill_actors=True)


if __name__ == "__main__":
    main()
