"""Errors of the reference engine and its worker.

What the caller did wrong is a ValueError. What goes wrong inside a worker's step is a plain RuntimeError and no
ResilientExecutorError: for the executor it is an exception of the engine's own code.
"""

from __future__ import annotations

from resilient_executor.errors import ResilientExecutorError


class InvalidRequest(ResilientExecutorError, ValueError):
    """A request cannot be accepted as it is. The message says what to change; nothing was queued."""


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single generated token within ``max_model_len``."""


class UnknownToken(InvalidRequest):
    """A prompt token id is not in the model's vocabulary."""


class InvalidSamplingParams(InvalidRequest):
    """A sampling parameter is out of range."""


class InvalidConfiguration(ResilientExecutorError, ValueError):
    """Sizes do not fit together (model, topology, cache, batch). The message says which and what to change."""


class RequestFailed(ResilientExecutorError):
    """One request ended with an error while the engine goes on. ``__cause__`` is the worker's own exception."""

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__(f"request {request_id} failed: {why}")
        self.request_id = request_id


class PoisonRequest(RequestFailed):
    """A request that took its workers along every time it was tried, at last all alone: it is given up (F17)."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, "it took its workers along every time it was tried, at last all alone")


class CacheExhausted(RuntimeError):
    """The KV cache has fewer free blocks than were asked for. Nothing was allocated."""


class StaleCache(RuntimeError):
    """A step builds on keys and values that this worker does not hold: it was scheduled for other workers."""


class CollectiveFailed(RuntimeError):
    """A collective of the tensor parallel group failed: a peer is gone, stuck or out of step.

    Not an error of this worker or of the request; the group cannot be used any more.
    """
