"""Makes requests known to a worker that has never seen them. Model runner V1.

vLLM's runner keeps each request's state (prompt, tokens so far, sampling generator) and expects to be told of a request
in full only once. A request that lives longer than its workers is told again here, before the step that continues it:
the runner's own state update admits it as a new one, and then it is given the tokens that it has produced already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


def admit(runner: Any, admissions: Sequence[NewRequestData], scheduler_output: SchedulerOutput) -> None:
    """Admit requests that ``scheduler_output`` takes for known.

    Args:
        runner: a model runner V1.
        admissions: the requests, as they were sent for the first time.
        scheduler_output: the step that continues them.

    Raises:
        RuntimeError: the step does not say which tokens a request has produced, so that going on would be a guess.
    """
    cached = scheduler_output.scheduled_cached_reqs
    outputs = {new.req_id: _outputs_so_far(new, cached) for new in admissions}
    step = replace(
        scheduler_output,
        scheduled_new_reqs=[_as_resumed(new, cached) for new in admissions],
        scheduled_cached_reqs=type(cached).make_empty(),
        total_num_scheduled_tokens=0,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        new_block_ids_to_zero=None,
    )
    runner._update_states(step)
    for new in admissions:
        state = runner.requests[new.req_id]
        state.output_token_ids = outputs[new.req_id]
        if state.output_token_ids:
            # Prompt logprobs go out with the first token, and must not go out twice.
            runner.num_prompt_logprobs.pop(new.req_id, None)
        advance(runner, state.generator, len(state.output_token_ids))
        # The step itself puts it back, with its tokens.
        runner.input_batch.remove_request(new.req_id)
    # Ended like a step of its own: places that are still marked as free would be given to requests of the next one.
    runner.input_batch.condense()
    runner.input_batch.refresh_metadata()


def advance(runner: Any, generator: torch.Generator | None, draws: int) -> None:
    """Bring a seeded request's generator to where it was after ``draws`` sampled tokens.

    How much randomness one token takes depends on the platform's sampler, so the sampler itself is asked to draw.
    """
    if generator is None or draws == 0 or not hasattr(runner, "sampler"):
        return
    sampler = runner.sampler.topk_topp_sampler
    width = runner.input_batch.vocab_size
    with torch.inference_mode():
        for _ in range(draws):
            sampler(torch.zeros(1, width, device=runner.device), {0: generator}, None, None)


def _outputs_so_far(new: NewRequestData, cached: Any) -> list[int]:
    index = cached.req_ids.index(new.req_id)
    count = cached.num_output_tokens[index]
    if count == 0:
        return []
    tokens = cached.all_token_ids.get(new.req_id)
    if tokens is None:
        raise RuntimeError(
            f"request {new.req_id} is new to this worker, and the step does not say which {count} tokens it has "
            "produced: the scheduler has not noticed that the workers were replaced"
        )
    return list(tokens[len(tokens) - count :])


def _as_resumed(new: NewRequestData, cached: Any) -> NewRequestData:
    """The request with the blocks and the progress that it has now."""
    index = cached.req_ids.index(new.req_id)
    blocks = cached.new_block_ids[index]
    return replace(
        new,
        block_ids=tuple(list(ids) for ids in blocks) if blocks is not None else new.block_ids,
        num_computed_tokens=cached.num_computed_tokens[index],
    )
