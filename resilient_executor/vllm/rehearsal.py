"""First uses that vLLM leaves to the first steps of a worker; a warm standby has them behind it.

vLLM compiles a few functions when they are first called, with ``enforce_eager``, too: one of the embedding under tensor
parallelism, one of sampling, one of log probabilities. The first of them takes 2 s of CPU time, compiled code in the
cache or not, and requests wait for it in the first step after a death.

Only on CPUs: elsewhere such a compilation is for a device, and a standby must not touch any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.platforms import current_platform

logger = logging.getLogger(__name__)

#: Rows of a batch that stand for all larger ones; a single one is compiled by itself.
_SEVERAL: Final = 2


def rehearse(config: Any) -> None:
    """Call what vLLM compiles, with arguments like those of a step.

    Args:
        config: the ``VllmConfig``.
    """
    if not current_platform.is_cpu():
        return
    vocabulary = config.model_config.get_vocab_size()
    if config.parallel_config.tensor_parallel_size > 1:
        _attempt(_embed, vocabulary)
    _attempt(_sample, vocabulary)
    _attempt(_count, vocabulary)


def _attempt(first_use: Callable[[int], None], vocabulary: int) -> None:
    """What does not work here is left to the first step, which reports it."""
    try:
        first_use(vocabulary)
    except ImportError:
        logger.debug("this vLLM has nothing to %s that is compiled", first_use.__name__.strip("_"))
    except Exception:
        logger.warning("%s could not be rehearsed", first_use.__name__.strip("_"), exc_info=True)


def _embed(vocabulary: int) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask

    for rows in (_SEVERAL, 1):
        ids = torch.zeros(rows, dtype=torch.int32)
        with torch.inference_mode():
            get_masked_input_and_mask(ids, vocabulary // 2, vocabulary, 0, vocabulary, vocabulary)


def _sample(vocabulary: int) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample

    with torch.inference_mode():
        for rows in (_SEVERAL, 1):
            compiled_random_sample(torch.zeros(rows, vocabulary))


def _count(vocabulary: int) -> None:
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    with torch.inference_mode():
        logprobs = torch.zeros(_SEVERAL, vocabulary).log_softmax(dim=-1, dtype=torch.float32)
        chosen = logprobs.gather(-1, torch.zeros(_SEVERAL, 1, dtype=torch.int64))
        for one in (logprobs, chosen):  # as the sampler does
            torch._dynamo.decorators.mark_unbacked(one, 0)
        batched_count_greater_than(logprobs, chosen)
