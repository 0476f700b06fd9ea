"""A worker whose steps meet in a real gloo all-reduce, so that a missing peer is felt as it is in a model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from resilient_executor import protocol
from resilient_executor.protocol import RankAssignment


class CollectiveWorker:
    """Every step sums ``value`` over the ranks, in the order and at the places that the step's commands say.

    Commands: ``value`` (int); ``raise_before`` / ``raise_after`` (ranks that raise before or after the all-reduce);
    ``die_before`` (rank -> seconds until it kills itself, instead of entering the all-reduce).
    """

    def __init__(self, assignment: RankAssignment) -> None:
        self.assignment = assignment
        self.noted: list[int] = []

    def init_device(self) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=self.assignment.distributed_init_method,
            rank=self.assignment.rank,
            world_size=self.assignment.world_size,
            timeout=timedelta(seconds=60),
        )

    def load_model(self) -> None:
        pass

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        import torch
        import torch.distributed as dist

        rank = self.assignment.rank
        if rank in scheduler_output.get("raise_before", ()):
            raise ValueError(f"rank {rank} raised before")
        if rank in (dying := scheduler_output.get("die_before", {})):
            time.sleep(dying[rank])
            os.kill(os.getpid(), 9)
        total = torch.tensor([scheduler_output["value"] * (rank + 1)])
        dist.all_reduce(total)
        if rank in scheduler_output.get("raise_after", ()):
            raise ValueError(f"rank {rank} raised after")
        return int(total)

    def add_up(self, value: int, raise_before: Sequence[int] = (), delay_s: float = 0.0) -> int:
        """The same by collective RPC; ranks that raise do it after ``delay_s``."""
        if self.assignment.rank in raise_before:
            time.sleep(delay_s)
        return int(self.execute_stage({"value": value, "raise_before": raise_before}, None, None))

    def begin_late(self, rank: int, seconds: float) -> None:
        """Have a rank be slow to begin its steps from now on; 0.0 ends that."""
        original = vars(protocol).setdefault("original_decode_request", protocol.decode_request)

        def late(request: bytes) -> Any:
            time.sleep(seconds)
            return original(request)

        vars(protocol)["decode_request"] = late if seconds and self.assignment.rank == rank else original

    def note(self, value: int) -> list[int]:
        """Without a collective: the values so far, in the order in which they came."""
        self.noted.append(value)
        return list(self.noted)
