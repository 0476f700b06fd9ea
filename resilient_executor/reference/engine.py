"""The reference engine: prompts in, tokens out, over any executor with vLLM's interface. Single-threaded.

The engine keeps all that matters of a request (prompt, tokens, seed) and the workers only what can be computed again.
So when the executor reports a lost step, the engine has nothing to repair: it schedules every live request from its
first token, and the next token comes out as it would have.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from resilient_executor.errors import ExecutorFailed, ResilientExecutorError, StepLost
from resilient_executor.poison import await_cause, died_in_rebuild
from resilient_executor.protocol import RemoteError
from resilient_executor.reference.detokenizer import Detokenizer, Vocabulary
from resilient_executor.reference.errors import (
    EmptyPrompt,
    InvalidConfiguration,
    InvalidRequest,
    PoisonRequest,
    PromptTooLong,
    RequestFailed,
    UnknownToken,
)
from resilient_executor.reference.messages import ModelOutput, SchedulerOutput
from resilient_executor.reference.model_config import ModelConfig, resolve_checkpoint
from resilient_executor.reference.request import Completion, FinishReason, Request, SamplingParams, TokenEvent
from resilient_executor.reference.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class Executor(Protocol):
    """The part of vLLM's executor interface that the engine uses."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call every worker; a list in rank order."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Take a step; with a sampler it is run by ``sample_tokens``."""

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Run the step; its output, or a future of it."""


@dataclasses.dataclass
class _Output:
    """A live request's side of the engine."""

    prompt: tuple[int, ...]
    detokenizer: Detokenizer
    token_ids: list[int] = dataclasses.field(default_factory=list)


