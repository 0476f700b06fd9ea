"""The paged KV cache of one rank: keys and values of its layers and heads, in blocks that the scheduler hands out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from resilient_executor.reference.errors import CacheExhausted, StaleCache
from resilient_executor.reference.messages import BLOCK_TOKENS, SchedulerOutput, blocks_for


@dataclass(frozen=True)
class Segment:
    """One request's rows in a step's batch.

    Attributes:
        first, last: its rows are ``first .. last - 1``.
        start: position of its first row in the request.
        slots: [start + rows], cache slot of each position of the request up to its last row.
    """

    first: int
    last: int
    start: int
    slots: Tensor


@dataclass(frozen=True)
class StepLayout:
    """Where the tokens of a step are in the batch and in the cache.

    Attributes:
        positions: [tokens], position of each token in its request.
        write_slots: [tokens], cache slot of each token.
        segments: one a request, in batch order.
    """

    positions: Tensor
    write_slots: Tensor
    segments: tuple[Segment, ...]


class KVCache:
    """Preallocated keys and values, and which request they belong to.

    Attributes:
        keys, values: [layers, slots, kv_heads, head_dim]; ``BLOCK_TOKENS`` slots a block. Unwritten slots are NaN, so a
            mistake in addressing ends in an error and not in a different token.
    """

    def __init__(self, num_layers: int, num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_tokens // BLOCK_TOKENS
        shape = (num_layers, self.num_blocks * BLOCK_TOKENS, num_kv_heads, head_dim)
        self.keys = torch.full(shape, torch.nan, dtype=dtype)
        self.values = torch.full(shape, torch.nan, dtype=dtype)
        self._resident: dict[str, int] = {}  # request -> tokens in the cache

    def reset(self) -> None:
        """Forget all requests, and their keys and values."""
        self.keys.fill_(torch.nan)
        self.values.fill_(torch.nan)
        self._resident.clear()

    def prepare(self, step: SchedulerOutput) -> StepLayout:
        """Release what the step releases, check that it fits what is in the cache, and lay it out.

        Raises:
            StaleCache: a request goes on from a position up to which this cache does not hold it.
            CacheExhausted: a block is outside the cache, or a request has too few blocks.
        """
        for request_id in step.released:
            self._resident.pop(request_id, None)
        positions: list[Tensor] = []
        segments: list[Segment] = []
        row = 0
        for request in step.requests:
            held = self._resident.get(request.request_id, 0)
            if request.start and request.start != held:
                raise StaleCache(
                    f"request {request.request_id} goes on at position {request.start}, but {held} of its tokens are "
                    "in this worker's cache: the step was scheduled for other workers"
                )
            end = request.start + len(request.token_ids)
            if blocks_for(end) > len(request.blocks) or not all(0 <= b < self.num_blocks for b in request.blocks):
                raise CacheExhausted(
                    f"request {request.request_id} needs {blocks_for(end)} cache blocks of 0 .. {self.num_blocks - 1}, "
                    f"the step gives {list(request.blocks)}"
                )
            blocks = torch.tensor(request.blocks)
            slots = (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()[:end]
            positions.append(torch.arange(request.start, end))
            segments.append(Segment(row, row + len(request.token_ids), request.start, slots))
            row = segments[-1].last
        write_slots = torch.cat([segment.slots[segment.start :] for segment in segments])
        return StepLayout(torch.cat(positions), write_slots, tuple(segments))

    def commit(self, step: SchedulerOutput) -> None:
        """Note that the step's keys and values have been written."""
        for request in step.requests:
            self._resident[request.request_id] = request.start + len(request.token_ids)
