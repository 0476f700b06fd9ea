"""Whatever happens to steps and requests, each request gets its tokens once and in order, within all limits."""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilient_executor import Cause, CauseKind
from resilient_executor.reference import (
    FinishReason,
    InvalidConfiguration,
    ModelOutput,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    TokenEvent,
)
from resilient_executor.reference.blocks import BlockPool
from resilient_executor.reference.errors import CacheExhausted
from resilient_executor.reference.messages import BLOCK_TOKENS, blocks_for

EOS = 1


def next_token(tokens: tuple[int, ...]) -> int:
    """Stands for the model: a token that depends on all tokens before it; one in 29 ends the text."""
    return 1 + zlib.crc32(repr(tokens).encode()) % 29


def continuation(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return list(tokens[len(prompt) :])


@dataclass
class Workers:
    """Stands for the workers: remembers which tokens are in which cache slot, and reads them from there."""

    slots: dict[int, int] = field(default_factory=dict)

    def run(self, step: SchedulerOutput) -> ModelOutput:
        owners: dict[int, str] = {}
        drawn: dict[str, int] = {}
        for request in step.requests:
            for block in request.blocks:
                assert owners.setdefault(block, request.request_id) == request.request_id, "two owners of a block"
            end = request.start + len(request.token_ids)
            slots = [request.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(end)]
            self.slots.update(zip(slots[request.start :], request.token_ids, strict=True))
            if request.draw is not None:
                drawn[request.request_id] = next_token(tuple(self.slots[slot] for slot in slots))
        return ModelOutput(step.step_id, drawn)


#: A death of the process's own doing: whoever is alone in flight then is guilty.
SEGFAULT = Cause(CauseKind.PROCESS_EXIT, signal=11)


def make(
    capacity: int = 128, batch: int = 32, requests: int = 4, length: int = 64, steps: int = 1, crashes: int = 2
) -> Scheduler:
    return Scheduler(SchedulerConfig(capacity, batch, requests, length, steps, (EOS,), crashes))


def request(name: str, prompt: int | tuple[int, ...] = 5, max_tokens: int = 4, ignore_eos: bool = True) -> Request:
    tokens = tuple(range(2, 2 + prompt)) if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos), seed=0)


