"""What a request may ask for, with workers dying under it: the answer is the undisturbed one, whole and once.

One feature at a time; all of them in one batch: ``test_mixture.py``. Each test runs its requests undisturbed and then
with two deaths at chosen steps. float32 and greedy decoding (or a
seed) make equality the right judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import PROMPTS, core_of, dying, offline, tokens

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

LONG = (
    " ".join(f"{prompt} the {word}" for prompt in PROMPTS for word in ("carriage", "garden", "letter", "evening")) * 2
)


@pytest.fixture(scope="module", params=["tp2", "pp2"])
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One engine for most features: prefix caching on, prompts longer than 64 tokens in chunks."""
    sizes = {"tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}[request.param]
    with offline(**sizes, max_num_batched_tokens=64, enable_prefix_caching=True) as engine:
        yield engine


def greedy(**changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **changes})


def same_with_deaths(
    llm: Any,
    params: Any,
    prompts: Any = PROMPTS,
    moments: tuple[int, ...] = (4, 15),
    view: Callable[[Any], Any] = tokens,
) -> Any:
    """Generate undisturbed and with deaths; returns what both gave."""
    undisturbed = llm.generate(list(prompts), params, use_tqdm=False)
    again = llm.generate(list(prompts), params, use_tqdm=False)
    assert view(again) == view(undisturbed), "the engine itself does not repeat itself"
    before = core_of(llm).epoch
    with dying(llm, *moments) as killed:
        survived = llm.generate(list(prompts), params, use_tqdm=False)
    assert killed
    assert core_of(llm).epoch > before, "deaths in neighbouring steps may be one incident"
    assert view(survived) == view(undisturbed)
    return undisturbed


def test_penalties(llm: Any) -> None:
    outputs = same_with_deaths(llm, greedy(presence_penalty=0.8, frequency_penalty=0.7, repetition_penalty=1.3))
    assert tokens(outputs) != tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))


def test_seeded_sampling(llm: Any) -> None:
    same_with_deaths(llm, [greedy(temperature=0.9, seed=number, top_p=0.95) for number in range(4)])


def test_seeded_and_greedy_in_one_batch(llm: Any) -> None:
    same_with_deaths(
        llm, [greedy(), greedy(temperature=1.1, seed=7), greedy(temperature=0.7, seed=8, top_k=20), greedy()]
    )


def test_unseeded_sampling_is_whole(llm: Any) -> None:
    """Without a seed nobody can expect the same tokens, but as many as asked for, from the vocabulary."""
    with dying(llm, 4, 15):
        outputs = llm.generate(list(PROMPTS), greedy(temperature=1.0), use_tqdm=False)
    assert [len(samples[0]) for samples in tokens(outputs)] == [30] * 4


def test_minimum_and_stop_tokens(llm: Any) -> None:
    plain = tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))
    stop = plain[0][0][4]
    outputs = same_with_deaths(llm, greedy(min_tokens=12, stop_token_ids=[stop], ignore_eos=False))
    assert all(len(sample) >= 12 for samples in tokens(outputs) for sample in samples)


def test_stop_strings(llm: Any) -> None:
    text = llm.generate([PROMPTS[0]], greedy(), use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    outputs = same_with_deaths(
        llm,
        greedy(stop=[stop]),
        moments=(3, 8),
        view=lambda outs: [(o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outs],
    )
    assert outputs[0].outputs[0].stop_reason == stop


def test_logprobs(llm: Any) -> None:
    def view(outputs: Any) -> Any:
        return [
            [sorted((token, round(entry.logprob, 4), entry.rank) for token, entry in position.items())]
            for output in outputs
            for position in output.outputs[0].logprobs
        ]

    outputs = same_with_deaths(llm, greedy(logprobs=5), view=view)
    assert all(len(output.outputs[0].logprobs) == 30 for output in outputs)


def test_prompt_logprobs_come_once(llm: Any) -> None:
    def view(outputs: Any) -> Any:
        return [
            [
                None if p is None else sorted((t, round(e.logprob, 4)) for t, e in p.items())
                for p in output.prompt_logprobs
            ]
            for output in outputs
        ]

    for moments in ((1, 10), (2, 3)):  # in the middle of a prompt in chunks, and after it
        outputs = same_with_deaths(llm, greedy(prompt_logprobs=2), prompts=(LONG, *PROMPTS), moments=moments, view=view)
        assert all(len(o.prompt_logprobs) == len(o.prompt_token_ids) for o in outputs)


def test_several_samples(llm: Any) -> None:
    outputs = same_with_deaths(llm, greedy(n=3, temperature=0.9, seed=11))
    assert all(len(samples) == 3 and len({tuple(sample) for sample in samples}) == 3 for samples in tokens(outputs))


def test_chunked_prefill(llm: Any) -> None:
    prompts = [f"{LONG} {number}" for number in range(3)]
    same_with_deaths(llm, greedy(), prompts=prompts, moments=(1, 5, 12))


def test_prefix_caching(llm: Any) -> None:
    """A cache that died with its workers is not believed: the prefix is computed again, and then shared again."""
    prompts = [f"{LONG} {number}" for number in (1, 2, 3, 4)]
    llm.generate(prompts[:1], greedy(max_tokens=2), use_tqdm=False)
    same_with_deaths(llm, greedy(), prompts=prompts, moments=(0, 9))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["json", "regex"])
def test_structured_output(llm: Any, kind: str) -> None:
    import re

    from vllm.sampling_params import StructuredOutputsParams

    pattern = r"(mon|tues|wednes)day: [0-9]{3}-[0-9]{3}"
    structured = StructuredOutputsParams(json=SCHEMA) if kind == "json" else StructuredOutputsParams(regex=pattern)
    outputs = same_with_deaths(
        llm, greedy(max_tokens=60, ignore_eos=False, structured_outputs=structured), moments=(3, 9)
    )
    for output in outputs:
        text = output.outputs[0].text
        if output.outputs[0].finish_reason == "stop":
            assert set(json.loads(text)) == {"name", "age"} if kind == "json" else re.fullmatch(pattern, text)


def test_both_mixed_with_plain_requests(llm: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    fenced = greedy(structured_outputs=StructuredOutputsParams(regex=r"[a-f]{10,20}"), max_tokens=12)
    same_with_deaths(llm, [greedy(), fenced, greedy(temperature=0.8, seed=3), fenced])


def test_a_death_between_two_calls_costs_nothing(llm: Any) -> None:
    import os
    import signal

    from engines import workers

    undisturbed = tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))
    os.kill(workers()[0], signal.SIGKILL)
    assert tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False)) == undisturbed


def test_collective_rpc_reads_while_workers_die(llm: Any) -> None:
    import os
    import signal

    from engines import workers

    os.kill(workers()[0], signal.SIGKILL)
    supported = llm.collective_rpc("get_supported_tasks")
    assert len(supported) == 2
    assert "generate" in supported[0]


def test_a_call_that_nobody_declared_is_not_repeated(llm: Any) -> None:
    """The caller decides, because nobody else can."""
    from resilient_executor import RpcLost

    def suicide(worker: Any) -> None:
        import os
        import signal

        if worker.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RpcLost, match="suicide"):
        llm.collective_rpc(suicide)
    undisturbed = llm.generate(list(PROMPTS), greedy(), use_tqdm=False)
    assert len(undisturbed) == 4
