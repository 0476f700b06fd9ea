"""Settings, checked before anything is started.

Every field of :class:`ExecutorConfig` except objects (worker, placement group, functions) can also be set with an
environment variable, ``RESILIENT_EXECUTOR_`` and the name in capitals; an argument wins over the environment.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from resilient_executor.errors import ConfigError
from resilient_executor.journal import RpcPolicy
from resilient_executor.measurements import StepFacts
from resilient_executor.protocol import WorkerSpec

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ENV_PREFIX: Final = "RESILIENT_EXECUTOR_"

#: Carried to the workers from the driver's environment, by prefix and by name.
DEFAULT_ENV_PREFIXES: Final = ("RESILIENT_EXECUTOR_", "OTEL_", "NCCL_", "GLOO_", "HF_", "TORCH_")
DEFAULT_ENV_NAMES: Final = ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")
#: Never carried: they belong to one process or one node.
DEFAULT_ENV_EXCLUDE: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "TPU_VISIBLE_CHIPS",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HF_TOKEN",
)

#: Parts of ``heartbeat_timeout_s``: the lease of a worker ends before anybody may be convicted for silence.
LEASE_SHARE: Final = 0.7
EARLIEST_SHARE: Final = 0.8
#: ``warm_standbys``: as many on each node as it has ranks.
EVERY_RANK: Final = "every_rank"
#: A supervisor that has died is replaced within this, in seconds; its workers must not end themselves meanwhile.
LEAST_GRACE_S: Final = 5.0


class Transport(str, enum.Enum):
    """How tensors travel between pipeline stages.

    ``auto`` is ``nccl`` where every worker has a CUDA device (Ray's device key ``GPU``, real devices present), else
    ``shm``.
    """

    AUTO = "auto"
    NCCL = "nccl"
    SHM = "shm"


@dataclass(frozen=True)
class ExecutorConfig:
    """All settings of an executor. Times are seconds.

    Raises:
        ConfigError: at construction, when a setting is out of range or two contradict each other.

    Attributes:
        worker: the engine's worker class with its arguments.
        tensor_parallel_size: ranks in a TP group, i.e. in one stage.
        pipeline_parallel_size: stages.
        uses_sampler: two-stage steps (``execute_model`` stores, ``sample_tokens`` runs); False for pooling models.
        rpc_policies: method name -> what becomes of that collective RPC when its epoch dies; an argument of the call
            wins. Others are never repeated.
        output_aggregator: turns the outputs of all ranks of the last stage (TP order) into the step's output; None
            takes the output of the last stage's first rank.
        describe_step: what telemetry says of a step's input: tokens, requests, and their trace headers. Called in a
            background thread, some time after the step.

        address: Ray cluster to join; None joins one that this process or ``RAY_ADDRESS`` already names, else starts an
            embedded one; ``"local"`` starts an embedded one unless this process is connected already.
        name: names the executor in logs, in status and for its actors.
        device_key: Ray resource that a worker takes: ``GPU``, another accelerator's resource, or ``CPU``.
        devices_per_worker: how much of it one worker takes; a fraction shares a device.
        placement_group: an existing placement group to use; it is never removed. None makes one, and removes it.
        bundle_indices: bundles of the placement group to use, one for each rank, in order of creation; None takes the
            first ones that hold the device.
        placement_strategy: Ray's strategy for a placement group of our own.
        ray_remote_args: further arguments for the workers' ``ray.remote``, e.g. ``runtime_env``.

        transport: how tensors travel between stages.
        overlap_communication: lets the graph overlap its communication with computation (GPU only).
        max_inflight_steps: steps in the graph at once, at most 100; None derives it from the pipeline's depth.
        wires: messages of the graph go over connections; False: through Ray's channels (docs/architecture.md, "Wires").
        stage_buffer_bytes: first size of one of Ray's buffers between two stages; a larger message resizes it, once.
        step_buffer_bytes: the same for requests and replies. Wires need neither.
        parking: readers of the graph sleep until there is something to read; False has them read as Ray does.
        busy_wait_ms: how long they spin before they sleep; None means 2 ms on a node with more cores than it has
            workers and driver, and elsewhere 1 ms after a wait that was shorter than that.
        eager_graph: build the graph at start-up; False builds it at the first step.

        env_prefixes, env_names: which of the driver's environment variables workers get.
        env_extra: added for workers, wins over the driver's.
        env_exclude: never carried.

        heartbeat_interval_s: between two heartbeats of one worker.
        heartbeat_timeout_s: silence of a process that does not run, after which it is given up as frozen. With steady
            heartbeats it is given up somewhat earlier, see ``earliest_conviction_s``.
        step_deadline_min_s: a step is never given up as stalled before this age; see ``step_deadline_factor``.
        step_deadline_first_s: the same while a group has finished fewer than five steps, and nothing is learnt yet.
        step_deadline_factor: a step is stalled when it is older than this multiple of the slowest recent step (the last
            half minute of service), but never before ``step_deadline_min_s`` and always at ``step_timeout_s``. If the
            steps of an engine vary by more, raise the floor: a stall is then noticed later, and nothing else changes.
        starting_timeout_s, loading_timeout_s, compiling_timeout_s: how long one worker may stay in a phase of its
            start. Loading covers the constructor, the weights and the replayed calls; compiling the graph's
            compilation and its first step. All of them together are within ``start_timeout_s``.
        check_health_timeout_s: default deadline of ``check_health``.
        start_timeout_s: from the request for bundles to the compiled graph, once.
        placement_timeout_s: wait for bundles.
        step_timeout_s: ceiling of the adaptive step deadline; also what the graph itself waits for a step, the last
            resort.
        settle_timeout_s: after a worker's own exception, how long its peers may take to come out of that step before
            the group is rebuilt.
        rpc_timeout_s: default timeout of a collective RPC.
        fence_timeout_s: for one process of an old epoch to be proven gone.
        teardown_timeout_s: for the graph's teardown; after that it is abandoned.
        recovery_timeout_s: how long a call waits for a rebuild.
        max_restarts, restart_window_s: more than ``max_restarts`` rebuilds in ``restart_window_s`` of service end in
            FAILED; the window stands still while nothing is served.
        backoff_reset_s: service of this length ends a row of failures.
        backoff_initial_s, backoff_max_s: pause before the second and later rebuilds in a row, doubling, with jitter.
        avoid_after, avoid_s: a node where so many workers have died within ``avoid_s`` is avoided for as long, if there
            is room elsewhere; 0 avoids none. Needs Ray's label selectors and a placement group of our own.
        warm_standbys: processes on each node with ranks that have done the engine's imports, and wait to take the place
            of a dead rank: a number, or ``every_rank`` for as many as the node has ranks. They hold no device, only
            memory; see docs/operations.md.
        start_attempts: attempts to start before ``StartupError``.
        move_on_drain: when Ray announces that a node will go (a drain notice), and there is room elsewhere, move the
            group at once instead of being surprised.
        capacity_timeout_s: how long a rebuild waits for a node with free devices, where there is none; within one
            attempt of the restart budget. A first start waits ``placement_timeout_s`` only.
        status_port: TCP port of the operator's endpoint (see docs/operations.md), which only shows; 0 takes any free
            one, None opens none.
        status_host: the address that it listens at, on the driver's node. It has no access control.
        allow_chaos: workers can be told to fail from inside (see docs/chaos.md). For tests and game days; killing and
            stopping processes from outside needs no permission.
    """

    worker: WorkerSpec
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    uses_sampler: bool = True
    output_aggregator: Callable[[Sequence[Any]], Any] | None = None
    rpc_policies: Mapping[str, RpcPolicy] = field(default_factory=dict)
    describe_step: Callable[[Any], StepFacts] | None = None

    address: str | None = None
    name: str = "executor"
    device_key: str = "CPU"
    devices_per_worker: float = 1.0
    placement_group: PlacementGroup | None = None
    bundle_indices: tuple[int, ...] | None = None
    placement_strategy: str = "PACK"
    ray_remote_args: Mapping[str, Any] = field(default_factory=dict)

    transport: Transport = Transport.AUTO
    overlap_communication: bool = False
    max_inflight_steps: int | None = None
    wires: bool = True
    stage_buffer_bytes: int = 1 << 20
    step_buffer_bytes: int = 1 << 15
    parking: bool = True
    busy_wait_ms: int | None = None
    eager_graph: bool = True

    env_prefixes: tuple[str, ...] = DEFAULT_ENV_PREFIXES
    env_names: tuple[str, ...] = DEFAULT_ENV_NAMES
    env_extra: Mapping[str, str] = field(default_factory=dict)
    env_exclude: tuple[str, ...] = DEFAULT_ENV_EXCLUDE

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    step_deadline_min_s: float = 8.0
    step_deadline_first_s: float = 60.0
    step_deadline_factor: float = 5.0
    starting_timeout_s: float = 60.0
    loading_timeout_s: float = 600.0
    compiling_timeout_s: float = 120.0
    check_health_timeout_s: float = 5.0
    start_timeout_s: float = 600.0
    placement_timeout_s: float = 60.0
    step_timeout_s: float = 300.0
    settle_timeout_s: float = 5.0
    rpc_timeout_s: float = 600.0
    fence_timeout_s: float = 10.0
    teardown_timeout_s: float = 5.0
    recovery_timeout_s: float = 900.0
    max_restarts: int = 10
    restart_window_s: float = 600.0
    backoff_initial_s: float = 0.5
    backoff_max_s: float = 30.0
    backoff_reset_s: float = 10.0
    avoid_after: int = 3
    avoid_s: float = 600.0
    warm_standbys: int | str = 0
    start_attempts: int = 3
    move_on_drain: bool = True
    capacity_timeout_s: float = 600.0
    status_port: int | None = None
    status_host: str = "127.0.0.1"
    allow_chaos: bool = False

    def __post_init__(self) -> None:
        """Normalise and check."""
        if not isinstance(self.worker, WorkerSpec):
            raise ConfigError(f"worker must be a WorkerSpec, not {type(self.worker).__name__}")
        try:
            object.__setattr__(self, "transport", Transport(self.transport))
        except ValueError:
            choices = ", ".join(repr(t.value) for t in Transport)
            raise ConfigError(f"transport must be one of {choices}, not {self.transport!r}") from None
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "start_attempts",
            "stage_buffer_bytes",
            "step_buffer_bytes",
        ):
            self._check_int(name, at_least=1)
        self._check_int("max_restarts", at_least=0)
        self._check_int("avoid_after", at_least=0)
        if self.warm_standbys != EVERY_RANK:
            if isinstance(self.warm_standbys, str):
                raise ConfigError(f"warm_standbys must be a whole number or {EVERY_RANK!r}, not {self.warm_standbys!r}")
            self._check_int("warm_standbys", at_least=0)
        for name, at_least, at_most in _OPTIONAL_NUMBERS:
            if getattr(self, name) is not None:
                self._check_int(name, at_least, at_most)
        if not re.fullmatch(r"[A-Za-z0-9.:_-]+", self.status_host):
            raise ConfigError(f"status_host must be an address or a host's name, not {self.status_host!r}")
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a positive, finite number of seconds, not {value!r}")
        self._check_placement()
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s:g}) must be at least three times heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}): one lost heartbeat must not condemn a worker"
            )
        factor = self.step_deadline_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < float("inf"):
            raise ConfigError(f"step_deadline_factor must be a finite number of at least 1, not {factor!r}")
        if self.backoff_max_s < self.backoff_initial_s:
            raise ConfigError("backoff_max_s must not be smaller than backoff_initial_s")
        if min(self.stage_buffer_bytes, self.step_buffer_bytes) < 1000:
            raise ConfigError("stage_buffer_bytes and step_buffer_bytes must be at least 1000, Ray's own minimum")

    def _check_int(self, name: str, at_least: int, at_most: int | None = None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ConfigError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
        if at_most is not None and value > at_most:
            raise ConfigError(f"{name} must be at most {at_most}, not {value}")

    def _check_placement(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.name):
            raise ConfigError(f"name must be 1 to 64 letters, digits, '_', '.' or '-', not {self.name!r}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"address {self.address!r} is a Ray Client address: a compiled graph must be driven by a process on a "
                "node of the cluster. Run the engine there, with address='auto'"
            )
        if not self.device_key:
            raise ConfigError("device_key must name a Ray resource, for instance 'GPU' or 'CPU'")
        if isinstance(self.devices_per_worker, bool) or not 0 < self.devices_per_worker < float("inf"):
            raise ConfigError(f"devices_per_worker must be positive, not {self.devices_per_worker!r}")
        if self.devices_per_worker > 1 and self.devices_per_worker != int(self.devices_per_worker):
            raise ConfigError(f"devices_per_worker above 1 must be whole, not {self.devices_per_worker!r}")
        if self.placement_strategy not in _STRATEGIES:
            raise ConfigError(
                f"placement_strategy must be one of {sorted(_STRATEGIES)}, not {self.placement_strategy!r}"
            )
        if self.bundle_indices is not None:
            indices = self.bundle_indices
            if len(indices) != self.world_size:
                raise ConfigError(
                    f"bundle_indices names {len(indices)} bundles, but {self.world_size} workers are needed "
                    f"(tensor_parallel_size {self.tensor_parallel_size} x pipeline_parallel_size "
                    f"{self.pipeline_parallel_size})"
                )
            if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in indices):
                raise ConfigError(f"bundle_indices must be whole numbers from 0, not {list(indices)}")
            if len(set(indices)) != len(indices):
                raise ConfigError(f"bundle_indices names a bundle twice: {list(indices)}; each worker needs its own")
            count = self.world_size if self.placement_group is None else self.placement_group.bundle_count
            if max(indices) >= count:
                raise ConfigError(
                    f"bundle_indices names bundle {max(indices)}, but the placement group has only {count} bundles "
                    f"(0 to {count - 1})"
                )
        reserved = {"num_cpus", "num_gpus", "resources", "scheduling_strategy", "max_restarts", "concurrency_groups"}
        reserved.add("enable_tensor_transport")  # of the class, which all executors share
        if clash := reserved & set(self.ray_remote_args):
            raise ConfigError(f"ray_remote_args must not set {sorted(clash)}: the executor sets them itself")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank whose output a step returns: the last stage's first."""
        return self.world_size - self.tensor_parallel_size

    @property
    def lease_s(self) -> float:
        """How long a worker may write to a channel after its last proven heartbeat. Shorter than any conviction."""
        return LEASE_SHARE * self.heartbeat_timeout_s

    @property
    def lease_grace_s(self) -> float:
        """A worker whose lease has run out waits so long for a new one, and then ends itself."""
        return max(LEAST_GRACE_S, self.heartbeat_timeout_s)

    @property
    def earliest_conviction_s(self) -> float:
        """Nobody is given up for silence before this: its lease must have run out."""
        return EARLIEST_SHARE * self.heartbeat_timeout_s

    @property
    def inflight_limit(self) -> int:
        """Steps that the graph holds at once: one a stage keeps a pipeline full, and one more hides the hand-over."""
        return self.max_inflight_steps or self.pipeline_parallel_size + 1

    @classmethod
    def from_env(cls, worker: WorkerSpec, environ: Mapping[str, str] | None = None, **settings: Any) -> ExecutorConfig:
        """Build a config from ``RESILIENT_EXECUTOR_*`` variables and ``settings``, which win.

        Raises:
            ConfigError: a variable that names no setting or cannot be read as its type; a setting out of range.
        """
        environ = os.environ if environ is None else environ
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := set(settings) - set(fields):
            raise ConfigError(f"unknown settings {sorted(unknown)}; known are {sorted(set(fields) - {'worker'})}")
        hints = {name: str(hint) for name, hint in _settable(cls).items()}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX):
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in hints:
                raise ConfigError(
                    f"{variable} is not a setting; known are {sorted(ENV_PREFIX + n.upper() for n in hints)}"
                )
            values[name] = _parse(variable, text, hints[name])
        return cls(worker=worker, **{**values, **settings})


_STRATEGIES: Final = frozenset({"PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"})
_OPTIONAL_NUMBERS: Final = (("status_port", 0, 65535), ("busy_wait_ms", 0, None), ("max_inflight_steps", 1, 100))
_SECONDS: Final = tuple(f.name for f in dataclasses.fields(ExecutorConfig) if f.name.endswith("_s"))
_OBJECTS: Final = {
    "worker", "output_aggregator", "describe_step", "placement_group", "ray_remote_args", "rpc_policies", "env_extra",
}  # fmt: skip


def _settable(cls: type[ExecutorConfig]) -> dict[str, Any]:
    """Fields that a text can set, with their types."""
    hints = get_type_hints(cls, localns={"PlacementGroup": object})
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name not in _OBJECTS}


def _parse(variable: str, text: str, hint: str) -> Any:
    """Read an environment variable as the type of its field."""
    try:
        if "tuple[int" in hint:
            return tuple(int(part) for part in text.split(",") if part.strip())
        if "tuple[str" in hint:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if "bool" in hint:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.strip().lower()]
        if "float" in hint:
            return float(text)
        if "int" in hint and not ("str" in hint and not text.strip().lstrip("-").isdigit()):
            return int(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{variable}={text!r} cannot be read as {hint}") from None
    return text