class SchedulerMachine(RuleBasedStateMachine):
    """Random additions, aborts, results, failures and losses; a real cache layout behind the scheduler."""

    @initialize(blocks=st.integers(4, 8), batch=st.integers(1, 48), requests=st.integers(1, 5), steps=st.integers(1, 3))
    def start(self, blocks: int, batch: int, requests: int, steps: int) -> None:
        self.config = SchedulerConfig(blocks * BLOCK_TOKENS, batch, requests, 60, steps, (EOS,))
        self.scheduler = Scheduler(self.config)
        self.workers = Workers()
        self.in_flight: deque[SchedulerOutput] = deque()
        self.live: dict[str, Request] = {}
        self.received: dict[str, list[int]] = {}
        self.count = 0

    @rule(length=st.integers(1, 59), max_tokens=st.integers(1, 40), ignore_eos=st.booleans(), salt=st.integers(2, 99))
    def add(self, length: int, max_tokens: int, ignore_eos: bool, salt: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        new = request(name, tuple((salt * i) % 97 + 2 for i in range(length)), max_tokens, ignore_eos)
        self.live[name] = new
        self.received[name] = []
        self.scheduler.add(new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        del self.live[name]

    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        if not step.requests:
            return
        assert step.num_tokens <= self.config.max_batch_tokens
        busy = {r.request_id for other in self.in_flight for r in other.requests}
        for scheduled in step.requests:
            assert scheduled.request_id not in busy, "in two steps at once"
            assert scheduled.request_id in self.live
        self.in_flight.append(step)
        assert len(self.in_flight) <= self.config.max_concurrent_steps

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self) -> None:
        step = self.in_flight.popleft()
        for event in self.scheduler.update(step, self.workers.run(step)):
            self.receive(event)

    @rule(rounds=st.integers(2, 12))
    def serve(self, rounds: int) -> None:
        for _ in range(rounds):
            self.schedule()
            if self.in_flight:
                self.complete()
            self.limits_hold()

    def receive(self, event: TokenEvent) -> None:
        wanted = self.live[event.request_id]
        tokens = self.received[event.request_id]
        assert event.index == len(tokens)
        assert event.token_id is not None
        tokens.append(event.token_id)
        assert tokens == continuation(wanted.prompt, len(tokens))
        stopped = event.token_id == EOS and not wanted.params.ignore_eos
        full = len(tokens) == wanted.params.max_tokens or len(wanted.prompt) + len(tokens) == self.config.max_model_len
        expected = FinishReason.STOP if stopped else FinishReason.LENGTH if full else None
        assert event.finish_reason == expected
        if expected is not None:
            del self.live[event.request_id]

    @precondition(lambda self: self.in_flight)
    @rule()
    def worker_raises(self) -> None:
        step = self.in_flight.popleft()
        failed = self.scheduler.fail(step)
        assert failed == [r.request_id for r in step.requests if r.request_id in self.live]
        for name in failed:
            del self.live[name]

    @rule(salt=st.integers(2, 99))
    def crowd(self, salt: int) -> None:
        """Requests that fit the cache together at first and outgrow it."""
        for offset in range(3):
            self.add(22, 38, True, salt + offset)

    @rule(times=st.integers(2, 5))
    def workers_die_at_every_step(self, times: int) -> None:
        for _ in range(times):
            self.schedule()
            self.workers_die(refused=False)

    @rule(refused=st.booleans())
    def workers_die(self, refused: bool) -> None:
        lost = list(self.in_flight)
        step = self.scheduler.schedule() if refused else None
        self.in_flight.clear()
        self.workers = Workers()
        name = self.scheduler.recompute_all(step if step and step.requests else None, cause=SEGFAULT)
        if name is not None:
            assert [r.request_id for s in lost for r in s.requests] == [name], "only a request that ran alone"
            del self.live[name]
        if lost:
            with pytest.raises(ValueError, match="not the oldest step"):
                self.scheduler.fail(lost[0])

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler._running
        held = [block for r in running for block in r.blocks]
        assert len(held) == len(set(held))
        assert len(held) + self.scheduler._pool.num_free == self.config.kv_capacity_tokens // BLOCK_TOKENS
        assert len(running) <= self.config.max_num_requests
        for served in (running, self.scheduler._waiting):
            arrivals = [r.arrival for r in served]
            assert arrivals == sorted(arrivals), "served in order of arrival"
        assert self.scheduler.num_live == len(self.live)

    def teardown(self) -> None:
        """Without further faults everything ends, in a bounded number of steps."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100 + 200 * len(self.live)):
            self.serve(1)
        assert not self.live
        assert self.scheduler._pool.num_free == self.config.kv_capacity_tokens // BLOCK_TOKENS


TestSchedulerMachine = SchedulerMachine.TestCase
# Shrinking takes minutes here, longer than the test's timeout: add Phase.shrink to study a failure.
TestSchedulerMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


def test_long_prompts_run_in_chunks_beside_running_requests() -> None:
    scheduler, workers = make(batch=16), Workers()
    scheduler.add(request("short", prompt=3, max_tokens=9))
    first = scheduler.schedule()
    scheduler.update(first, workers.run(first))
    scheduler.add(request("long", prompt=40))
    shapes = []
    for _ in range(3):
        step = scheduler.schedule()
        shapes.append([(r.request_id, len(r.token_ids), r.draw is not None) for r in step.requests])
        scheduler.update(step, workers.run(step))
    assert shapes == [
        [("short", 1, True), ("long", 15, False)],
        [("short", 1, True), ("long", 15, False)],
        [("short", 1, True), ("long", 10, True)],
    ]


def test_steps_in_flight_share_the_requests() -> None:
    scheduler = make(steps=2, requests=8, capacity=512)
    for name in "abcd":
        scheduler.add(request(name))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [[r.request_id for r in step.requests] for step in steps] == [["a", "b"], ["c", "d"], []]


def test_the_newest_request_gives_way_when_the_cache_is_full() -> None:
    scheduler, workers = make(capacity=64, length=64, batch=64), Workers()
    scheduler.add(request("old", prompt=31, max_tokens=20))
    scheduler.add(request("new", prompt=31, max_tokens=20))
    events: list[TokenEvent] = []
    released: list[str] = []
    while scheduler.num_live:
        step = scheduler.schedule()
        released += step.released
        events += scheduler.update(step, workers.run(step))
    assert released[0] == "new", "preempted; the old one has priority"
    for name in ("old", "new"):
        tokens = [event.token_id for event in events if event.request_id == name]
        assert tokens == continuation(tuple(range(2, 33)), 20)


def test_lost_steps_send_everything_again_from_the_first_token() -> None:
    scheduler, workers = make(), Workers()
    scheduler.add(request("a", max_tokens=5))
    for _ in range(2):
        step = scheduler.schedule()
        scheduler.update(step, workers.run(step))
    lost = scheduler.schedule()
    assert scheduler.recompute_all() is None
    again = scheduler.schedule()
    assert again.step_id == lost.step_id + 1
    (sent,) = again.requests
    assert (sent.start, len(sent.token_ids)) == (0, 7)
    assert sent.draw is not None
    assert sent.draw.index == 2


def test_a_request_that_kills_its_workers_is_singled_out() -> None:
    scheduler, workers = make(), Workers()
    for name in ("good", "poison", "fine"):
        scheduler.add(request(name, max_tokens=3))
    given_up: list[str] = []
    finished: list[str] = []
    for _ in range(50):
        if not scheduler.num_live:
            break
        step = scheduler.schedule()
        if any(r.request_id == "poison" for r in step.requests):
            poison = scheduler.recompute_all(cause=SEGFAULT)
            given_up += [] if poison is None else [poison]
            workers = Workers()
        else:
            finished += [e.request_id for e in scheduler.update(step, workers.run(step)) if e.finish_reason]
    assert given_up == ["poison"]
    assert sorted(finished) == ["fine", "good"]


def test_refused_steps_blame_nobody() -> None:
    scheduler, workers = make(), Workers()
    scheduler.add(request("a"))
    for _ in range(10):
        assert scheduler.recompute_all(refused=scheduler.schedule()) is None
    step = scheduler.schedule()
    assert len(scheduler.update(step, workers.run(step))) == 1


def test_results_must_fit_their_step() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    step = scheduler.schedule()
    for wrong in (ModelOutput(step.step_id + 1, {"a": 3}), ModelOutput(step.step_id, {}), ModelOutput(0, {"b": 3})):
        with pytest.raises(ValueError, match="the result is of step"):
            scheduler.update(step, wrong)
    assert len(scheduler.update(step, ModelOutput(step.step_id, {"a": 3}))) == 1


def test_an_id_is_free_again_when_its_aborted_request_has_come_back() -> None:
    scheduler, workers = make(), Workers()
    scheduler.add(request("a"))
    step = scheduler.schedule()
    scheduler.abort("a")
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request("a"))
    assert scheduler.update(step, workers.run(step)) == []
    scheduler.add(request("a"))


@pytest.mark.parametrize(
    "limit",
    [
        {"kv_capacity_tokens": 63},
        {"max_batch_tokens": 0},
        {"max_num_requests": 0},
        {"max_model_len": 1},
        {"max_concurrent_steps": 0},
        {"poison_crashes": -1},
    ],
)
def test_impossible_limits_are_refused(limit: dict[str, Any]) -> None:
    good = SchedulerConfig(kv_capacity_tokens=64, max_batch_tokens=8, max_num_requests=1, max_model_len=64)
    with pytest.raises(InvalidConfiguration, match=str(*limit.values())):
        dataclasses.replace(good, **limit)


def test_the_pool_never_hands_out_more_than_it_has() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    with pytest.raises(CacheExhausted, match="2 cache blocks wanted, 1 of 3 free"):
        pool.allocate(2)
    pool.free(taken)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert blocks_for(BLOCK_TOKENS + 1) == 2
