"""A fault-tolerant executor for distributed model inference on Ray: kill any worker, and every token still comes."""

from resilient_executor.config import ExecutorConfig, Transport
from resilient_executor.errors import (
    ConfigError,
    DependencyError,
    ExecutorFailed,
    ExecutorRecovering,
    ExecutorStopped,
    ExecutorUnhealthy,
    PlacementError,
    RecoveryTimeout,
    ResilientExecutorError,
    RpcLost,
    RpcTimeout,
    StartupError,
    StateError,
    StepLost,
    TopologyError,
)
from resilient_executor.executor import ResilientExecutor
from resilient_executor.journal import RpcPolicy
from resilient_executor.lifecycle import Event, ExecutorState
from resilient_executor.protocol import RankAssignment, Worker, WorkerInfo, WorkerSpec
from resilient_executor.supervisor.incidents import Cause, CauseKind, Evidence, Incident

__all__ = [
    "Cause",
    "CauseKind",
    "ConfigError",
    "DependencyError",
    "Event",
    "Evidence",
    "ExecutorConfig",
    "ExecutorFailed",
    "ExecutorRecovering",
    "ExecutorState",
    "ExecutorStopped",
    "ExecutorUnhealthy",
    "Incident",
    "PlacementError",
    "RankAssignment",
    "RecoveryTimeout",
    "ResilientExecutor",
    "ResilientExecutorError",
    "RpcLost",
    "RpcPolicy",
    "RpcTimeout",
    "StartupError",
    "StateError",
    "StepLost",
    "TopologyError",
    "Transport",
    "Worker",
    "WorkerInfo",
    "WorkerSpec",
]
