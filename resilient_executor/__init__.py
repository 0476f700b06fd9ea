"""A fault-tolerant executor for distributed model inference on Ray: kill any worker, and every token still comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from resilient_executor.journal import RpcPolicy
from resilient_executor.lifecycle import Event, ExecutorState
from resilient_executor.measurements import StepFacts
from resilient_executor.protocol import RankAssignment, Worker, WorkerInfo, WorkerSpec
from resilient_executor.supervisor.incidents import Cause, CauseKind, Evidence, Incident

if TYPE_CHECKING:
    from resilient_executor.executor import ResilientExecutor

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
    "StepFacts",
    "StepLost",
    "TopologyError",
    "Transport",
    "Worker",
    "WorkerInfo",
    "WorkerSpec",
]


def __getattr__(name: str) -> Any:
    """Import the executor at its first use. It needs Ray: what is wrong with that is said here, and how to repair it.

    Raises:
        DependencyError: Ray is missing, too old, or without compiled graphs.
    """
    if name != "ResilientExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from resilient_executor import cluster

    cluster.check_dependencies()
    from resilient_executor.executor import ResilientExecutor

    globals()[name] = ResilientExecutor
    return ResilientExecutor
