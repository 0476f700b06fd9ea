"""Requests that do harm, exceptions in live workers, and weights that are not the checkpoint's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from engines import PROMPTS, core_of, dying, offline, tokens
from test_features import greedy

from resilient_executor import StateError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with offline(
        settings={"rpc_policies": {"tune": "journal"}},
        pipeline_parallel_size=2,
        max_num_seqs=32,
        logits_processors=["in_workers:Harmful"],
        worker_extension_cls="in_workers.Tuning",
    ) as engine:
        yield engine


def test_a_poison_request_alone_fails(llm: Any) -> None:
    """Twenty others finish, token by token the same; the engine has died for it three times, and not once more."""
    prompts = [f"{PROMPTS[number % 4]} {number}" for number in range(20)]
    undisturbed = tokens(llm.generate(prompts, greedy(), use_tqdm=False))
    before = core_of(llm).epoch
    params = [greedy() for _ in range(21)]
    params[13] = greedy(extra_args={"harm": "die"})
    outputs = llm.generate([*prompts[:13], "the poison", *prompts[13:]], params, use_tqdm=False)
    poison = outputs.pop(13)
    assert tokens(outputs) == undisturbed
    assert poison.outputs[0].finish_reason == "error"
    assert "has killed its workers every time" in poison.outputs[0].stop_reason
    assert poison.outputs[0].token_ids == []
    causes = [incident.cause.describe() for incident in core_of(llm).incidents if incident.epoch >= before]
    assert len(causes) == 3, causes
    assert all("SIGSEGV" in cause for cause in causes)
    assert tokens(llm.generate(prompts, greedy(), use_tqdm=False)) == undisturbed


def test_weights_changed_at_run_time_survive(llm: Any) -> None:
    """A call that is declared as one to be replayed is given to new workers as well."""
    plain = tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))
    llm.collective_rpc("tune", args=(3,))
    tuned = tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))
    assert tuned != plain
    with dying(llm, 3, 9):
        assert tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False)) == tuned


def test_weights_that_could_not_be_given_again_are_refused(llm: Any) -> None:
    with pytest.raises(StateError, match="volatile_weights='checkpoint'"):
        llm.collective_rpc("update_weights", args=({},))


def test_an_engine_whose_start_fails_after_ours_leaves_nothing() -> None:
    """The executor is up when vLLM finds that its cache is too small. In one process nobody else would end it."""
    code = """
import gc
from engines import offline, workers

def start():  # an exception holds on to the engine for as long as somebody looks at it, as pytest does
    try:
        with offline(block_size=32, num_gpu_blocks_override=2):
            pass
    except ValueError as error:
        print("ERROR", error)

if __name__ == "__main__":
    start()
    gc.collect()
    print("LEFT", workers())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert "ERROR To serve at least one request" in done.stdout, done.stderr[-2000:]
    assert "LEFT []" in done.stdout


def test_an_exception_in_a_live_worker_is_reported_and_nothing_is_rebuilt(llm: Any) -> None:
    """As with stock vLLM the engine is over, so this comes last; the workers live, and are not replaced for it."""
    core = core_of(llm)
    before = core.epoch, core.incidents
    with pytest.raises(ValueError, match="not to my taste"):
        llm.generate([PROMPTS[0]], greedy(extra_args={"harm": "raise"}), use_tqdm=False)
    assert (core.epoch, core.incidents) == before
