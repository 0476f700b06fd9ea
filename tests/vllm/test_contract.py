"""What the adapter takes from vLLM is there, under the names and with the parameters that it counts on.

Read from the source, so that versions without a CPU build can be checked, too: ``VLLM_SOURCE`` names the folder of an
unpacked wheel (``make check-vllm-wheels``); without it the installed vLLM is read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from pathlib import Path

import pytest

from resilient_executor.vllm.control_plane import VOLATILE, treatment


def _root() -> Path:
    if source := os.environ.get("VLLM_SOURCE"):
        return Path(source) / "vllm"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def text(path: str) -> str:
    return (_root() / path).read_text()


@functools.cache
def klass(path: str, name: str) -> ast.ClassDef:
    found = [node for node in ast.walk(ast.parse(text(path))) if isinstance(node, ast.ClassDef) and node.name == name]
    assert found, f"{path} has no class {name}"
    return found[0]


def parameters(path: str, name: str, method: str) -> set[str]:
    found = [
        node
        for node in klass(path, name).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method
    ]
    assert found, f"{name} has no {method}"
    arguments = found[-1].args
    return {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} - {"self", "cls"}


def fields(path: str, name: str) -> set[str]:
    body = klass(path, name).body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


EXECUTOR = ("v1/executor/abstract.py", "Executor")
SCHEDULER = ("v1/core/sched/scheduler.py", "Scheduler")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("_init_executor", set()),
        ("collective_rpc", {"method", "timeout", "args", "kwargs", "non_block"}),
        ("execute_model", {"scheduler_output", "non_block"}),
        ("sample_tokens", {"grammar_output", "non_block"}),
        ("check_health", set()),
        ("supports_async_scheduling", set()),
        ("register_failure_callback", {"callback"}),
        ("get_kv_connector_handshake_metadata", set()),
        ("shutdown", set()),
    ],
)
def test_the_executor_that_we_are(method: str, expected: set[str]) -> None:
    assert parameters(*EXECUTOR, method) == expected
    abstract = {
        node.name
        for node in klass(*EXECUTOR).body
        if isinstance(node, ast.FunctionDef)
        and any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert abstract <= {"_init_executor", "collective_rpc", "check_health"}, "something new must be implemented"


def test_the_executor_is_built_before_the_scheduler_is_chosen() -> None:
    core = text("v1/engine/core.py")
    assert core.index("self.model_executor = executor_class(") < core.index("get_scheduler_cls()")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("schedule", set()),
        ("update_from_output", {"scheduler_output", "model_runner_output"}),
        ("reset_prefix_cache", {"reset_running_requests", "reset_connector"}),
        ("reset_encoder_cache", set()),
        ("finish_requests", {"request_ids", "finished_status"}),
        ("get_kv_connector", set()),
        ("_free_blocks", {"request"}),
        ("_enqueue_waiting_request", {"request"}),
        ("_update_request_as_session", {"session", "update"}),
    ],
)
def test_the_scheduler_that_we_wrap(method: str, expected: set[str]) -> None:
    assert expected <= parameters(*SCHEDULER, method)


def test_the_schedulers_inside() -> None:
    source = text(SCHEDULER[0])
    for attribute in ("requests", "waiting", "running", "kv_cache_manager", "finished_recving_kv_req_ids"):
        assert re.search(rf"self\.{attribute}\b", source), attribute
    assert "self.num_output_placeholders" in text("v1/request.py")
    if "self.defer_block_free" in source:
        for attribute in ("sched_step_seq", "processed_step_seq", "_drain_deferred_frees"):
            assert attribute in source, attribute
    # Every queue of waiting requests is one that a trial of suspects holds back.
    from_source = set(re.findall(r"self\.(\w+) = create_request_queue\(", source))
    from resilient_executor.vllm.scheduler import _QUEUES

    assert from_source <= set(_QUEUES), "a queue of waiting requests that nobody holds back"
    for method in ("remove_requests", "prepend_request"):
        assert method in text("v1/core/sched/request_queue.py")


def test_the_worker_under_us() -> None:
    path, name = "v1/worker/worker_base.py", "WorkerWrapperBase"
    assert {"rpc_rank", "global_rank"} <= parameters(path, name, "__init__")
    assert "all_kwargs" in parameters(path, name, "init_worker")
    cpu = parameters("v1/worker/cpu_worker.py", "CPUWorker", "__init__")
    assert {"vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker"} <= cpu
    runner = ("v1/worker/gpu_model_runner.py", "GPUModelRunner")
    assert {"scheduler_output", "intermediate_tensors"} <= parameters(*runner, "execute_model")
    assert parameters(*runner, "sample_tokens") == {"grammar_output"}
    assert "scheduler_output" in parameters(*runner, "_update_states")
    for attribute in ("requests", "input_batch", "num_prompt_logprobs"):
        assert f"self.{attribute}" in text(runner[0]), attribute


def test_what_a_standby_does_ahead() -> None:
    """What is not there is left to the first step; then this says that a death costs more again."""
    assert "def load_general_plugins()" in text("plugins/__init__.py")
    assert "def enable_envs_cache()" in text("envs.py")
    rehearsed = {
        "model_executor/layers/vocab_parallel_embedding.py": "def get_masked_input_and_mask(",
        "v1/sample/ops/topk_topp_sampler.py": "def compiled_random_sample(logits: torch.Tensor)",
        "v1/sample/ops/logprobs.py": "def batched_count_greater_than(x: torch.Tensor, values: torch.Tensor)",
    }
    for path, function in rehearsed.items():
        if "compiled_random_sample" in function and "compiled_random_sample" not in text(path):
            continue  # since 0.33
        assert re.search(r"@torch\.compile\(.*\)\n" + re.escape(function), text(path)), path


def test_how_a_server_lets_its_engine_go() -> None:
    """By it a failed engine is known, and the server ends with 1 (plugin.py)."""
    assert "engine_dead" in fields("v1/engine/core_client.py", "BackgroundResources")
    assert parameters("v1/engine/core_client.py", "BackgroundResources", "__call__") == set()
    assert re.search(r"from vllm\.v1\.utils import .*\bshutdown\b", text("v1/engine/utils.py"))
    assert re.search(r"\bshutdown\(self\.processes", text("v1/engine/utils.py"))


def test_the_messages() -> None:
    outputs, steps = "v1/outputs.py", "v1/core/sched/output.py"
    assert {"req_ids", "req_id_to_index", "sampled_token_ids", "kv_connector_output"} <= fields(
        outputs, "ModelRunnerOutput"
    )
    assert {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "finished_req_ids",
        "free_encoder_mm_hashes",
        "new_block_ids_to_zero",
    } <= fields(steps, "SchedulerOutput")
    assert {"req_id", "block_ids", "num_computed_tokens", "mm_features"} <= fields(steps, "NewRequestData")
    assert {"req_ids", "all_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"} <= fields(
        steps, "CachedRequestData"
    )
    assert {"request_id", "new_token_ids", "finish_reason", "stop_reason", "events", "trace_headers"} <= fields(
        "v1/engine/__init__.py", "EngineCoreOutput"
    )
    assert "with_kv_conn_output_only" in text(outputs) or "kv_connector" in text(outputs)


#: Called by vLLM, and left to the caller when its workers die: snapshots of a process, the end of an engine's parts.
NOT_REPEATED = {
    "apply_model",
    "checkpoint_prepare",
    "checkpoint_restore",
    "shutdown",
    "shutdown_weight_transfer_engine",
}
#: Steps; they do not go through our ``collective_rpc``.
STEPS = {"execute_model", "sample_tokens"}


def test_every_call_of_vllms_own_has_a_treatment() -> None:
    called = set()
    for path in _root().rglob("*.py"):
        relative = str(path.relative_to(_root()))
        if re.match(r"v1/(executor/abstract|engine/|core/)|entrypoints/", relative):
            called |= set(re.findall(r"collective_rpc\(\s*(?:#.*\n\s*)?\"(\w+)\"", path.read_text()))
    assert len(called) > 15
    # A LoRA's number for the calls that take one.
    known = {name for name in called if treatment(name, (1,) if name.endswith("_lora") else (), {}) is not None}
    assert called <= known | NOT_REPEATED | STEPS | VOLATILE
