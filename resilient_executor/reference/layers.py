"""The parts of a Llama decoder, sharded over a TP group. Weights are [out, in], as in the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from resilient_executor.reference.cache import KVCache, StepLayout
from resilient_executor.reference.parallel import TensorParallel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` [tokens, hidden] to a root mean square of 1, then by ``weight`` [hidden]."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class Rotary:
    """Rotary position embedding in Hugging Face's layout: the two halves of a head are the two parts of a rotation."""

    def __init__(self, head_dim: int, max_positions: int, theta: float, dtype: torch.dtype) -> None:
        # In float64 and rounded once, so that float32 and float64 models rotate by the same angles.
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
        self._cos = angles.cos().to(dtype)
        self._sin = angles.sin().to(dtype)

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` [tokens, heads, head_dim] by ``positions`` [tokens]."""
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class VocabParallelEmbedding:
    """Embedding and output head; each rank holds ``vocab / tp`` rows of ``weight`` [vocab / tp, hidden]."""

    def __init__(self, weight: Tensor, tp: TensorParallel) -> None:
        self.weight = weight
        self._tp = tp
        self._first = tp.rank * weight.shape[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], on every rank. Collective."""
        local = token_ids - self._first
        absent = (local < 0) | (local >= self.weight.shape[0])
        hidden = functional.embedding(local.masked_fill(absent, 0), self.weight)
        return self._tp.all_reduce(hidden.masked_fill(absent[:, None], 0.0))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, hidden] -> [rows, vocab] on the TP group's first rank, None on the others. Collective."""
        return self._tp.gather_columns(functional.linear(hidden, self.weight))


class Attention:
    """Grouped-query attention; each rank computes ``heads / tp`` heads.

    Args:
        qkv: [(heads + 2 * kv_heads) / tp * head_dim, hidden], column-parallel.
        out: [hidden, heads / tp * head_dim], row-parallel.
        layer: index in this stage's cache.
    """

    def __init__(
        self,
        qkv: Tensor,
        out: Tensor,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        rotary: Rotary,
        tp: TensorParallel,
    ) -> None:
        self.weights = (qkv, out)
        self._layer = layer
        self._num_heads = num_heads // tp.size
        self._num_kv_heads = num_kv_heads // tp.size
        self._rotary = rotary
        self._tp = tp

    def forward(self, x: Tensor, layout: StepLayout, cache: KVCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values to the cache. Collective."""
        qkv_weight, out_weight = self.weights
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = functional.linear(x, qkv_weight).view(len(x), heads + 2 * kv_heads, -1)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        query = self._rotary.apply(query, layout.positions)
        keys, values = cache.keys[self._layer], cache.values[self._layer]
        keys[layout.write_slots] = self._rotary.apply(key, layout.positions)
        values[layout.write_slots] = value
        attended = [
            attend(query[segment.first : segment.last], keys[segment.slots], values[segment.slots], segment.start)
            for segment in layout.segments
        ]
        return self._tp.all_reduce(functional.linear(torch.cat(attended), out_weight))


def attend(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of one request.

    Args:
        query: [rows, heads, head_dim].
        keys: [start + rows, kv_heads, head_dim].
        values: like ``keys``.
        start: position of the first row.

    Returns:
        [rows, heads * head_dim].
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    # Query heads of a group share a key-value head: [kv_heads, group * rows, head_dim].
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.permute(1, 2, 0)) * head_dim**-0.5
    if rows > 1:
        scores = scores.view(kv_heads, -1, rows, start + rows)
        future = torch.ones(rows, start + rows, dtype=torch.bool).triu(start + 1)
        scores = scores.masked_fill(future, -torch.inf).view(kv_heads, -1, start + rows)
    attended = torch.softmax(scores, dim=-1) @ values.permute(1, 0, 2)
    return attended.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads * head_dim)


class SwiGLU:
    """Gated MLP; each rank holds ``intermediate / tp`` columns.

    Args:
        gate_up: [2 * intermediate / tp, hidden], column-parallel, gate first.
        down: [hidden, intermediate / tp], row-parallel.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, tp: TensorParallel) -> None:
        self.weights = (gate_up, down)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Collective."""
        gate_up, down = self.weights
        gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
        return self._tp.all_reduce(functional.linear(functional.silu(gate) * up, down))
