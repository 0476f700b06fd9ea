"""The request ledger against a model: workers that remember what they were told, and forget it when they die."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilient_executor.vllm.ledger import RequestLedger


def test_what_was_sent_once_is_sent_again_to_new_workers() -> None:
    ledger: RequestLedger[str] = RequestLedger()
    assert ledger.plan(finished=[], new={"a": "A", "b": "B"}, cached=[]) == []
    assert ledger.plan(finished=[], new={}, cached=["a", "b"]) == []
    ledger.lost()
    assert ledger.plan(finished=[], new={}, cached=["b", "a"]) == ["B", "A"]
    assert ledger.plan(finished=[], new={}, cached=["b", "a"]) == []


def test_an_id_may_end_and_begin_in_one_step() -> None:
    ledger: RequestLedger[str] = RequestLedger()
    ledger.plan(finished=[], new={"a": "first"}, cached=[])
    ledger.plan(finished=["a"], new={"a": "second"}, cached=[])
    ledger.lost()
    assert ledger.plan(finished=[], new={}, cached=["a"]) == ["second"]


def test_finished_requests_are_dropped() -> None:
    ledger: RequestLedger[str] = RequestLedger()
    ledger.plan(finished=[], new={"a": "A"}, cached=[])
    ledger.plan(finished=["a"], new={}, cached=[])
    ledger.amend("a", "too late")
    assert len(ledger) == 0
    assert ledger.get("a") is None


class Engine(RuleBasedStateMachine):
    """Requests come, run and go; workers die; whatever runs must be known to the workers that run it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: RequestLedger[int] = RequestLedger()
        self.live: dict[str, int] = {}
        self.workers: dict[str, int] = {}
        self.finished: set[str] = set()
        self.count = 0

    @rule(data=st.data(), arrivals=st.integers(0, 3))
    def step(self, data: st.DataObject, arrivals: int) -> None:
        scheduled = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True)) if self.live else []
        new = {}
        for _ in range(arrivals):
            self.count += 1
            new[f"r{self.count % 7}"] = self.count
        new = {name: number for name, number in new.items() if name not in self.live}
        admitted = self.ledger.plan(finished=self.finished, new=new, cached=scheduled)
        for name in self.finished:
            self.workers.pop(name, None)
        self.finished = set()
        self.live |= new
        self.workers |= new
        names = {number: name for name, number in self.live.items()}
        self.workers |= {names[number]: number for number in admitted}
        for name in scheduled:
            assert self.workers[name] == self.live[name]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[name]
            self.finished.add(name)

    @rule()
    def die(self) -> None:
        self.workers.clear()
        self.ledger.lost()

    @invariant()
    def nothing_is_kept_for_ever(self) -> None:
        assert len(self.ledger) == len(self.live) + len(self.finished - set(self.live))


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
