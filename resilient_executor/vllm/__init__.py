"""The drop-in executor for vLLM: workers die, requests go on.

    vllm serve MODEL --distributed-executor-backend resilient_executor.vllm.ResilientVllmExecutor

Everything of this package that knows vLLM is in here; nothing is imported from vLLM's own Ray executors. Names are
imported at first use: a worker's process loads what it needs and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_executor.vllm.executor import ResilientVllmExecutor

__all__ = ["ResilientVllmExecutor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from resilient_executor.vllm import executor

        return getattr(executor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
