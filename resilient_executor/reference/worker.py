"""The reference engine's worker: one rank of the model, run by the executor in a process of its own.

Every check that can fail because of the input (token ids, positions, blocks) happens before the first collective and
gives the same answer on every rank. So an exception of that kind leaves no rank waiting for another, and the group goes
on with the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from resilient_executor.reference import parallel
from resilient_executor.reference.cache import KVCache
from resilient_executor.reference.errors import InvalidConfiguration
from resilient_executor.reference.messages import BLOCK_TOKENS, ModelOutput, SchedulerOutput
from resilient_executor.reference.model import DecoderStage
from resilient_executor.reference.model_config import ModelConfig, resolve_checkpoint
from resilient_executor.reference.parallel import TensorParallel
from resilient_executor.reference.sampling import choose

if TYPE_CHECKING:
    from resilient_executor.protocol import RankAssignment

_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}


class ReferenceWorker:
    """A rank of the sharded decoder. The executor calls one method at a time.

    Args:
        assignment: who this worker is in its epoch.
        checkpoint: folder of a Hugging Face Llama checkpoint on this node; None for the packaged one.
        dtype: ``float32`` or ``float64``. float64 makes a recomputed step, whose batch has another shape and whose sums
            therefore round differently, choose the same tokens: the difference, about 1e-15, is far too small to turn a
            near-tie over. With float32 that happens now and then, as in any engine.
        kv_capacity_tokens: tokens that this rank's KV cache may hold.
        collective_timeout_s: for the rendezvous and for each collective of the process group.
        num_threads: torch's threads in this process.

    Raises:
        InvalidConfiguration: an argument is out of range, or the checkpoint cannot be sharded like this.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        *,
        checkpoint: str | None = None,
        dtype: str = "float64",
        kv_capacity_tokens: int = 16384,
        collective_timeout_s: float = 60.0,
        num_threads: int = 1,
    ) -> None:
        if dtype not in _DTYPES:
            raise InvalidConfiguration(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}")
        if kv_capacity_tokens < BLOCK_TOKENS:
            raise InvalidConfiguration(f"kv_capacity_tokens is {kv_capacity_tokens}; the least is {BLOCK_TOKENS}")
        last_stage = assignment.pp_rank == assignment.pp_size - 1
        if assignment.is_output_rank and not (last_stage and assignment.tp_rank == 0):
            raise InvalidConfiguration("the output rank must be the first rank of the last stage")
        self._assignment = assignment
        self._last_stage = last_stage
        self._folder = resolve_checkpoint(checkpoint)
        self._config = ModelConfig.load(self._folder)
        self._config.check_topology(assignment.tp_size, assignment.pp_size)
        self._dtype = _DTYPES[dtype]
        self._kv_capacity_tokens = kv_capacity_tokens
        self._collective_timeout_s = collective_timeout_s
        self._num_threads = num_threads
        self._tp: TensorParallel | None = None
        self._model: DecoderStage | None = None
        self._cache: KVCache | None = None

    # --- Life cycle, called by the executor -------------------------------------------------------------------------

    def init_device(self) -> None:
        """Join the epoch's process group.

        Raises:
            CollectiveFailed: the other ranks did not come in time.
        """
        self.bind_thread()
        self._tp = parallel.join(self._assignment, self._collective_timeout_s)

    def bind_thread(self) -> None:
        """Set torch's number of threads for the calling thread; OpenMP counts them for each calling thread."""
        torch.set_num_threads(self._num_threads)

    def load_model(self) -> None:
        """Read this rank's shard of the weights.

        Raises:
            RuntimeError: ``init_device`` has not been called.
        """
        if self._tp is None:
            raise RuntimeError("load_model was called before init_device")
        self._model = DecoderStage(self._folder, self._config, self._assignment, self._tp, self._dtype)

    def shutdown(self) -> None:
        """Leave the process group and drop the weights and the cache; safe to call again."""
        self._model = self._cache = self._tp = None
        parallel.leave()

    # --- Control plane: start-up calls, to be repeated on new workers -----------------------------------------------

    def determine_kv_capacity(self) -> int:
        """Tokens that this rank's cache can hold, in whole blocks."""
        return self._kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS

    def initialize_kv_cache(self, num_tokens: int) -> None:
        """Allocate the KV cache for ``num_tokens`` tokens (the least capacity of all ranks).

        Raises:
            RuntimeError: ``load_model`` has not been called.
            InvalidConfiguration: more tokens than ``determine_kv_capacity`` allows.
        """
        if self._model is None:
            raise RuntimeError("initialize_kv_cache was called before load_model")
        if num_tokens > self.determine_kv_capacity():
            raise InvalidConfiguration(
                f"a KV cache for {num_tokens} tokens was asked for; rank {self._assignment.rank} has room for "
                f"{self.determine_kv_capacity()}"
            )
        self._cache = self._model.make_cache(num_tokens)

    # --- Other calls ------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Forget all keys and values. Requests that are under way cannot be continued after it."""
        if self._cache is not None:
            self._cache.reset()

    def num_parameters(self) -> int:
        """Numbers in the weights that this rank holds; 0 before ``load_model``."""
        return 0 if self._model is None else sum(tensor.numel() for tensor in self._model.parameters())

    # --- Steps ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_stage(
        self, scheduler_output: SchedulerOutput, grammar_output: Any, intermediate: dict[str, Tensor] | None
    ) -> dict[str, Tensor] | ModelOutput | None:
        """Run this rank's part of a step.

        Args:
            scheduler_output: the step.
            grammar_output: not used; the reference engine has no grammars.
            intermediate: ``{"hidden_states": [tokens, hidden]}`` from the previous stage; None on the first.

        Returns:
            ``{"hidden_states": ...}`` before the last stage; on it the output rank's ModelOutput, and None elsewhere.

        Raises:
            StaleCache: the step builds on keys and values that this worker does not have.
            CacheExhausted: the step's blocks do not fit the cache.
            ValueError: a token id or position is out of range, or ``intermediate`` does not fit the stage or step.
            FloatingPointError: the logits are not finite.
            CollectiveFailed: a peer is gone.
        """
        if self._model is None or self._cache is None:
            raise RuntimeError("execute_stage was called before load_model and initialize_kv_cache")
        self._check(scheduler_output)
        layout = self._cache.prepare(scheduler_output)
        inputs = self._inputs(scheduler_output, intermediate)
        hidden = self._model.forward(inputs, layout, self._cache)
        self._cache.commit(scheduler_output)
        if not self._last_stage:
            return {"hidden_states": hidden}
        return self._sample(scheduler_output, hidden)

    def _check(self, step: SchedulerOutput) -> None:
        if not step.requests:
            raise ValueError(f"step {step.step_id} has no requests")
        for request in step.requests:
            if not request.token_ids:
                raise ValueError(f"request {request.request_id} has no tokens in step {step.step_id}")
            if not all(0 <= token < self._config.vocab_size for token in request.token_ids):
                raise ValueError(
                    f"request {request.request_id} has token ids outside the vocabulary of {self._config.vocab_size}"
                )
            if request.start + len(request.token_ids) > self._config.max_position_embeddings:
                raise ValueError(
                    f"request {request.request_id} goes beyond the model's {self._config.max_position_embeddings} "
                    "positions"
                )

    def _inputs(self, step: SchedulerOutput, intermediate: dict[str, Tensor] | None) -> Tensor:
        if self._assignment.pp_rank == 0:
            if intermediate is not None:
                raise ValueError("the first stage takes no intermediate result")
            return torch.tensor([token for request in step.requests for token in request.token_ids])
        if intermediate is None:
            raise ValueError(f"stage {self._assignment.pp_rank} needs the previous stage's hidden states")
        hidden = intermediate["hidden_states"]
        if hidden.shape != (step.num_tokens, self._config.hidden_size):
            raise ValueError(f"hidden states {list(hidden.shape)} do not fit the step's {step.num_tokens} tokens")
        return hidden

    def _sample(self, step: SchedulerOutput, hidden: Tensor) -> ModelOutput | None:
        """Choose a token after the last token of each request that wants one; only the first rank has the logits."""
        model = self._model
        assert model is not None
        ends: list[int] = []
        row = -1
        for request in step.requests:
            row += len(request.token_ids)
            if request.draw is not None:
                ends.append(row)
        tokens: dict[str, int] = {}
        if ends:
            logits = model.logits(hidden[ends])
            if logits is not None and self._assignment.is_output_rank:
                draws = [(request.request_id, request.draw) for request in step.requests if request.draw is not None]
                for (request_id, draw), scores in zip(draws, logits, strict=True):
                    tokens[request_id] = choose(scores, draw)
        return ModelOutput(step.step_id, tokens) if self._assignment.is_output_rank else None
