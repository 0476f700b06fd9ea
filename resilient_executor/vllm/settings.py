"""Settings of the vLLM adapter: ours, and those of vLLM's own Ray executors that are honoured. Pure.

Ours come from ``additional_config["resilient_executor"]`` (``--additional-config`` on the command line) and from
``RESILIENT_EXECUTOR_*`` variables; the former win. All are checked before anything is started.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from resilient_executor.config import ENV_PREFIX, ExecutorConfig
from resilient_executor.errors import ConfigError
from resilient_executor.journal import RpcPolicy
from resilient_executor.protocol import WorkerSpec

#: The key in vLLM's ``additional_config``.
KEY: Final = "resilient_executor"

#: Settings of the executor that vLLM has its own options for, and which ones.
_VLLMS_OWN: Final = {
    "worker": "vLLM's worker_cls",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "uses_sampler": "nothing: the model decides it",
    "output_aggregator": "nothing: the KV connector decides it",
    "describe_step": "nothing: the adapter tells it",
    "placement_group": "vLLM's placement_group",
    "bundle_indices": "VLLM_RAY_BUNDLE_INDICES",
    "devices_per_worker": "VLLM_RAY_PER_WORKER_GPUS",
    "overlap_communication": "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
    "transport": "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    "ray_remote_args": "vLLM's ray_runtime_env",
}
#: Large models take long to load and compile, and vLLM's own executors wait without a limit.
_DEFAULTS: Final[dict[str, Any]] = {
    "name": "vllm",
    "start_timeout_s": 3600.0,
    "recovery_timeout_s": 7200.0,
    "rpc_timeout_s": 3600.0,
    "placement_timeout_s": 300.0,
    "loading_timeout_s": 3600.0,
    "compiling_timeout_s": 600.0,
    # A batch of a new shape may be compiled or captured in the middle of serving.
    "step_deadline_min_s": 60.0,
    "step_deadline_first_s": 300.0,
}
#: Belong to one worker or one node; the same list as in vLLM's Ray executors.
WORKER_SPECIFIC: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "ROCR_VISIBLE_DEVICES",
    "VLLM_HOST_IP",
    "VLLM_HOST_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
)
_PREFIXES: Final = ("FLASH_ATTENTION_", "HF_", "HUGGING_FACE_", "LMCACHE_", "NCCL_", "UCX_", "VLLM_")
_NAMES: Final = ("PYTHONHASHSEED",)


class VolatileWeights(str, enum.Enum):
    """What to do when weights are pushed into the workers that no new worker could be given again."""

    #: Refuse the call: nothing is ever silently wrong.
    REFUSE = "refuse"
    #: Allow it; after a rebuild the workers have the checkpoint's weights, and a warning says so.
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class VllmSettings:
    """Settings of the adapter.

    Attributes:
        executor: fields of :class:`ExecutorConfig`.
        rpc_policies: method name -> policy, for methods of the user's own (a worker extension, a callable's name).
        volatile_weights: see :class:`VolatileWeights`.
        poison_crashes: a request is suspected after so many crashes in a row with it in flight, and failed when it
            crashes its workers once more all alone; 0 never suspects one.
    """

    executor: Mapping[str, Any] = field(default_factory=dict)
    rpc_policies: Mapping[str, RpcPolicy] = field(default_factory=dict)
    volatile_weights: VolatileWeights = VolatileWeights.REFUSE
    poison_crashes: int = 2

    @classmethod
    def parse(cls, additional_config: Any, environ: Mapping[str, str]) -> VllmSettings:
        """Read and check all settings.

        Raises:
            ConfigError: an unknown setting, one that vLLM has its own option for, or a value that does not fit.
        """
        given = _section(additional_config)
        own = {f.name for f in dataclasses.fields(cls)} - {"executor"}
        texts = {k.removeprefix(ENV_PREFIX).lower(): v for k, v in environ.items() if k.startswith(ENV_PREFIX)}
        for name in [*given, *texts]:
            if name in _VLLMS_OWN:
                raise ConfigError(f"{name} cannot be set here; under vLLM it is set by {_VLLMS_OWN[name]}")
        known = {f.name for f in dataclasses.fields(ExecutorConfig)} - set(_VLLMS_OWN)
        if unknown := set(given) - known - own:
            raise ConfigError(
                f"unknown settings {sorted(unknown)} in additional_config[{KEY!r}]; known: {sorted(known | own)}"
            )
        values = {**{k: v for k, v in texts.items() if k in own}, **{k: v for k, v in given.items() if k in own}}
        executor = {k: _as_tuple(v) for k, v in given.items() if k not in own}
        variables = {k: v for k, v in environ.items() if k.removeprefix(ENV_PREFIX).lower() not in own}
        # Built once here for its checks alone, and for what the environment says.
        checked = ExecutorConfig.from_env(WorkerSpec("unused"), variables, **{**_env_defaults(texts), **executor})
        settable = {f.name for f in dataclasses.fields(ExecutorConfig)} & (set(texts) | set(executor) | set(_DEFAULTS))
        return cls(
            executor={name: getattr(checked, name) for name in settable},
            rpc_policies=_policies(values.get("rpc_policies", {})),
            volatile_weights=_choice("volatile_weights", VolatileWeights, values.get("volatile_weights", "refuse")),
            poison_crashes=_count("poison_crashes", values.get("poison_crashes", 2)),
        )


def carried_environment(
    environ: Mapping[str, str], registered: Iterable[str], kept_back: Iterable[str]
) -> dict[str, Any]:
    """Which variables workers get, by the rule of vLLM's Ray executors, as ``env_*`` settings.

    Args:
        environ: the driver's environment.
        registered: names that vLLM itself knows, and those that the platform adds.
        kept_back: names that the user has excluded (vLLM's ``ray_non_carry_over_env_vars.json``).
    """
    return {
        "env_prefixes": tuple(
            sorted({*_PREFIXES, *_csv(environ.get("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "")), "OTEL_", ENV_PREFIX})
        ),
        "env_names": tuple(
            sorted({*_NAMES, *registered, *_csv(environ.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")), *_TORCH_NAMES})
        ),
        "env_exclude": tuple(sorted({*WORKER_SPECIFIC, *kept_back})),
    }


_TORCH_NAMES: Final = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def graph_settings(environ: Mapping[str, str], *, shared_memory_only: bool) -> dict[str, Any]:
    """Channel type, overlap, devices and bundles, from the variables of vLLM's Ray executors.

    Args:
        environ: the driver's environment.
        shared_memory_only: the platform has no NCCL (TPU, XPU).

    Raises:
        ConfigError: a value that cannot be read.
    """
    channel = environ.get("VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE", "auto").strip().lower()
    if channel not in ("auto", "nccl", "shm"):
        raise ConfigError(f"VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE must be 'auto', 'nccl' or 'shm', not {channel!r}")
    settings: dict[str, Any] = {
        "transport": "shm" if shared_memory_only else channel,
        "overlap_communication": _flag(environ, "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM"),
    }
    try:
        settings["devices_per_worker"] = float(environ.get("VLLM_RAY_PER_WORKER_GPUS", "1.0"))
        if indices := _csv(environ.get("VLLM_RAY_BUNDLE_INDICES", "")):
            settings["bundle_indices"] = tuple(int(index) for index in indices)
    except ValueError as error:
        raise ConfigError(f"VLLM_RAY_PER_WORKER_GPUS or VLLM_RAY_BUNDLE_INDICES cannot be read: {error}") from None
    return settings


def remote_args(runtime_env: Any, *, nsight: bool, noset_variables: Iterable[str]) -> dict[str, Any]:
    """Arguments of ``ray.remote`` for the workers: their runtime environment.

    Args:
        runtime_env: the user's (vLLM's ``ray_runtime_env``), or None.
        nsight: profile the workers with Nsight Systems.
        noset_variables: variables that keep Ray from hiding devices; each worker sees all and takes its own by index.
    """
    merged: dict[str, Any] = dict(runtime_env or {})
    if nsight:
        merged["nsight"] = {"t": "cuda,cudnn,cublas", "o": "'worker_process_%p'", "cuda-graph-trace": "node"}
    if noset := dict.fromkeys(noset_variables, "1"):
        merged["env_vars"] = {**merged.get("env_vars", {}), **noset}
    return {"runtime_env": merged} if merged else {}


def _section(additional_config: Any) -> Mapping[str, Any]:
    if not isinstance(additional_config, Mapping):
        return {}
    section = additional_config.get(KEY, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"additional_config[{KEY!r}] must be a mapping of settings, not {type(section).__name__}")
    return section


def _env_defaults(texts: Mapping[str, str]) -> dict[str, Any]:
    """The adapter's defaults, as far as no variable says otherwise."""
    return {name: value for name, value in _DEFAULTS.items() if name not in texts}


def _as_tuple(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _policies(value: Any) -> dict[str, RpcPolicy]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{ENV_PREFIX}RPC_POLICIES must be a JSON object: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"rpc_policies must map method names to policies, not {value!r}")
    return {str(name): _choice(f"rpc_policies[{name!r}]", RpcPolicy, policy) for name, policy in value.items()}


def _choice(name: str, choices: type[Any], value: Any) -> Any:
    try:
        return choices(value)
    except ValueError:
        raise ConfigError(f"{name} must be one of {[c.value for c in choices]}, not {value!r}") from None


def _count(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number of at least 0, not {value!r}")
    return number


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "0").strip()
    if text not in ("0", "1"):
        raise ConfigError(f"{name} must be 0 or 1, not {text!r}")
    return text == "1"


def _csv(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
