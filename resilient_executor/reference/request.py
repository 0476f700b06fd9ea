"""Requests as the engine's users see them (parameters, events, completions) and as the scheduler keeps them."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from resilient_executor.reference.errors import InvalidSamplingParams
from resilient_executor.reference.messages import Draw

_SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 for greedy decoding; otherwise the logits are divided by it.
        seed: 0 .. 2**64-1; the same seed gives the same tokens, whatever else runs and however often workers die.
            None lets the engine choose one at random.
        top_k: choose among this many most likely tokens; 0 for all.
        top_p: choose among the most likely tokens that hold this much probability, in (0, 1].
        ignore_eos: do not stop at the model's end-of-text token.
        stop_token_ids: further tokens to stop at; like the end-of-text token they end the output and are part of it.

    Raises:
        InvalidSamplingParams: a value is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidSamplingParams(f"max_tokens is {self.max_tokens}; ask for at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidSamplingParams(
                f"temperature is {self.temperature}; pass 0 for greedy decoding or a finite number above 0"
            )
        if self.seed is not None and not 0 <= self.seed < _SEED_LIMIT:
            raise InvalidSamplingParams(f"seed is {self.seed}; pass 0 .. 2**64-1, or None for a random one")
        if self.top_k < 0:
            raise InvalidSamplingParams(f"top_k is {self.top_k}; pass 0 to choose among all tokens")
        if not 0 < self.top_p <= 1:
            raise InvalidSamplingParams(f"top_p is {self.top_p}; pass a number above 0 and at most 1")


class FinishReason(str, enum.Enum):
    """Why a request ended."""

    STOP = "stop"  #: an end-of-text or stop token
    LENGTH = "length"  #: max_tokens, or the model's context is full
    ABORT = "abort"  #: the caller aborted it
    ERROR = "error"  #: it failed; the event and the completion carry the error


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, or the end of a request that ends without one (abort, error).

    Attributes:
        index: position in the request's output, from 0; for an end without a token, the number of tokens before it.
        token_id: the token, or None.
        text_delta: the text that became final with this token. Empty while a character's bytes are incomplete.
        finish_reason: set on a request's last event, and only there.
        error: set when ``finish_reason`` is ERROR.
    """

    request_id: str
    index: int
    token_id: int | None
    text_delta: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request. After an error or an abort it holds what was generated until then."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: Exception | None = None


@dataclass(eq=False)
class Request:
    """The scheduler's record of a live request. Only the scheduler changes it.

    Attributes:
        prompt: prompt token ids, begin-of-text token included.
        seed: the seed in use, also where ``params.seed`` is None.
        arrival: order of arrival; it is also the order of precedence.
        output: tokens generated so far.
        num_computed: tokens whose keys and values are in the workers' cache.
        blocks: its cache blocks, in order.
        in_flight: whether a step with it has been sent and has not come back.
        aborted: aborted while in flight; what that step brings is thrown away.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    in_flight: bool = False
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.output)

    @property
    def num_pending(self) -> int:
        """Tokens to run before the next one can be drawn."""
        return self.num_tokens - self.num_computed

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """The first ``count`` tokens that have not been run."""
        return (*self.prompt, *self.output)[self.num_computed : self.num_computed + count]

    def draw(self) -> Draw:
        """How to draw the next token."""
        params = self.params
        return Draw(len(self.output), params.temperature, params.top_k, params.top_p, self.seed)
