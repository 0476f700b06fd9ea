"""What a soak runs against: an engine over an executor that allows chaos, with a stream of tokens to record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from resilient_executor import ExecutorConfig, RpcPolicy, WorkerSpec

if TYPE_CHECKING:
    from resilient_executor import ResilientExecutor

_PROMPTS: Final = ("It was a fine evening, and", "The house stood on", "My dear Emma,", "She could not")
#: Requests that are repeated over and over: half greedy, half drawn with a seed.
WORKLOADS: Final = tuple(range(12))

#: What soaks change of the defaults: no budget to run out of, short pauses, and shorter deadlines, so that a freeze or
#: a stall costs seconds.
SETTINGS: Final[Mapping[str, Any]] = {
    "address": "local",
    "allow_chaos": True,
    "max_restarts": 100_000,
    "backoff_initial_s": 0.01,
    "backoff_max_s": 0.05,
    "heartbeat_timeout_s": 4.0,
    "step_deadline_min_s": 5.0,
    "step_deadline_first_s": 20.0,
    "settle_timeout_s": 3.0,
}


@dataclass(frozen=True)
class Out:
    """Something that reached the client: a token, or a request's end, or both.

    Attributes:
        token: its id; None for an end without one.
        finish: why the request ended; "" if it goes on.
        error: what it ended with.
    """

    request_id: str
    token: int | None
    index: int
    finish: str = ""
    error: str = ""


class Arena(Protocol):
    """An engine under test. One thread calls everything but ``executor``."""

    executor: ResilientExecutor
    #: A collective RPC that does no harm.
    harmless: str

    def add(self, request_id: str, workload: int) -> None:
        """Take a request in."""

    def step(self) -> Iterator[Out]:
        """Run the engine for a moment; what came of it."""

    @property
    def lost_steps(self) -> int:
        """Steps that were lost so far."""

    def close(self) -> None:
        """Shut down; twice is fine."""


class ReferenceArena:
    """The reference engine: PP=2 x TP=2, four workers on this machine."""

    harmless = "num_parameters"

    def __init__(self, name: str = "soak", tensor_parallel_size: int = 2, pipeline_parallel_size: int = 2) -> None:
        from resilient_executor import ResilientExecutor
        from resilient_executor.reference import WORKER, ReferenceEngine

        self.executor = ResilientExecutor(
            ExecutorConfig(
                worker=WorkerSpec(WORKER),
                name=name,
                tensor_parallel_size=tensor_parallel_size,
                pipeline_parallel_size=pipeline_parallel_size,
                rpc_policies=dict.fromkeys(("determine_kv_capacity", "initialize_kv_cache"), RpcPolicy.JOURNAL),
                **SETTINGS,
            )
        )
        try:
            self.engine = ReferenceEngine(self.executor)
        except BaseException:
            self.executor.shutdown()
            raise

    def add(self, request_id: str, workload: int) -> None:
        """Take a request in."""
        from resilient_executor.reference import SamplingParams

        temperature = 0.0 if workload % 2 == 0 else 0.9
        length = 30 + 10 * (workload % 5)
        params = SamplingParams(max_tokens=length, temperature=temperature, seed=workload, ignore_eos=True)
        self.engine.add_request(_PROMPTS[workload % len(_PROMPTS)], params, request_id)

    def step(self) -> Iterator[Out]:
        """One step of the engine."""
        for event in self.engine.step():
            finish = event.finish_reason.value if event.finish_reason is not None else ""
            yield Out(event.request_id, event.token_id, event.index, finish, str(event.error or ""))

    @property
    def lost_steps(self) -> int:
        """Steps that were lost so far."""
        return self.engine.lost_steps

    def close(self) -> None:
        """Shut down; twice is fine."""
        self.executor.shutdown()


def make(engine: str, name: str = "soak") -> Arena:
    """An arena by the name of its engine.

    Raises:
        ValueError: there is no such engine.
    """
    if engine == "reference":
        return ReferenceArena(name)
    if engine == "vllm":
        from resilient_executor.vllm.soak import VllmArena

        return VllmArena(name, SETTINGS, Out)
    raise ValueError(f"there is no engine {engine!r}; choose reference or vllm")
