"""The configured scheduler, and what it does when its workers have been replaced.

vLLM asks for the scheduler's class after it has built the executor, so the executor puts a subclass of whatever is
configured there. It behaves exactly like its base until an output says that its step was lost. Then all requests start
over from their first token, which is what vLLM does with a preempted request anyway: nothing that was delivered is
delivered again, and nothing that was not is missed.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from resilient_executor.poison import Quarantine
from resilient_executor.vllm.messages import Loss, LostStepOutput, blank_output

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from resilient_executor.vllm.tracing import TraceHeaders

logger = logging.getLogger(__name__)

_NOTHING: Final = nullcontext()
#: The queues of waiting requests, in all supported versions.
_QUEUES: Final = ("waiting", "kv_holding_waiting", "skipped_waiting")


class Underway:
    """Steps that have been planned and have not come back. They come back in order; a step that raised never does."""

    def __init__(self) -> None:
        self._steps: deque[SchedulerOutput] = deque()

    def begin(self, step: SchedulerOutput) -> None:
        """It goes to the workers."""
        self._steps.append(step)

    def end(self, step: SchedulerOutput) -> None:
        """It has come back; earlier ones that have not are never coming."""
        while self._steps and self._steps.popleft() is not step:
            pass

    def __bool__(self) -> bool:
        """Whether there are any that have tokens."""
        return any(step.total_num_scheduled_tokens > 0 for step in self._steps)


class LossAware:
    """Goes in front of a vLLM scheduler class."""

    # What the base has.
    kv_cache_manager: Any
    sched_step_seq: int
    processed_step_seq: int
    running: list[Any]

    #: The newest generation of workers whose death this scheduler has seen to.
    _lost_epoch = 0
    #: Lost steps whose blocks have been given back before their (empty) output was seen.
    _steps_ahead = 0
    _quarantine: Quarantine | None = None
    #: A trial is over, and nothing may run until the steps that were planned before that have come back.
    _pausing = False
    _underway: Underway
    _trace_headers: TraceHeaders

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._underway = Underway()
        super().__init__(*args, **kwargs)

    def add_request(self, request: Any) -> Any:
        """See vLLM; its trace is noted, for the links of its steps."""
        self._trace_headers.note(request)
        return super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """See vLLM; a request that is on trial runs alone."""
        suspect = self._quarantine.on_trial if self._quarantine is not None else None
        held = suspect is not None or self._pausing
        with self._all_others_held(None if self._pausing else suspect) if held else _NOTHING:
            planned = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._underway.begin(planned)
        return planned

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """See vLLM; a lost step first puts all requests back to their beginning."""
        convicted = None
        self._underway.end(scheduler_output)
        if isinstance(model_runner_output, LostStepOutput):
            loss = model_runner_output.loss
            if loss.epoch > self._lost_epoch:
                self._lost_epoch = loss.epoch
                convicted = self._start_over(loss, scheduler_output)
            if self._steps_ahead and scheduler_output.total_num_scheduled_tokens > 0:
                self._steps_ahead -= 1
                self.processed_step_seq -= 1  # the base counts this step now
            model_runner_output = blank_output(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if convicted is not None:
            self._fail(convicted, outputs)
        elif self._pausing:
            self._end_pause()
        elif self._quarantine is not None and self._quarantine.on_trial is not None:
            self._follow_trial(self._quarantine)
        return outputs

    def _start_over(self, loss: Loss, scheduler_output: SchedulerOutput) -> str | None:
        """Forget everything that was computed. What was delivered stays delivered.

        Returns:
            the request that is convicted of having killed the workers, or None.
        """
        in_flight = self._in_flight(scheduler_output)
        self._pausing = False
        self._release_blocks()
        # Public, and made for this: all running requests are preempted, and what is in flight for them is dropped.
        if self.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is False:  # type: ignore[attr-defined]
            raise RuntimeError("the KV connector cannot forget what died with the workers")
        self.reset_encoder_cache()  # type: ignore[attr-defined]
        for request in self._requests().values():
            if hasattr(request, "async_tokens_to_discard"):  # before 0.28; what is in flight brings nothing to discard
                request.async_tokens_to_discard = 0
        loss.refresh(self)
        if self._quarantine is None:
            self._quarantine = Quarantine(loss.poison_crashes)
        on_trial = self._quarantine.on_trial
        cause = loss.cause() if on_trial is not None else None
        convicted = self._quarantine.died(in_flight, cause, loss.stormy)
        if self._quarantine.on_trial is not None and on_trial is None:
            logger.warning("the same requests were in flight at the last deaths; they are tried one by one")
        return convicted

    # -- poison requests --------------------------------------------------------------------------------------------

    def _in_flight(self, scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
        """Requests that the dead workers were computing, oldest first, with their number of output tokens."""
        scheduled = scheduler_output.num_scheduled_tokens
        return [
            (request.request_id, request.num_output_tokens)
            for request in self._requests().values()
            if request.request_id in scheduled or getattr(request, "num_in_flight_tokens", 0) > 0
        ]

    def _requests(self) -> dict[str, Any]:
        return getattr(self, "requests", {})

    @contextmanager
    def _all_others_held(self, suspect: str | None) -> Iterator[None]:
        """Keep all requests but one from being scheduled, or all of them.

        While one is on trial no other is running, see :meth:`_follow_trial`; so only waiting ones are held back.
        """
        held: list[tuple[Any, list[Any]]] = []
        running = self.running
        if suspect is None:
            self.running = []
        for name in _QUEUES:
            queue: Any = getattr(self, name, ())
            if others := [request for request in queue if request.request_id != suspect]:
                queue.remove_requests(others)
                held.append((queue, others))
        try:
            yield
        finally:
            if suspect is None:
                self.running = running
            for queue, others in held:
                for request in reversed(others):
                    queue.prepend_request(request)

    def _follow_trial(self, quarantine: Quarantine) -> None:
        """End the trial of a request that gets on, or is gone; the next one must find nobody running."""
        suspect = quarantine.on_trial
        assert suspect is not None
        request = self._requests().get(suspect)
        if request is None or request.is_finished():
            quarantine.forget(suspect)
            self._pausing = True
        elif quarantine.progressed(suspect, request.num_output_tokens):
            self._pausing = True
        if self._pausing:
            self._end_pause()
        if quarantine.on_trial is None:
            logger.warning("all suspects are cleared")

    def _end_pause(self) -> None:
        """Preempt who was on trial, unless a step is under way.

        Its token would be dropped by vLLM and sampled again, and the generator of a seeded request would have drawn
        once too often: its workers live. And if it kills them, the next one on trial must not be blamed for it.
        """
        if self._underway:
            return
        self._pausing = False
        if self.running:
            self.reset_prefix_cache(reset_running_requests=True)  # type: ignore[attr-defined]

    def _fail(self, request_id: str, outputs: dict[int, Any]) -> None:
        """End a request with an error, and tell its client."""
        request = self._requests().get(request_id)
        if request is None:
            return
        text = f"request {request_id} has killed its workers every time it was tried, at last all alone"
        logger.error("%s; it is failed, the others go on", text)
        self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=text,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    # -- what died with the workers ---------------------------------------------------------------------------------

    def _release_blocks(self) -> None:
        """Give back the blocks that something in the dead workers was still to happen to."""
        if getattr(self, "defer_block_free", False):
            # No step in flight writes any more. The base counts their outputs all the same when they come.
            self._steps_ahead = self.sched_step_seq - self.processed_step_seq
            self.processed_step_seq = self.sched_step_seq
            self._drain_deferred_frees()  # type: ignore[attr-defined]
        for request in list(self._requests().values()):
            if request.is_finished():  # its blocks were to be sent elsewhere first
                self._free_blocks(request)  # type: ignore[attr-defined]
            elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._give_up_load(request)
            elif request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                self._set_aside(request)
            elif request.status != RequestStatus.RUNNING and request.num_computed_tokens > 0:
                self.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
            if getattr(request, "num_stale_output_tokens", 0) > 0:
                request.drop_stale_output = True  # it was to be delivered, and is lost now

    def _give_up_load(self, request: Any) -> None:
        """An asynchronous load of a request's KV has died with its workers: compute it instead."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        for name in ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids"):
            getattr(self, name, set()).discard(request.request_id)
        getattr(self, "deferred_loads", {}).pop(request.request_id, None)  # since 0.33: one that has not begun
        for queue in (getattr(self, name, ()) for name in _QUEUES):
            if queue and request in queue:
                queue.remove_request(request)
        getattr(self, "deferred_waiting", set()).discard(request)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self._enqueue_waiting_request(request)  # type: ignore[attr-defined]

    # -- sessions with streaming input ------------------------------------------------------------------------------

    def _set_aside(self, request: Any) -> None:
        """A session that waits for its next input holds blocks of the dead workers, and counts by its tokens computed.

        The blocks go; the count is kept for the moment when the input comes.
        """
        if request.num_computed_tokens > 0 and not hasattr(request, "_computed_before_loss"):
            self.kv_cache_manager.free(request)
            request._computed_before_loss = request.num_computed_tokens
            request.num_computed_tokens = 0

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        computed = session.__dict__.pop("_computed_before_loss", None)
        if computed is not None:
            session.num_computed_tokens = computed
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        if computed is not None:
            session.num_computed_tokens = 0


@functools.cache
def loss_aware(base: type, trace_headers: TraceHeaders) -> type:
    """The subclass of a scheduler class that survives the loss of its workers.

    Args:
        base: the class.
        trace_headers: is told of each request.
    """
    bases = (base,) if issubclass(base, LossAware) else (LossAware, base)
    members = {"__module__": __name__, "__doc__": base.__doc__, "_trace_headers": trace_headers}
    return type(f"LossAware{base.__name__}", bases, members)


def full_data(scheduler: Any, request_id: str, data: Any) -> Any:
    """A request's data with all of its multimodal inputs: those covered by a cache hit were not sent."""
    request = getattr(scheduler, "requests", {}).get(request_id)
    if request is None or not getattr(request, "mm_features", None):
        return data
    return replace(data, mm_features=list(request.mm_features))
