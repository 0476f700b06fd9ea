"""Make the small Llama checkpoint that the reference engine and the tests run on.

The text is "Pride and Prejudice" (1813), in the public domain, from the Debian package ``r-cran-janeaustenr``.
Fetch it and run, in about a quarter of an hour on two cores::

    apt-get download r-cran-janeaustenr
    python scripts/make_checkpoint.py --deb r-cran-janeaustenr_*_all.deb --output checkpoint

What it does, in order: read the novels out of the package (R's own serialisation, parsed here), train a byte-level
BPE tokenizer, train a Llama decoder with HF tensor names (Muon for the matrices, AdamW for the rest, seeded), and
write the Hugging Face layout: config.json, generation_config.json, model.safetensors (float16), tokenizer.json,
tokenizer_config.json. The numbers depend a little on the CPU and on the torch release, as sums of floats do.

The model sees the novel almost thirty times and knows much of it by heart. That is on purpose: a model of this size
that generalises falls into loops under greedy decoding, and tests of recovery need text that goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

BOS_TOKEN, EOS_TOKEN = "<|begin_of_text|>", "<|end_of_text|>"
BOS_ID, EOS_ID = 0, 1
Documents = list[list[list[int]]]  # token ids of each paragraph of each chapter
RDB_MEMBER = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
RDB_RECORD = 4  # of emma, mansfieldpark, northangerabbey, persuasion, prideprejudice, sensesensibility
R_STRING_VECTOR, R_CHARACTERS, R_NA_LENGTH = 16, 9, -1
CHAPTER_HEADING = re.compile(r"^(chapter|volume)\b[ \divxlc.]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, named as in config.json. Heads, MLP width and vocabulary divide by 4, for TP 1, 2 and 4."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


# --- The text -------------------------------------------------------------------------------------------------------


def read_novel(deb: Path) -> list[str]:
    """Return the lines of the novel.

    An R lazy-load database is a row of records: a 4-byte big-endian size, then a zlib stream of that many bytes.
    """
    tar_bytes = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(tar_bytes)) as archive:
        member = archive.extractfile(RDB_MEMBER)
        if member is None:
            raise SystemExit(f"{deb} holds no {RDB_MEMBER}: is it r-cran-janeaustenr?")
        database = member.read()
    records: list[bytes] = []
    while database:
        inflate = zlib.decompressobj()
        records.append(inflate.decompress(database[4:]))
        database = inflate.unused_data
    return list(read_r_strings(records[RDB_RECORD]))


def read_r_strings(record: bytes) -> Iterator[str]:
    """Yield the strings of the first character vector in an R object serialised as XDR (big-endian) version 3."""
    start = record.index(struct.pack(">i", R_STRING_VECTOR), 10)  # flags word of a plain STRSXP, behind the header
    (count,) = struct.unpack_from(">i", record, start + 4)
    position = start + 8
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", record, position)
        if flags & 0xFF != R_CHARACTERS:
            raise SystemExit(f"unexpected R type {flags & 0xFF} at byte {position}; the package's format has changed")
        position += 8
        length = 0 if length == R_NA_LENGTH else length
        yield record[position : position + length].decode("utf-8")
        position += length


def chapters(lines: list[str]) -> list[list[str]]:
    """Join hard-wrapped lines into paragraphs and group these by chapter; headings and title pages are left out."""
    result: list[list[str]] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        paragraph = re.sub(r"\s+", " ", block.replace("_", "")).strip()
        if CHAPTER_HEADING.match(paragraph):
            result.append([])
        elif paragraph and result and not (paragraph.isupper() or paragraph.lower() in ("finis", "the end")):
            result[-1].append(paragraph)
    return [chapter for chapter in result if chapter]


# --- The tokenizer --------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that puts the begin-of-text token first, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", pair=None, special_tokens=[(BOS_TOKEN, BOS_ID)]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"the text yields only {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


# --- The model, with Hugging Face's tensor names --------------------------------------------------------------------


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [length, head_dim], halves repeated (Hugging Face's rotate-half convention)."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to ``x`` [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [batch, heads, length, head_dim]; short rows are twice as fast without torch's fused kernel."""
    length = q.shape[-2]
    if length > 256:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores + torch.full((length, length), -torch.inf).triu(1)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = rotate(k, cos, sin).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = causal_attention(rotate(q, cos, sin), k, v)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """The Llama decoder; the embedding is also the output head (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_hidden_layers) if residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocab] of token ids [batch, length]."""
        cos, sin = rope_tables(self.shape, ids.shape[1])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


