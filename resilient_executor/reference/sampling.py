"""Choosing tokens: greedy, or by a draw that depends on nothing but the request's seed and the token's position.

A generator with a state would have to be carried to new workers. Here the random number for position n of a request
with seed s is a hash of (s, n), so a step that is computed again draws the same token, on whichever worker and in
whichever batch.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from resilient_executor.reference.messages import Draw


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output position ``index``, with 53 bits, the same on every platform.

    Args:
        seed: 0 .. 2**64-1.
        index: from 0.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8, person=b"token-draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(logits: Tensor, draw: Draw) -> int:
    """The next token id.

    Args:
        logits: [vocab], any floating type; the arithmetic is float64.
        draw: how to choose.

    Raises:
        FloatingPointError: a logit is not a number or infinite, i.e. the step's computation went wrong.
    """
    scores = logits.double()
    if not bool(torch.isfinite(scores).all()):
        raise FloatingPointError(f"the logits for output position {draw.index} are not finite")
    if draw.temperature == 0.0:
        return int(torch.nonzero(scores == scores.max())[0])  # the lowest id among equals; argmax promises no order
    # Stable: equal scores stay in order of token id, so the order does not depend on the sorting algorithm.
    scores, order = torch.sort(scores / draw.temperature, descending=True, stable=True)
    if draw.top_k:
        scores = scores[: draw.top_k]
    cumulative = torch.softmax(scores, dim=0).cumsum(dim=0)
    if draw.top_p < 1.0:
        # The shortest run of tokens that holds top_p: up to the first one where the sum reaches it.
        kept = int(torch.searchsorted(cumulative, draw.top_p)) + 1
        cumulative = cumulative[:kept]
    target = uniform(draw.seed, draw.index) * float(cumulative[-1])
    position = int(torch.searchsorted(cumulative, target, right=True))
    return int(order[min(position, len(cumulative) - 1)])
