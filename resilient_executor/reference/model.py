"""One rank's part of a Llama decoder: a slice of the layers (PP) and of each layer (TP)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from resilient_executor.reference.cache import KVCache, StepLayout
from resilient_executor.reference.errors import InvalidConfiguration
from resilient_executor.reference.layers import Attention, Rotary, SwiGLU, VocabParallelEmbedding, rms_norm
from resilient_executor.reference.model_config import ModelConfig
from resilient_executor.reference.parallel import TensorParallel

if TYPE_CHECKING:
    from resilient_executor.protocol import RankAssignment

WEIGHTS = "model.safetensors"


class ShardReader:
    """Reads this rank's slices of a checkpoint, and no other bytes, into the compute type."""

    def __init__(self, folder: Path, tp: TensorParallel, dtype: torch.dtype) -> None:
        if not (folder / WEIGHTS).is_file():
            raise InvalidConfiguration(f"{folder} holds no {WEIGHTS}; checkpoints in several files are not supported")
        self._file: Any = safe_open(folder / WEIGHTS, framework="pt")
        self._tp = tp
        self._dtype = dtype

    def whole(self, name: str) -> Tensor:
        """The whole tensor, the same on every rank."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.to(self._dtype)

    def rows(self, *names: str) -> Tensor:
        """This rank's share of the rows of each tensor (column-parallel: rows are outputs), one under another."""
        return torch.cat([self._slice(name, 0) for name in names])

    def columns(self, name: str) -> Tensor:
        """This rank's share of the columns (row-parallel)."""
        return self._slice(name, 1)

    def _slice(self, name: str, dim: int) -> Tensor:
        view = self._file.get_slice(name)
        share = view.get_shape()[dim] // self._tp.size
        part = slice(self._tp.rank * share, (self._tp.rank + 1) * share)
        tensor: Tensor = view[part] if dim == 0 else view[:, part]
        return tensor.to(self._dtype)


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm and around a residual connection."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: SwiGLU
    eps: float

    def forward(self, hidden: Tensor, layout: StepLayout, cache: KVCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        hidden = hidden + self.attention.forward(rms_norm(hidden, self.attention_norm, self.eps), layout, cache)
        return hidden + self.mlp.forward(rms_norm(hidden, self.mlp_norm, self.eps))


class DecoderStage:
    """The layers of one PP stage; the first stage has the embedding, the last the final norm and the head."""

    def __init__(
        self, folder: Path, config: ModelConfig, assignment: RankAssignment, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        config.check_topology(assignment.tp_size, assignment.pp_size)
        self.config = config
        self.dtype = dtype
        self._tp = tp
        reader = ShardReader(folder, tp, dtype)
        rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta, dtype)
        self.layers = [
            self._load_layer(reader, layer, index, rotary)
            for index, layer in enumerate(config.stage_layers(assignment.pp_rank, assignment.pp_size))
        ]
        self.embedding: VocabParallelEmbedding | None = None
        self.norm: Tensor | None = None
        self.head: VocabParallelEmbedding | None = None
        if assignment.pp_rank == 0:
            self.embedding = VocabParallelEmbedding(reader.rows("model.embed_tokens.weight"), tp)
        if assignment.pp_rank == assignment.pp_size - 1:
            self.norm = reader.whole("model.norm.weight")
            if not config.tie_word_embeddings:
                self.head = VocabParallelEmbedding(reader.rows("lm_head.weight"), tp)
            elif self.embedding is not None:
                self.head = self.embedding
            else:
                self.head = VocabParallelEmbedding(reader.rows("model.embed_tokens.weight"), tp)

    def _load_layer(self, reader: ShardReader, layer: int, index: int, rotary: Rotary) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{layer}"
        qkv = reader.rows(*(f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv"))
        out = reader.columns(f"{prefix}.self_attn.o_proj.weight")
        gate_up = reader.rows(f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight")
        down = reader.columns(f"{prefix}.mlp.down_proj.weight")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return DecoderLayer(
            attention_norm=reader.whole(f"{prefix}.input_layernorm.weight"),
            attention=Attention(qkv, out, index, heads, kv_heads, rotary, self._tp),
            mlp_norm=reader.whole(f"{prefix}.post_attention_layernorm.weight"),
            mlp=SwiGLU(gate_up, down, self._tp),
            eps=config.rms_norm_eps,
        )

    def make_cache(self, num_tokens: int) -> KVCache:
        """A cache for this rank's layers and heads."""
        kv_heads = self.config.num_key_value_heads // self._tp.size
        return KVCache(len(self.layers), num_tokens, kv_heads, self.config.head_dim, self.dtype)

    def forward(self, inputs: Tensor, layout: StepLayout, cache: KVCache) -> Tensor:
        """Run the stage's layers.

        Args:
            inputs: token ids [tokens] on the first stage, else the previous stage's output.
            layout: where the step's tokens are in the cache.
            cache: this rank's cache; the tokens' keys and values are written to it.

        Returns:
            Hidden states [tokens, hidden], before the final norm.
        """
        hidden = inputs if self.embedding is None else self.embedding.embed(inputs)
        for layer in self.layers:
            hidden = layer.forward(hidden, layout, cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, hidden] -> [rows, vocab] on the last stage's first rank, None on its others.

        Raises:
            RuntimeError: this is not the last stage.
        """
        if self.norm is None or self.head is None:
            raise RuntimeError("only the last stage has an output head")
        return self.head.logits(rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def parameters(self) -> Iterator[Tensor]:
        """The tensors that this rank holds; a tied head is not counted twice."""
        for layer in self.layers:
            yield from (layer.attention_norm, layer.mlp_norm, *layer.attention.weights, *layer.mlp.weights)
        if self.embedding is not None:
            yield self.embedding.weight
        if self.norm is not None:
            yield self.norm
        if self.head is not None and self.head is not self.embedding:
            yield self.head.weight
