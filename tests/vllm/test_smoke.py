"""The executor under vLLM's offline engine: started in every way, killed, and never noticed by a request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import ARGUMENTS, CHECKPOINT, PROMPTS, SETTINGS, core_of, dying, offline, tokens, workers

pytestmark = pytest.mark.timeout(600)


def params(**changes: object) -> object:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **changes})


@pytest.fixture(scope="module")
def undisturbed() -> list[list[list[int]]]:
    """What vLLM's own executor generates."""
    with offline(distributed_executor_backend=None) as llm:
        return tokens(llm.generate(list(PROMPTS), params(), use_tqdm=False))


@pytest.mark.parametrize(
    ("tp", "pp"), [(1, 1), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 1), (1, 2), (2, 2)))]
)
def test_requests_survive_every_worker(tp: int, pp: int, undisturbed: list[list[list[int]]]) -> None:
    with offline(tensor_parallel_size=tp, pipeline_parallel_size=pp) as llm:
        assert tokens(llm.generate(list(PROMPTS), params(), use_tqdm=False)) == undisturbed
        for rank in range(tp * pp):
            with dying(llm, 10 + rank, index=rank):
                assert tokens(llm.generate(list(PROMPTS), params(), use_tqdm=False)) == undisturbed
        incidents = core_of(llm).incidents
        assert [incident.outcome for incident in incidents] == ["recovered"] * (tp * pp)
        assert core_of(llm).epoch == 1 + tp * pp


def test_the_reference_engine_agrees(undisturbed: list[list[list[int]]]) -> None:
    """Two engines, one checkpoint: ours in float64 and vLLM's in float32 choose the same tokens."""
    from resilient_executor import ExecutorConfig, ResilientExecutor, WorkerSpec
    from resilient_executor.reference import WORKER, ReferenceEngine
    from resilient_executor.reference import SamplingParams as ReferenceParams

    with ResilientExecutor(ExecutorConfig(worker=WorkerSpec(WORKER), address="local")) as executor:
        engine = ReferenceEngine(executor)
        ids = [engine.add_request(prompt, ReferenceParams(max_tokens=40, ignore_eos=True)) for prompt in PROMPTS]
        got: dict[str, list[int]] = {request_id: [] for request_id in ids}
        for event in engine.stream():
            assert event.token_id is not None
            got[event.request_id].append(event.token_id)
    assert [[got[request_id]] for request_id in ids] == undisturbed


def test_the_class_works_in_vllms_own_engine_process(undisturbed: list[list[list[int]]]) -> None:
    """The usual offline use, engine in a process of its own; and the end leaves no process."""
    code = f"""
if __name__ == "__main__":
    import os, signal, psutil
    from vllm import LLM, SamplingParams
    from resilient_executor.vllm import ResilientVllmExecutor
    llm = LLM({CHECKPOINT!r}, distributed_executor_backend=ResilientVllmExecutor, pipeline_parallel_size=2,
        additional_config={{"resilient_executor": {SETTINGS!r}}}, **{ARGUMENTS!r})
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate({list(PROMPTS)!r}, params, use_tqdm=False)
    print("TOKENS", [[list(o.outputs[0].token_ids)] for o in outputs], flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS")]
    assert line == f"TOKENS {undisturbed}"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert not workers()


def test_a_dotted_path_of_somebody_else_is_left_alone() -> None:
    from resilient_executor.vllm.plugin import resolve

    assert resolve("mp") == "mp"
    assert resolve("vllm.v1.executor.uniproc_executor.UniProcExecutor").endswith("UniProcExecutor")
    assert resolve("no.such.module.Executor") == "no.such.module.Executor"


def test_supervisord_is_still_there(tmp_path: Path) -> None:
    """vLLM brings supervisord, whose import name our top-level folder must not take."""
    code = "import supervisor.options, resilient_executor.supervisor as ours; print(supervisor.__file__, ours.__file__)"
    for command in ([sys.executable, "-c", code], [str(Path(sys.executable).with_name("supervisord")), "--version"]):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
