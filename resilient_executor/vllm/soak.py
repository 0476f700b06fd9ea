"""vLLM under the chaos kit's soak: a real engine in this process, on the reference checkpoint; PP=2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from resilient_executor import ResilientExecutor

_CHECKPOINT: Final = str(Path(__file__).parent.parent / "reference" / "checkpoint")
_PROMPTS: Final = ("It was a fine evening, and", "The house stood on", "My dear Emma,", "She could not")
#: Keeps vLLM on a small machine.
_SMALL: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmArena:
    """See ``Arena`` in the chaos kit, which stands above this room: its settings and its ``Out`` are handed down."""

    harmless = "check_health"

    def __init__(
        self, name: str, settings: Mapping[str, Any], out: Callable[..., Any], pipeline_parallel_size: int = 2
    ) -> None:
        os.environ.update(_SMALL)
        from vllm import LLM

        settings = {**settings, "name": name, "step_deadline_first_s": 30.0}
        self._out = out
        self._llm = LLM(
            model=_CHECKPOINT,
            dtype="float32",  # greedy tokens do not depend on the batch
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 27,
            max_model_len=512,
            max_num_seqs=16,
            pipeline_parallel_size=pipeline_parallel_size,
            distributed_executor_backend="resilient_executor.vllm.ResilientVllmExecutor",
            additional_config={"resilient_executor": settings},
            disable_log_stats=True,
        )
        self._engine = self._llm.llm_engine
        self.executor: ResilientExecutor = self._engine.engine_core.engine_core.model_executor.core
        self._tokenizer = self._llm.get_tokenizer()
        self._counts: dict[str, int] = {}

    def add(self, request_id: str, workload: int) -> None:
        """Take a request in."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=30 + 10 * (workload % 5),
            temperature=0.0 if workload % 2 == 0 else 0.9,
            seed=workload,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._counts[request_id] = 0
        prompt: Any = {"prompt_token_ids": self._tokenizer.encode(_PROMPTS[workload % len(_PROMPTS)])}
        self._engine.add_request(request_id, prompt, params)

    def step(self) -> Iterator[Any]:
        """One step of the engine."""
        for output in self._engine.step():
            [sample] = output.outputs
            finish = str(sample.finish_reason or "") if output.finished else ""
            tokens = list(sample.token_ids)
            for place, token in enumerate(tokens):
                index = self._counts[output.request_id]
                self._counts[output.request_id] += 1
                last = finish if place == len(tokens) - 1 else ""
                yield self._out(output.request_id, token, index, last, finish if last in ("error", "abort") else "")
            if finish and not tokens:
                error = finish if finish in ("error", "abort") else ""
                yield self._out(output.request_id, None, self._counts[output.request_id], finish, error)

    @property
    def lost_steps(self) -> int:
        """Incidents stand for them: vLLM's scheduler does not count."""
        return len(self.executor.incidents)

    def close(self) -> None:
        """Shut down; twice is fine."""
        self._engine.engine_core.shutdown()