class ReferenceEngine:
    """Serves requests over ``executor``, whose workers are :class:`ReferenceWorker`.

    Not thread-safe: one thread calls all methods. ``step`` waits for the oldest step in flight, so it takes as long as
    a step of the model; nothing runs between calls except the steps in flight.

    Args:
        executor: started; its workers have loaded the model. The engine does not own it.
        checkpoint: folder of the checkpoint (for tokenizer and sizes); None for the packaged one.
        max_batch_tokens: most tokens in one step; longer prompts are run in chunks.
        max_num_requests: most requests in the KV cache at the same time; others wait.
        max_model_len: most tokens of a request, prompt and output together; None for what the model was made for.
        max_concurrent_steps: most steps in flight; None asks the executor (``max_concurrent_batches``, as in vLLM).
        poison_crashes: deaths in a row after which requests are tried apart; see :class:`SchedulerConfig`.

    Raises:
        InvalidConfiguration: the limits do not fit the model or the workers' KV cache.

    Attributes:
        lost_steps: steps that were lost with their workers so far.
        recoveries: how often all live requests were scheduled anew because of it.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        checkpoint: str | Path | None = None,
        max_batch_tokens: int = 256,
        max_num_requests: int = 16,
        max_model_len: int | None = None,
        max_concurrent_steps: int | None = None,
        poison_crashes: int = 2,
    ) -> None:
        folder = resolve_checkpoint(checkpoint)
        self.model_config = ModelConfig.load(folder)
        limit = self.model_config.max_position_embeddings
        if max_model_len is None:
            max_model_len = limit
        if max_concurrent_steps is None:
            max_concurrent_steps = int(getattr(executor, "max_concurrent_batches", 1))
        if max_model_len > limit:
            raise InvalidConfiguration(f"max_model_len is {max_model_len}; the model has {limit} positions")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._vocabulary = Vocabulary(self._tokenizer)
        self._executor = executor
        self._failure: Exception | None = None

        # Control plane: new workers get the same two calls from the executor's journal.
        kv_capacity_tokens = min(executor.collective_rpc("determine_kv_capacity"))
        self._scheduler = Scheduler(
            SchedulerConfig(
                kv_capacity_tokens=kv_capacity_tokens,
                max_batch_tokens=max_batch_tokens,
                max_num_requests=max_num_requests,
                max_model_len=max_model_len,
                max_concurrent_steps=max_concurrent_steps,
                eos_token_ids=self.model_config.eos_token_ids,
                poison_crashes=poison_crashes,
            )
        )
        executor.collective_rpc("initialize_kv_cache", args=(kv_capacity_tokens,))

        self._outputs: dict[str, _Output] = {}
        self._steps: deque[tuple[SchedulerOutput, Any]] = deque()  # in flight, with their results or futures
        self._events: list[TokenEvent] = []  # to be returned by the next step()
        self._ids = itertools.count()
        self.lost_steps = 0
        self.recoveries = 0

    # --- Requests ---------------------------------------------------------------------------------------------------

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to report."""
        return bool(self._events) or self._scheduler.num_live > 0 or bool(self._steps)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the begin-of-text token in front."""
        return list(self._tokenizer.encode(text).ids)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt (text, or token ids); returns the request's id.

        Raises:
            EmptyPrompt, PromptTooLong, UnknownToken, InvalidRequest: the request cannot be served as it is.
            ExecutorFailed: the executor has failed for good.
        """
        if self._failure is not None:
            raise self._failure
        params = params or SamplingParams()
        if not prompt:
            raise EmptyPrompt("the prompt is empty; pass at least one character or token")
        tokens = tuple(self.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        limit = self._scheduler.config.max_model_len
        if len(tokens) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; at most {limit - 1} leave room for an answer. Shorten it"
            )
        vocab_size = self.model_config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise UnknownToken(f"token id {token} is not in the vocabulary; ids are 0 .. {vocab_size - 1}")
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        seed = secrets.randbits(64) if params.seed is None else params.seed
        try:
            self._scheduler.add(Request(request_id, tokens, params, seed))
        except ValueError as error:
            raise InvalidRequest(f"{error}; pass another id, or None to have one made") from None
        self._outputs[request_id] = _Output(tokens, Detokenizer(self._vocabulary))
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request; its last event comes with the next ``step``. False when it has ended before."""
        live = self._scheduler.abort(request_id)
        if live:
            self._end(request_id, FinishReason.ABORT)
        return live

    # --- Running ----------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Send as many steps as may be in flight, wait for the oldest, and return what it brought.

        An empty list when nothing is to be done, and when a step brought no token (a chunk of a long prompt, or a step
        that was lost and will be computed again).

        Raises:
            ResilientExecutorError: the executor took no step, for a reason that is none of the request's (it has been
                shut down, or a rebuild took longer than its limit). Requests are kept: ``step`` may be called again.
        """
        self._submit()
        self._collect()
        events, self._events = self._events, []
        return events

    def stream(self) -> Iterator[TokenEvent]:
        """Yield events until no request is left. Requests may be added and aborted between two events."""
        while self.has_unfinished_requests:
            yield from self.step()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete all prompts, in order. Other requests go on meanwhile, and their events are kept for ``step``.

        A request that failed is a completion with an error: look at ``Completion.error``.

        Raises:
            InvalidRequest: one of the prompts cannot be served, or there are not as many params as prompts; then
                nothing is queued.
            ResilientExecutorError: as in ``step``; the prompts that were not finished are aborted.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(params)} sets of parameters; pass one for each")
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, one))
        except ResilientExecutorError:
            self._withdraw(ids)
            raise
        outputs = {request_id: self._outputs[request_id] for request_id in ids}
        ends: dict[str, TokenEvent] = {}
        others: list[TokenEvent] = []
        try:
            while len(ends) < len(ids):
                for event in self.step():
                    if event.request_id not in outputs:
                        others.append(event)
                    elif event.finish_reason is not None:
                        ends[event.request_id] = event
        except BaseException:
            self._withdraw(ids)
            raise
        finally:
            self._events = others + self._events
        return [_completion(outputs[request_id], ends[request_id]) for request_id in ids]

    def _withdraw(self, request_ids: list[str]) -> None:
        """Abort those of ``request_ids`` that are live, without events."""
        for request_id in request_ids:
            if self._scheduler.abort(request_id):
                del self._outputs[request_id]

    # --- One step's way ---------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        while self._failure is None:
            step = self._scheduler.schedule()
            if not step.requests:
                return
            try:
                self._executor.execute_model(step, non_block=True)
                pending = self._executor.sample_tokens(None, non_block=True)
            except Exception as error:  # noqa: BLE001 - sorted out below; nothing is swallowed
                if _is_executors(error):
                    self._on_executor_error(error, refused=step)
                    continue
                pending = Future()  # the worker's own exception, from an executor that ran the step at once
                pending.set_exception(error)
            self._steps.append((step, pending))

    def _collect(self) -> None:
        """Wait for the oldest step in flight and settle it."""
        if not self._steps:
            return
        step, pending = self._steps[0]
        result: ModelOutput | None = None
        failure: Exception | None = None
        try:
            # The executor bounds it: a step ends within ``step_timeout_s``.
            result = pending.result() if isinstance(pending, Future) else pending
        except Exception as error:  # noqa: BLE001 - sorted out below; nothing is swallowed
            failure = error
        self._steps.popleft()  # not before: an interrupt while waiting leaves the step in flight
        if result is not None:
            self._apply(step, result)
        elif failure is not None and _is_executors(failure):
            self._on_executor_error(failure)
        else:
            self._fail_step(step, failure or TypeError("the executor returned no output for the step"))

    def _apply(self, step: SchedulerOutput, result: ModelOutput) -> None:
        for event in self._scheduler.update(step, result):
            assert event.token_id is not None
            output = self._outputs[event.request_id]
            output.token_ids.append(event.token_id)
            delta = output.detokenizer.append(event.token_id, last=event.finish_reason is not None)
            self._events.append(dataclasses.replace(event, text_delta=delta))
            if event.finish_reason is not None:
                del self._outputs[event.request_id]

    def _fail_step(self, step: SchedulerOutput, error: Exception) -> None:
        for request_id in self._scheduler.fail(step):
            failure = RequestFailed(request_id, f"its worker raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(request_id, FinishReason.ERROR, failure)

    # --- What the executor may say ----------------------------------------------------------------------------------

    def _on_executor_error(self, error: Exception, refused: SchedulerOutput | None = None) -> None:
        """Lost: schedule everything anew. Failed for good: end everything. Anything else: keep all, and raise."""
        if isinstance(error, ExecutorFailed):
            self._fail(error)
            return
        self._recompute(refused, error)
        if not isinstance(error, StepLost):
            raise error

    def _recompute(self, refused: SchedulerOutput | None, error: Exception) -> None:
        self.lost_steps += self._scheduler.num_in_flight
        self.recoveries += 1
        # The later steps in flight were lost with the first; the executor is told that the engine knows.
        later, self._steps = list(self._steps), deque()
        for _, pending in later:
            if isinstance(pending, Future):
                pending.exception()
        trial = self._scheduler.on_trial is not None
        cause, stormy = None, False
        if trial and isinstance(error, StepLost) and hasattr(self._executor, "incidents"):
            executor: Any = self._executor
            cause = await_cause(lambda: executor.incidents, error.epoch)
            stormy = died_in_rebuild(executor.incidents, error.epoch)
        poison = self._scheduler.recompute_all(refused, cause, stormy)
        if poison is not None:
            logger.error("request %s has taken its workers along even alone; it is given up, the others go on", poison)
            self._end(poison, FinishReason.ERROR, PoisonRequest(poison))
        elif not trial and (suspect := self._scheduler.on_trial) is not None:
            logger.warning("the same requests were in flight at the last deaths; %s is tried alone", suspect.request_id)

    def _fail(self, error: ExecutorFailed) -> None:
        self._failure = error
        self._steps.clear()
        for request_id in self._scheduler.end_all():
            self._end(request_id, FinishReason.ERROR, error)

    def _end(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> None:
        """Report the end of a request that ends without another token."""
        output = self._outputs.pop(request_id)
        delta = output.detokenizer.finish()
        self._events.append(TokenEvent(request_id, len(output.token_ids), None, delta, reason, error))


def _is_executors(error: Exception) -> bool:
    """Whether the executor raised it on its own behalf, and not the worker's code while it ran the step."""
    return isinstance(error, ResilientExecutorError) and not isinstance(error, RemoteError)


def _completion(output: _Output, end: TokenEvent) -> Completion:
    assert end.finish_reason is not None
    return Completion(
        end.request_id,
        output.prompt,
        tuple(output.token_ids),
        output.detokenizer.text,
        end.finish_reason,
        end.error,
    )
