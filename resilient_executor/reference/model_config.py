"""The sizes of a Llama model, read from a Hugging Face ``config.json``; no torch, so the engine can read them too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_executor.reference.errors import InvalidConfiguration


def resolve_checkpoint(checkpoint: str | Path | None) -> Path:
    """The folder of a checkpoint; None names the one that comes with this package, on whichever node this runs.

    Raises:
        InvalidConfiguration: there is no ``config.json``.
    """
    folder = Path(__file__).with_name("checkpoint") if checkpoint is None else Path(checkpoint)
    if not (folder / "config.json").is_file():
        raise InvalidConfiguration(
            f"{folder} holds no config.json; pass the folder of a Hugging Face Llama checkpoint, or None for the "
            "packaged one"
        )
    return folder


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama decoder, named as in ``config.json``.

    Attributes:
        rope_theta: base of the rotary position embedding's wavelengths.
        rms_norm_eps: added to the mean square before the root.
        eos_token_ids: tokens that end an output.
        tie_word_embeddings: the output head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            InvalidConfiguration: it is not a Llama model, or uses a feature that this decoder does not have.
        """
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if raw.get("model_type") != "llama":
            raise InvalidConfiguration(f"{folder} holds a {raw.get('model_type')!r} model; only llama is supported")
        rope: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        unsupported = [
            name
            for name, present in (
                ("scaled rotary embedding", rope.get("rope_type", "default") != "default"),
                ("bias in attention", raw.get("attention_bias", False)),
                ("bias in the MLP", raw.get("mlp_bias", False)),
                ("activation other than silu", raw.get("hidden_act", "silu") != "silu"),
            )
            if present
        ]
        if unsupported:
            raise InvalidConfiguration(f"{folder} needs what this decoder lacks: {', '.join(unsupported)}")
        heads = raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position_embeddings=raw["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rms_norm_eps=raw["rms_norm_eps"],
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
        )

    def check_topology(self, tp_size: int, pp_size: int) -> None:
        """Check that the model can be sharded over ``tp_size`` x ``pp_size`` ranks.

        Raises:
            InvalidConfiguration: something does not divide evenly, or there are more stages than layers.
        """
        for what, size in (
            ("attention heads", self.num_attention_heads),
            ("key-value heads", self.num_key_value_heads),
            ("intermediate size", self.intermediate_size),
            ("vocabulary size", self.vocab_size),
        ):
            if size % tp_size:
                raise InvalidConfiguration(f"tensor parallel size {tp_size} does not divide the {what} {size}")
        if pp_size > self.num_hidden_layers:
            raise InvalidConfiguration(
                f"pipeline parallel size {pp_size} is more than the {self.num_hidden_layers} layers"
            )

    def stage_layers(self, pp_rank: int, pp_size: int) -> range:
        """The layers of a stage: equal shares, the first stages take one more where it does not come out even."""
        share, rest = divmod(self.num_hidden_layers, pp_size)
        first = pp_rank * share + min(pp_rank, rest)
        return range(first, first + share + (pp_rank < rest))
