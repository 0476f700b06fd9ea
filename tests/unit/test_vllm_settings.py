from __future__ import annotations

from typing import Any

import pytest

from resilient_executor import ConfigError, RpcPolicy, Transport
from resilient_executor.vllm import settings
from resilient_executor.vllm.settings import VllmSettings, VolatileWeights


def parse(given: Any = None, **environ: str) -> VllmSettings:
    return VllmSettings.parse({} if given is None else {"resilient_executor": given}, environ)


def test_defaults_are_patient_with_large_models() -> None:
    chosen = parse().executor
    assert chosen["start_timeout_s"] == 3600
    assert chosen["recovery_timeout_s"] >= 2 * chosen["start_timeout_s"]
    assert "worker" not in chosen


def test_both_sources_and_their_order() -> None:
    chosen = parse({"max_restarts": 3}, RESILIENT_EXECUTOR_MAX_RESTARTS="5", RESILIENT_EXECUTOR_START_TIMEOUT_S="7")
    assert chosen.executor["max_restarts"] == 3
    assert chosen.executor["start_timeout_s"] == 7


def test_our_own() -> None:
    chosen = parse(
        {"rpc_policies": {"reload": "journal"}, "poison_crashes": 3}, RESILIENT_EXECUTOR_VOLATILE_WEIGHTS="checkpoint"
    )
    assert chosen.rpc_policies == {"reload": RpcPolicy.JOURNAL}
    assert chosen.poison_crashes == 3
    assert chosen.volatile_weights is VolatileWeights.CHECKPOINT
    assert parse(RESILIENT_EXECUTOR_RPC_POLICIES='{"peek": "read"}').rpc_policies == {"peek": RpcPolicy.READ}


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"max_restart": 3}, {}, "max_restart"),
        ({"tensor_parallel_size": 2}, {}, "--tensor-parallel-size"),
        ({}, {"RESILIENT_EXECUTOR_BUNDLE_INDICES": "0,1"}, "VLLM_RAY_BUNDLE_INDICES"),
        ({}, {"RESILIENT_EXECUTOR_NONSENSE": "1"}, "RESILIENT_EXECUTOR_NONSENSE"),
        ({"max_restarts": -1}, {}, "max_restarts"),
        ({"rpc_policies": {"x": "sometimes"}}, {}, "sometimes"),
        ({"rpc_policies": 3}, {}, "rpc_policies"),
        ({}, {"RESILIENT_EXECUTOR_RPC_POLICIES": "{"}, "JSON"),
        ({"volatile_weights": "keep"}, {}, "keep"),
        ({"poison_crashes": -1}, {}, "poison_crashes"),
        ({"poison_crashes": "many"}, {}, "poison_crashes"),
        (7, {}, "mapping"),
    ],
)
def test_wrong_settings_name_themselves(given: Any, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(given, **environ)


def test_graph_settings_are_vllms_own_variables() -> None:
    chosen = settings.graph_settings(
        {
            "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "nccl",
            "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM": "1",
            "VLLM_RAY_PER_WORKER_GPUS": "0.5",
            "VLLM_RAY_BUNDLE_INDICES": "3,1",
        },
        shared_memory_only=False,
    )
    assert chosen["transport"] == Transport.NCCL.value
    assert chosen["overlap_communication"] is True
    assert chosen["devices_per_worker"] == 0.5
    assert set(chosen["bundle_indices"]) == {1, 3}
    assert (
        settings.graph_settings({"VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "nccl"}, shared_memory_only=True)[
            "transport"
        ]
        == "shm"
    ), "TPU and XPU have no NCCL"


def test_bundles_keep_the_order_in_which_they_are_named() -> None:
    for text in ("3,1,2", "7,0,5"):
        chosen = settings.graph_settings({"VLLM_RAY_BUNDLE_INDICES": text}, shared_memory_only=False)
        assert ",".join(map(str, chosen["bundle_indices"])) == text


@pytest.mark.parametrize(
    "environ",
    [
        {"VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "carrier-pigeon"},
        {"VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM": "yes"},
        {"VLLM_RAY_PER_WORKER_GPUS": "half"},
        {"VLLM_RAY_BUNDLE_INDICES": "0,one"},
    ],
)
def test_variables_that_cannot_be_read(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environ))):
        settings.graph_settings(environ, shared_memory_only=False)


def test_workers_get_vllms_variables_and_never_a_nodes_own() -> None:
    environ = {"VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "MINE_", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "ONE, TWO"}
    chosen = settings.carried_environment(environ, registered=["VLLM_PORT", "HF_TOKEN"], kept_back=["MINE_SECRET"])
    assert {"VLLM_", "HF_", "NCCL_", "MINE_", "OTEL_"} <= set(chosen["env_prefixes"])
    assert {"ONE", "TWO", "PYTHONHASHSEED", "OMP_NUM_THREADS"} <= set(chosen["env_names"])
    assert {"CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "LOCAL_RANK", "MINE_SECRET"} <= set(chosen["env_exclude"])
    assert "HF_TOKEN" not in chosen["env_exclude"], "gated models are loaded by the workers"


def test_the_runtime_environment_is_merged() -> None:
    given = {"env_vars": {"A": "1"}, "pip": ["x"]}
    merged = settings.remote_args(given, nsight=True, noset_variables=["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    assert merged["runtime_env"]["env_vars"] == {"A": "1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert merged["runtime_env"]["pip"] == ["x"]
    assert "cuda" in merged["runtime_env"]["nsight"]["t"]
    assert given == {"env_vars": {"A": "1"}, "pip": ["x"]}, "the user's own is not touched"
    assert settings.remote_args(None, nsight=False, noset_variables=[]) == {}
