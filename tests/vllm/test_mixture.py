"""Everything that a request may ask for, in one batch, with workers dying under it: each answer is the undisturbed one.

One feature at a time, and with deaths at other moments: ``test_features.py``. With TP=2: ``test_standbys.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from engines import PROMPTS, core_of, dying, offline
from test_features import LONG, SCHEMA, greedy

pytestmark = pytest.mark.timeout(900)

PATTERN = r"(mon|tues|wednes)day: [0-9]{3}-[0-9]{3}"


def requests() -> dict[str, tuple[str, Any]]:
    """name -> (prompt, sampling parameters)."""
    from vllm.sampling_params import StructuredOutputsParams

    return {
        "greedy": (PROMPTS[0], greedy()),
        "penalties": (PROMPTS[1], greedy(presence_penalty=0.8, frequency_penalty=0.7, repetition_penalty=1.3)),
        "seeded": (PROMPTS[2], greedy(temperature=0.9, seed=1, top_p=0.95)),
        "seeded, top k": (PROMPTS[3], greedy(temperature=1.1, seed=2, top_k=20, min_p=0.01)),
        "several samples": (PROMPTS[0], greedy(n=3, temperature=0.9, seed=11)),
        "at least": (PROMPTS[1], greedy(min_tokens=12, stop_token_ids=[101, 102], ignore_eos=False)),
        "stop string": (PROMPTS[2], greedy(stop=[" th", "and"], min_tokens=8)),
        "logprobs": (PROMPTS[3], greedy(logprobs=5)),
        "prompt logprobs": (LONG, greedy(prompt_logprobs=2, max_tokens=12)),
        "json": (PROMPTS[0], greedy(structured_outputs=StructuredOutputsParams(json=SCHEMA), ignore_eos=False)),
        "regex": (PROMPTS[1], greedy(structured_outputs=StructuredOutputsParams(regex=PATTERN), ignore_eos=False)),
        "allowed tokens": (PROMPTS[2], greedy(allowed_token_ids=list(range(40, 90)), bad_words=["a"])),
        "shared prefix 1": (f"{LONG} one", greedy()),
        "shared prefix 2": (f"{LONG} two", greedy(logit_bias={65: 3.0})),
    }


#: Prefix caching, prompts longer than 64 tokens in chunks, and more sequences than run at once.
ENGINE = {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "max_num_seqs": 12}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with offline(pipeline_parallel_size=2, **ENGINE) as engine:
        yield engine


def said(output: Any) -> list[Any]:
    """Of each sample: tokens, text, why it ended."""
    return [(list(one.token_ids), one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def numbers(output: Any) -> dict[tuple[Any, ...], float]:
    """Log probabilities by place and token; their number is part of the answer, too."""
    places: dict[str, Any] = {f"{i}": one.logprobs for i, one in enumerate(output.outputs)}
    places["prompt"] = output.prompt_logprobs
    return {
        (place, position, token): entry.logprob
        for place, positions in places.items()
        for position, entries in enumerate(positions or ())
        for token, entry in (entries or {}).items()
    }


@pytest.mark.long
def test_everything_at_once(llm: Any) -> None:
    everything_at_once(llm)


def everything_at_once(llm: Any) -> None:
    wanted = requests()
    prompts, params = [prompt for prompt, _ in wanted.values()], [params for _, params in wanted.values()]

    def generate() -> dict[str, Any]:
        return dict(zip(wanted, llm.generate(prompts, params, use_tqdm=False), strict=True))

    undisturbed, again = generate(), generate()
    assert {name: said(output) for name, output in again.items()} == {n: said(o) for n, o in undisturbed.items()}
    before = core_of(llm).epoch
    with dying(llm, 0, 5, 18, 19, 33) as killed:
        survived = generate()
    assert core_of(llm).epoch >= before + len(set(killed)) - 1, "two may die in one incident"
    for name, output in undisturbed.items():
        assert said(survived[name]) == said(output), name
        assert numbers(survived[name]) == pytest.approx(numbers(output), abs=1e-3), name

    # The features did something, so that their sameness means something.
    assert len(numbers(undisturbed["logprobs"])) >= 30 * 5
    assert len(undisturbed["prompt logprobs"].prompt_logprobs) == len(undisturbed["prompt logprobs"].prompt_token_ids)
    assert len({text for _, text, _, _ in said(undisturbed["several samples"])}) == 3
    [(tokens, _, _, _)] = said(undisturbed["allowed tokens"])
    assert set(tokens) <= set(range(40, 90))
    for name, fits in (("json", lambda text: set(json.loads(text)) == {"name", "age"}), ("regex", _fits)):
        [(_, text, reason, _)] = said(undisturbed[name])
        assert reason != "stop" or fits(text), (name, text)


def _fits(text: str) -> bool:
    return re.fullmatch(PATTERN, text) is not None
