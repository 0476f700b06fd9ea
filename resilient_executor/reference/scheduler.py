"""Continuous batching: which tokens of which requests run in the next step. Pure: no clock, no Ray, no torch.

Rules:

* Requests are served in order of arrival. Running requests go first; then waiting ones are admitted.
* A long prompt is run in chunks, so that a step never has more than ``max_batch_tokens`` tokens.
* A request is in at most one step in flight. With several steps in flight (PP) each step takes its share of the
  requests, so that every stage has work.
* The KV cache is never over-committed. When a running request needs a block and none is free, the newest request that
  is not in flight gives up its blocks and is recomputed later. The oldest request can always go on, so all finish.
* After a lost step (``recompute_all``) every live request starts over from its prompt and the tokens it has generated:
  fresh workers need to know nothing else.
* Requests whose steps are lost repeatedly are tried apart, one at a time and all alone (see ``poison.py``); one that
  takes its workers along even then is given up as poison, and the others go on.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient_executor.poison import Quarantine
from resilient_executor.reference.blocks import BlockPool
from resilient_executor.reference.errors import InvalidConfiguration
from resilient_executor.reference.messages import (
    BLOCK_TOKENS,
    ModelOutput,
    ScheduledRequest,
    SchedulerOutput,
    blocks_for,
)
from resilient_executor.reference.request import FinishReason, Request, TokenEvent

if TYPE_CHECKING:
    from resilient_executor.supervisor.incidents import Cause


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        kv_capacity_tokens: tokens that the workers' KV cache holds.
        max_batch_tokens: most tokens in a step.
        max_num_requests: most requests that hold cache blocks at the same time.
        max_model_len: most tokens of a request, prompt and output together.
        max_concurrent_steps: most steps in flight; the number of PP stages keeps all of them busy.
        eos_token_ids: tokens that end an output, unless the request ignores them.
        poison_crashes: deaths of workers in a row, without a token in between, after which the requests that were in
            flight are tried apart; 0 never suspects anybody.

    Raises:
        InvalidConfiguration: a limit is too small to make progress.
    """

    kv_capacity_tokens: int
    max_batch_tokens: int
    max_num_requests: int
    max_model_len: int
    max_concurrent_steps: int = 1
    eos_token_ids: Collection[int] = ()
    poison_crashes: int = 2

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_num_requests", "max_concurrent_steps"):
            if getattr(self, name) < 1:
                raise InvalidConfiguration(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len < 2:
            raise InvalidConfiguration(f"max_model_len is {self.max_model_len}; it must be at least 2")
        if self.poison_crashes < 0:
            raise InvalidConfiguration(f"poison_crashes is {self.poison_crashes}; it must be at least 0")
        if blocks_for(self.max_model_len) > self.kv_capacity_tokens // BLOCK_TOKENS:
            raise InvalidConfiguration(
                f"the KV cache holds {self.kv_capacity_tokens} tokens in blocks of {BLOCK_TOKENS}, too few for one "
                f"request of max_model_len {self.max_model_len}; lower max_model_len or give the workers a larger cache"
            )


class Scheduler:
    """See the module's text. Not thread-safe; one caller."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.kv_capacity_tokens // BLOCK_TOKENS)
        self._requests: dict[str, Request] = {}  # every live request
        self._waiting: list[Request] = []  # in order of arrival; hold no blocks
        self._running: list[Request] = []  # in order of arrival
        self._in_flight: deque[SchedulerOutput] = deque()
        self._released: list[str] = []
        self._quarantine = Quarantine(config.poison_crashes)
        self._next_step = 0
        self._next_arrival = 0

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps that have been scheduled and not been settled."""
        return len(self._in_flight)

    def request(self, request_id: str) -> Request | None:
        """The record of a live request."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            ValueError: its id is in use, perhaps by an aborted request that is still in flight.
        """
        if any(request.request_id == r.request_id for r in (*self._running, *self._waiting)):
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.arrival = self._next_arrival
        self._next_arrival += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request; what a step in flight brings for it is thrown away. False when it is not live."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.aborted = True
        self._quarantine.forget(request_id)
        if request in self._waiting:
            self._waiting.remove(request)
        elif not request.in_flight:  # otherwise its blocks are in use until the step is settled
            self._leave(request)
        return True

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and count it as in flight; one without requests is not counted, and not to be run."""
        scheduled: list[ScheduledRequest] = []
        if len(self._in_flight) < self.config.max_concurrent_steps:
            suspect = self.on_trial
            if suspect is None:
                self._schedule_running(scheduled)
                self._schedule_waiting(scheduled)
            elif not self._in_flight:
                self._schedule_alone(suspect, scheduled)
        output = SchedulerOutput(self._next_step, tuple(scheduled), tuple(self._released) if scheduled else ())
        if scheduled:
            self._next_step += 1
            self._released.clear()
            self._in_flight.append(output)
        return output

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[TokenEvent]:
        """Settle the oldest step in flight with its result.

        Returns:
            One event a generated token, in the step's order, without text.

        Raises:
            ValueError: ``output`` is not the oldest step in flight, or ``result`` does not fit it. Nothing was changed.
        """
        drawn = {scheduled.request_id for scheduled in output.requests if scheduled.draw is not None}
        if result.step_id != output.step_id or result.tokens.keys() != drawn:
            raise ValueError(
                f"step {output.step_id} draws tokens for {sorted(drawn)}, but the result is of step {result.step_id} "
                f"and has tokens for {sorted(result.tokens)}"
            )
        events: list[TokenEvent] = []
        for scheduled, request in self._settle(output):
            request.num_computed = scheduled.start + len(scheduled.token_ids)
            if request.aborted:
                self._leave(request)
            elif scheduled.draw is not None:
                events.append(self._append(request, result.tokens[request.request_id]))
        return events

    def fail(self, output: SchedulerOutput) -> list[str]:
        """Settle the oldest step in flight as failed with an exception of the worker: its requests end.

        Returns:
            The ids of the requests that ended by it.

        Raises:
            ValueError: ``output`` is not the oldest step in flight.
        """
        failed = []
        for _, request in self._settle(output):
            self._leave(request)
            self._quarantine.forget(request.request_id)
            if self._requests.pop(request.request_id, None) is request:
                failed.append(request.request_id)
        return failed

    @property
    def on_trial(self) -> Request | None:
        """The request that runs alone, because its workers may have died of it; or None."""
        name = self._quarantine.on_trial
        return None if name is None else self._requests[name]  # those that end are forgotten

    def recompute_all(
        self, refused: SchedulerOutput | None = None, cause: Cause | None = None, stormy: bool = False
    ) -> str | None:
        """Settle all steps in flight as lost: every live request waits again, to be computed from its first token.

        Args:
            refused: a step in flight that the workers never saw, so that its requests are not to blame.
            cause: what the workers died of, as far as it is known; it matters while a request is on trial.
            stormy: workers had died in the rebuild before, too.

        Returns:
            The id of the request that was given up as poison, or None.
        """
        # Several steps may have been in the pipeline; each of them may be the one that took the workers down.
        lost = {scheduled.request_id for step in self._in_flight if step is not refused for scheduled in step.requests}
        blamed = [(r.request_id, len(r.output)) for r in self._by_arrival() if r.request_id in lost]
        poison = self._quarantine.died(blamed, cause, stormy) if blamed else None
        if poison is not None:
            del self._requests[poison]
        again = [request for request in self._running if request.request_id in self._requests]
        for request in self._running:
            self._pool.free(request.blocks)
            request.blocks = []
            request.num_computed = 0
            request.in_flight = False
        for request in again:
            _insert(self._waiting, request)
        self._running.clear()
        self._in_flight.clear()
        self._released.clear()  # the new workers' caches are empty
        return poison

    def end_all(self) -> list[str]:
        """Drop everything; returns the ids of the requests that were live."""
        ended = [request.request_id for request in self._by_arrival()]
        self._requests.clear()
        self._waiting.clear()
        self._quarantine.acquit_all()
        self.recompute_all()
        return ended

    # --- Choosing ---------------------------------------------------------------------------------------------------

    def _by_arrival(self) -> list[Request]:
        return [*(r for r in self._running if not r.aborted), *self._waiting]

    def _share(self) -> int:
        """Most requests in one step, so that the other steps in flight get some as well."""
        eligible = min(self.num_live, self.config.max_num_requests)
        return max(1, -(-eligible // self.config.max_concurrent_steps))

    def _schedule_running(self, scheduled: list[ScheduledRequest]) -> None:
        budget = self.config.max_batch_tokens
        for request in list(self._running):
            if budget == 0 or len(scheduled) == self._share():
                return
            if request.in_flight or request.aborted or request not in self._running:  # preempted in this loop
                continue
            count = min(request.num_pending, budget)
            if self._make_room(request, count):
                scheduled.append(self._place(request, count))
                budget -= count

    def _schedule_waiting(self, scheduled: list[ScheduledRequest]) -> None:
        budget = self.config.max_batch_tokens - sum(len(s.token_ids) for s in scheduled)
        while self._waiting and budget and len(scheduled) < self._share():
            request = self._waiting[0]
            # Room for all its tokens and the next one: admitted for a first chunk only, it would soon be preempted.
            fits = blocks_for(request.num_tokens + 1) <= self._pool.num_free
            if not fits or len(self._running) >= self.config.max_num_requests:
                return
            self._waiting.remove(request)
            _insert(self._running, request)
            count = min(request.num_pending, budget)
            self._make_room(request, count)
            scheduled.append(self._place(request, count))
            budget -= count

    def _schedule_alone(self, suspect: Request, scheduled: list[ScheduledRequest]) -> None:
        """Run ``suspect`` with nothing beside it; older ones that hold blocks keep them unless they are needed."""
        if suspect in self._waiting:
            self._waiting.remove(suspect)
            _insert(self._running, suspect)
        count = min(suspect.num_pending, self.config.max_batch_tokens)
        if self._make_room(suspect, count):
            scheduled.append(self._place(suspect, count))

    def _make_room(self, request: Request, count: int) -> bool:
        """Give ``request`` the blocks for ``count`` more tokens, preempting others, the newest first, where needed.

        Requests in flight, and those placed in the step that is being put together, keep theirs. False when it cannot
        be done now.
        """
        missing = blocks_for(request.num_computed + count) - len(request.blocks)
        while missing > self._pool.num_free:
            victims = [other for other in self._running if not (other.in_flight or other.aborted or other is request)]
            if not victims:
                return False
            self._preempt(victims[-1])
        request.blocks += self._pool.allocate(max(0, missing))
        return True

    def _place(self, request: Request, count: int) -> ScheduledRequest:
        request.in_flight = True
        draw = request.draw() if count == request.num_pending else None
        return ScheduledRequest(
            request.request_id, request.next_tokens(count), request.num_computed, tuple(request.blocks), draw
        )

    # --- Settling ---------------------------------------------------------------------------------------------------

    def _settle(self, output: SchedulerOutput) -> list[tuple[ScheduledRequest, Request]]:
        if not self._in_flight or self._in_flight[0] is not output:
            oldest = self._in_flight[0].step_id if self._in_flight else None
            raise ValueError(
                f"step {output.step_id} is not the oldest step in flight ({oldest}); it may have been lost"
            )
        self._in_flight.popleft()
        running = {request.request_id: request for request in self._running if request.in_flight}
        pairs = [(scheduled, running[scheduled.request_id]) for scheduled in output.requests]
        for _, request in pairs:
            request.in_flight = False
        return pairs

    def _append(self, request: Request, token: int) -> TokenEvent:
        request.output.append(token)
        # A new token is progress; tokens that were only run again are not.
        self._quarantine.progressed(request.request_id, len(request.output))
        reason: FinishReason | None = None
        ends_text = token in self.config.eos_token_ids and not request.params.ignore_eos
        if ends_text or token in request.params.stop_token_ids:
            reason = FinishReason.STOP
        elif len(request.output) >= request.params.max_tokens or request.num_tokens >= self.config.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._leave(request)
            self._quarantine.forget(request.request_id)
            del self._requests[request.request_id]
        return TokenEvent(request.request_id, len(request.output) - 1, token, finish_reason=reason)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again, in its place by arrival."""
        self._leave(request)
        request.num_computed = 0
        _insert(self._waiting, request)

    def _leave(self, request: Request) -> None:
        """Take ``request`` out of the running ones and its blocks back."""
        self._running.remove(request)
        self._pool.free(request.blocks)
        request.blocks = []
        self._released.append(request.request_id)


def _insert(queue: list[Request], request: Request) -> None:
    bisect.insort(queue, request, key=lambda other: other.arrival)