# --- Training -------------------------------------------------------------------------------------------------------


def batches(documents: Documents, tokens: int, rng: random.Random, length: int) -> Tensor:
    """A batch [rows, length + 1] of about ``tokens`` tokens: each row starts with BOS at the start of a paragraph."""
    starts = [(d, p) for d, document in enumerate(documents) for p in range(len(document))]
    rows: list[list[int]] = []
    while len(rows) < max(1, tokens // length):
        row = [BOS_ID]
        d, p = rng.choice(starts)
        while len(row) < length + 1:
            if p == len(documents[d]):
                row += [EOS_ID, BOS_ID]
                d, p = rng.choice(starts)
            row += documents[d][p]
            p += 1
        rows.append(row[: length + 1])
    return torch.tensor(rows)


def loss_of(model: Decoder, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token; bfloat16 in the matrix products, half as long on CPUs that have it."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Decoder, documents: Documents, seed: int) -> float:
    rng = random.Random(seed)
    return sum(float(loss_of(model, batches(documents, 4096, rng, 512))) for _ in range(4)) / 4


def train(args: argparse.Namespace, model: Decoder, documents: Documents, held: Documents) -> None:
    """Train in place; saves to ``args.output`` now and then so that a half-trained checkpoint can be used at once."""
    rng = random.Random(args.seed + args.resume_at)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    started = time.monotonic()
    for step in range(args.resume_at, args.steps):
        # Warm up over 100 steps (20 where it goes on), hold, then fall linearly over the last 60 %.
        begun = (step + 1 - args.resume_at) / (20 if args.resume_at else 100)
        scale = min(1.0, begun, max(0.01, (args.steps - step) / (0.6 * args.steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * scale
        # One batch in sixteen is as long as the model's context, so that late positions are trained as well.
        length = model.shape.max_position_embeddings if step % 16 == 15 else 256
        loss = loss_of(model, batches(documents, args.batch_tokens, rng, length))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % args.report_every == 0 or step + 1 == args.steps:
            elapsed = time.monotonic() - started
            print(
                f"step {step}/{args.steps} loss {loss.item():.3f} held-out {evaluate(model, held, args.seed):.3f} "
                f"{(step + 1 - args.resume_at) * args.batch_tokens / elapsed:.0f} tokens/s {elapsed:.0f} s",
                flush=True,
            )
            save(model, args.output)


# --- The files ------------------------------------------------------------------------------------------------------


def save(model: Decoder, output: Path) -> None:
    """Write model.safetensors in float16; the tied head is left out, as Hugging Face does."""
    tensors = {f"model.{name}": value.detach().half().contiguous() for name, value in model.state_dict().items()}
    target = output / "model.safetensors"
    save_file(tensors, target, metadata={"format": "pt"})
    target.chmod(0o644)  # safetensors makes it readable for the owner alone


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_configuration(shape: Shape, tokenizer: Tokenizer, output: Path) -> None:
    tokenizer.save(str(output / "tokenizer.json"))
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TOKEN,
            "eos_token": EOS_TOKEN,
            "model_max_length": shape.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_json(output / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    write_json(
        output / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dataclasses.asdict(shape),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "float16",
        },
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb", type=Path, required=True, help="the Debian package r-cran-janeaustenr")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint; made if missing")
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps (default %(default)s)")
    resume = "go on at this step from the weights in --output, with fresh optimizers (default: start anew)"
    parser.add_argument("--resume-at", type=int, default=0, metavar="STEP", help=resume)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens a step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1813, help="seed of weights and batches (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    parser.add_argument("--report-every", type=int, default=100, help="steps between reports (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    shape = Shape()
    args.output.mkdir(parents=True, exist_ok=True)

    book = chapters(read_novel(args.deb))
    texts = [" \n\n".join(chapter) for chapter in book]
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    save_configuration(shape, tokenizer, args.output)
    documents = [
        [tokenizer.encode(paragraph + "\n\n", add_special_tokens=False).ids for paragraph in chapter]
        for chapter in book
    ]
    held, documents = documents[40::40], [d for i, d in enumerate(documents) if i % 40 or i == 0]
    model = Decoder(shape)
    if args.resume_at:
        saved = load_file(args.output / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): value.float() for name, value in saved.items()})
    print(
        f"{len(texts)} chapters, {sum(map(len, texts)):,} characters, "
        f"{sum(len(p) for d in documents for p in d):,} tokens to train on; "
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        flush=True,
    )
    train(args, model, documents, held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
