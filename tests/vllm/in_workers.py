"""What the tests put into vLLM's workers: a logits processor that does harm on request, and an extension."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class Harmful(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped here
    """Looks at ``extra_args["harm"]`` of each request that enters the batch: ``die`` or ``raise``."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """What it gets is of no use to it."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        for _, params, _, _ in batch_update.added if batch_update else ():
            harm = (params.extra_args or {}).get("harm")
            if harm == "die":
                ctypes.string_at(0)  # a real fault: one that is sent from outside, Ray's handler may survive
            elif harm == "raise":
                raise ValueError("this request is not to my taste")


class Tuning:
    """A worker extension: weights that are not those of the checkpoint."""

    model_runner: Any

    def tune(self, seed: int) -> None:
        """Scale every channel at random, by the same numbers on every worker."""
        for name, parameter in self.model_runner.model.named_parameters():
            if name.endswith("layernorm.weight"):
                generator = torch.Generator().manual_seed(seed)
                parameter.data *= 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
