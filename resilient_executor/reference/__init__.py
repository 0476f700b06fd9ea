"""A small real engine and a sharded Llama decoder, so that the executor can be run and tested without vLLM.

    executor (one of this package's, or anything with vLLM's executor interface, its workers ReferenceWorker)
    engine = ReferenceEngine(executor)
    engine.generate(["It was a fine evening, and"], SamplingParams(max_tokens=40))[0].text

Importing this package does not import torch: the engine's process needs none. The worker's process does, so name the
worker by its path, ``"resilient_executor.reference.worker:ReferenceWorker"`` (``WORKER``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from resilient_executor.reference.engine import Executor, Prompt, ReferenceEngine
from resilient_executor.reference.errors import (
    CacheExhausted,
    CollectiveFailed,
    EmptyPrompt,
    InvalidConfiguration,
    InvalidRequest,
    InvalidSamplingParams,
    PoisonRequest,
    PromptTooLong,
    RequestFailed,
    StaleCache,
    UnknownToken,
)
from resilient_executor.reference.messages import Draw, ModelOutput, ScheduledRequest, SchedulerOutput, describe_step
from resilient_executor.reference.model_config import ModelConfig, resolve_checkpoint
from resilient_executor.reference.request import Completion, FinishReason, Request, SamplingParams, TokenEvent
from resilient_executor.reference.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from resilient_executor.reference.worker import ReferenceWorker

#: The worker's import path, for ``WorkerSpec``.
WORKER: Final = "resilient_executor.reference.worker:ReferenceWorker"

__all__ = [
    "WORKER",
    "CacheExhausted",
    "CollectiveFailed",
    "Completion",
    "Draw",
    "EmptyPrompt",
    "Executor",
    "FinishReason",
    "InvalidConfiguration",
    "InvalidRequest",
    "InvalidSamplingParams",
    "ModelConfig",
    "ModelOutput",
    "PoisonRequest",
    "Prompt",
    "PromptTooLong",
    "ReferenceEngine",
    "ReferenceWorker",
    "Request",
    "RequestFailed",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "StaleCache",
    "TokenEvent",
    "UnknownToken",
    "describe_step",
    "resolve_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import the worker, and torch with it, when it is asked for."""
    if name == "ReferenceWorker":
        from resilient_executor.reference.worker import ReferenceWorker

        return ReferenceWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
