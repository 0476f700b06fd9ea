"""What the engine and the workers send each other each step: small, picklable, complete.

A step says everything about its requests: the tokens to run, where they go in the KV cache and how to draw the next
token. Workers keep keys and values, and which request they belong to, and nothing else. So workers that have just
started can run any step in which every request begins at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from resilient_executor.measurements import StepFacts

#: Tokens in one block of the KV cache; scheduler and workers must agree on it.
BLOCK_TOKENS: Final = 16


def blocks_for(num_tokens: int) -> int:
    """The number of cache blocks that ``num_tokens`` tokens fill."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose the next token of a request.

    Attributes:
        index: position of the token in the request's output, from 0.
        temperature: 0 chooses the most likely token.
        top_k: number of tokens to choose from; 0 for all.
        top_p: probability mass to choose from, in (0, 1].
        seed: 64-bit seed of the request.
    """

    index: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        token_ids: the tokens to run, at positions ``start`` .. ``start + len(token_ids) - 1``.
        start: number of tokens whose keys and values are in the cache already.
        blocks: the request's cache blocks, in order; they hold all positions up to the last of ``token_ids``.
        draw: how to choose the token that follows the last one; None while more of the prompt is to come.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what ``execute_model`` carries to the workers.

    Attributes:
        step_id: counted from 0 over the scheduler's life, lost steps included.
        requests: in the order in which their tokens are laid out in the batch.
        released: requests that have given back their cache blocks since the step before this one.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    released: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What the output rank returns: request id -> token id, for every request of the step that had a ``draw``."""

    step_id: int
    tokens: dict[str, int]


def describe_step(step: SchedulerOutput) -> StepFacts:
    """What telemetry says of a step; for ``ExecutorConfig.describe_step``."""
    return StepFacts(tokens=step.num_tokens, requests=len(step.requests))
