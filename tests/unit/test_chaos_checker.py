"""The judge finds every planted error in a clean history."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.chaos.checker import REBUILD, check
from resilient_executor.chaos.control import Strike
from resilient_executor.chaos.faults import Fault, Kind, Target, mark
from resilient_executor.chaos.recorder import Line, Recorder, read

TOKENS = {"0": [5, 6, 7, 7, 9], "1": [1, 1, 1]}
PHASES = ("fence", "tear_down", "place", "spawn", "rank", "initialise", "load", "replay", "compile", "warm_up")


def clean() -> list[Line]:
    """Two requests, one of them under a kill; each line as the recorder writes it."""
    lines: list[Line] = []

    def note(when_s: float, kind: str, /, **fields: Any) -> None:
        lines.append({"n": len(lines), "t": 1000.0 + when_s, "kind": kind, **fields})

    note(0, "run", seed=1)
    note(0, "holdings", when="before", things={"process": ["a"], "port": []}, rss_mb=90.0, epoch=0)
    for workload, tokens in TOKENS.items():
        note(1, "oracle", workload=workload, tokens=tokens, finish="length")
    note(1, "state", state="HEALTHY", epoch=1, phase="")
    note(2, "request", id="r0", workload="0")
    note(2, "request", id="r1", workload="1")
    note(2, "token", id="r0", index=0, token=5)
    note(2, "token", id="r1", index=0, token=1)
    note(2.5, "health", began=1002.4, ok=True, why="")
    fault = Fault(Kind.KILL, Target(rank=1))
    note(
        3, "fault", number=0, at=1003.0, fault=fault.to_json(), text="kill", felt=True, expect="survives", detect_s=2.0
    )
    note(3.1, "state", state="RECOVERING", epoch=1, phase="")
    note(3.1, "incident", number=1, epoch=1, detected_at=1003.1)
    for phase in PHASES:
        note(4, "phase", phase=phase, epoch=2, duration_s=0.1, error="")
    note(5, "health", began=1004.8, ok=False, why="recovering")
    note(6, "state", state="HEALTHY", epoch=2, phase="")
    note(6, "resolved", number=1, outcome="recovered", cause="rank 1", cause_kind="process_exit", duration_s=3.0)
    note(6, "retry", lost_steps=1)
    for index in (1, 2, 3, 4):
        note(7, "token", id="r0", index=index, token=TOKENS["0"][index])
    note(7, "end", id="r0", finish="length", error="")
    for index in (1, 2):
        note(7, "token", id="r1", index=index, token=1)
    note(7, "end", id="r1", finish="length", error="")
    note(8, "state", state="STOPPED", epoch=2, phase="")
    note(9, "holdings", when="after", things={"process": [], "port": []}, rss_mb=95.0, epoch=2)
    note(9, "stop")
    return lines


#: Lines that say no more than others do: a history without one of them is as good.
SPARE = {"health", "retry"}
LINES = range(len(clean()))
WEIGHTY = [n for n in LINES if clean()[n]["kind"] not in SPARE and clean()[n].get("phase", "") in {"", *REBUILD}]


def renumbered(lines: list[Line]) -> list[Line]:
    return [{**line, "n": number} for number, line in enumerate(lines)]


def test_a_clean_history_is_clean() -> None:
    verdict = check(clean())
    assert verdict.problems == []
    assert (verdict.requests, verdict.tokens, verdict.survived) == (2, 8, 1)
    [fault] = verdict.faults
    assert fault.felt
    assert fault.detection_s == pytest.approx(0.1)
    assert fault.outage_s == pytest.approx(3.0)
    assert set(fault.phases) == set(PHASES)


@given(st.sampled_from(LINES))
def test_a_line_that_is_missing_is_found_by_its_number(number: int) -> None:
    lines = clean()
    assert check(lines[:number] + lines[number + 1 :]).problems


@given(st.sampled_from(WEIGHTY))
def test_what_was_never_written_is_missed(number: int) -> None:
    lines = clean()
    assert check(renumbered(lines[:number] + lines[number + 1 :])).problems, lines[number]


@given(st.sampled_from([n for n in WEIGHTY if clean()[n]["kind"] != "phase"]), st.data())
def test_what_was_written_twice_is_found(number: int, data: st.DataObject) -> None:
    lines = clean()
    place = data.draw(st.integers(number, len(lines)))
    assert check(renumbered([*lines[:place], lines[number], *lines[place:]])).problems, lines[number]


@given(st.sampled_from([n for n in LINES if clean()[n]["kind"] == "token"]), st.integers(0, 2048))
def test_another_token_is_found(number: int, token: int) -> None:
    lines = clean()
    if lines[number]["token"] != token:
        lines[number]["token"] = token
        verdict = check(lines)
        assert verdict.problems
        assert verdict.tokens_changed + verdict.tokens_lost + verdict.tokens_repeated >= 1


@given(st.data())
def test_two_tokens_of_a_request_in_the_wrong_order_are_found(data: st.DataObject) -> None:
    lines = clean()
    mine = [n for n in LINES if lines[n]["kind"] == "token" and lines[n]["id"] == "r0"]
    one, other = data.draw(st.lists(st.sampled_from(mine), min_size=2, max_size=2, unique=True))
    lines[one], lines[other] = lines[other], lines[one]
    assert check(renumbered(lines)).problems


def changed(kind: str, nth: int = 0, **fields: Any) -> list[Line]:
    lines = copy.deepcopy(clean())
    [line for line in lines if line["kind"] == kind][nth].update(fields)
    return lines


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (changed("end", finish="abort"), "ended with 'abort'"),
        (changed("end", error="ValueError: no"), "failed: ValueError"),
        (changed("end", error=f"{mark(0)} raised", finish="error"), "failed"),  # a kill fails no request
        (changed("resolved", outcome="failed"), "ended with failed"),
        (changed("state", 1, state="SUSPECT"), "RECOVERING 0 times"),
        (changed("state", 2, epoch=0), "epoch 0 came after"),
        (changed("state", 2, state="FAILED"), "it FAILED"),
        (changed("incident", detected_at=1005.9), "noticed after 2.9 s"),
        (changed("fault", at=1003.9), "no cause among the faults"),
        (changed("health", 1, ok=True, why=""), "all was well in a rebuild"),
        (changed("holdings", 1, things={"process": ["a", "worker"]}), "left behind: process: worker"),
        (changed("holdings", 1, things={"shared memory": ["sem.x"]}), "left behind: shared memory"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(history: list[Line], words: str) -> None:
    assert any(words in problem for problem in check(history).problems), check(history).problems


def test_a_request_may_end_with_its_own_faults_error_only() -> None:
    """What it had got until then must be right all the same."""
    fault = {"number": 1, "at": 1006.5, "text": "raise", "felt": None, "expect": "fails", "detect_s": 15.0}
    lines = clean()
    place = next(n for n in LINES if lines[n]["kind"] == "retry")
    lines.insert(place, {"n": 0, "t": 1006.5, "kind": "fault", "fault": Fault(Kind.RAISE).to_json(), **fault})
    end = next(line for line in lines if line["kind"] == "end")
    end.update(finish="error", error=f"request r0 failed: InjectedError: {mark(1)} raised")
    lines = [line for line in lines if not (line["kind"] == "token" and line["id"] == "r0" and line["index"] == 4)]
    assert check(renumbered(lines)).problems == []
    end["error"] = f"{mark(11)} raised"
    assert check(renumbered(lines)).problems
    end["error"] = f"{mark(1)} raised"
    next(line for line in lines if line["kind"] == "token")["token"] = 4
    assert check(renumbered(lines)).tokens_changed == 1


def test_memory_that_grows_is_a_leak() -> None:
    lines = clean()
    looks = [
        {"n": 0, "t": 1002.0 + n, "kind": "holdings", "when": "during", "things": {}, "rss_mb": mb, "epoch": 1 + n}
        for n, mb in enumerate((100.0, 150.0))
    ]
    end = next(n for n in LINES if lines[n]["kind"] == "retry")
    assert "memory" in check(renumbered([*lines[:end], *looks, *lines[end:]])).leaks[0]


def test_a_call_that_a_fault_had_fail_is_answered_once() -> None:
    lines = clean()
    place = next(n for n in LINES if lines[n]["kind"] == "retry")
    fault = {"number": 1, "at": 1006.2, "text": "rpc", "felt": False, "expect": "survives", "detect_s": 0.0}
    strike = {"t": 1006.2, "kind": "fault", "fault": Fault(Kind.RAISE_IN_RPC).to_json(), **fault}
    answer = {"t": 1006.3, "kind": "rpc", "error": f"InjectedError: {mark(1)} raised"}

    def with_answers(*answers: Line) -> list[str]:
        return check(renumbered([*lines[:place], strike, *answers, *lines[place:]])).problems

    assert with_answers(answer) == []
    assert with_answers()
    assert with_answers(answer, answer)
    assert with_answers({**answer, "error": "TypeError"})


def test_a_recorder_writes_what_the_judge_reads(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new" / "history.jsonl")
    recorder.note("run", seed=1)
    recorder.on_strike(Strike(0, Fault(Kind.STOP, duration_s=2.0), 1.0, 1, (1,), ("rank 1 (pid 7)",)))
    recorder.close()
    recorder.close()
    recorder.note("late")
    lines = read(recorder.path)
    assert [line["kind"] for line in lines] == ["run", "fault", "stop"]
    assert Fault.from_json(lines[1]["fault"]) == Fault(Kind.STOP, duration_s=2.0)
    with recorder.path.open("a") as file:
        file.write('{"cut')
    assert read(recorder.path) == lines


def emits_again(events: list[Any]) -> list[Any]:
    return [*events, dataclasses.replace(events[0], finish_reason=None)] if events else events


def loses(events: list[Any]) -> list[Any]:
    return [event for event in events if event.index != 3]


def renumbers(events: list[Any]) -> list[Any]:
    return [dataclasses.replace(event, index=0) for event in events]


def changes(events: list[Any]) -> list[Any]:
    return [dataclasses.replace(e, token_id=e.token_id ^ 1) if e.index == 2 else e for e in events]


@pytest.mark.parametrize("broken", [emits_again, loses, renumbers, changes])
def test_a_scheduler_that_is_broken_is_found(broken: Callable[[list[Any]], list[Any]]) -> None:
    """The real scheduler, whose events are spoilt on their way: the history of what the client saw gives it away."""
    from resilient_executor.reference.messages import ModelOutput
    from resilient_executor.reference.request import Request, SamplingParams
    from resilient_executor.reference.scheduler import Scheduler, SchedulerConfig

    def run(spoil: Callable[[list[Any]], list[Any]]) -> list[Any]:
        scheduler = Scheduler(
            SchedulerConfig(
                kv_capacity_tokens=256,
                max_batch_tokens=64,
                max_num_requests=4,
                max_model_len=64,
                max_concurrent_steps=1,
                eos_token_ids=frozenset(),
            )
        )
        scheduler.add(Request("r0", (1, 2, 3), SamplingParams(max_tokens=6, ignore_eos=True), 0))
        events: list[Any] = []
        while scheduler.num_live:
            step = scheduler.schedule()
            tokens = {one.request_id: 10 + len(events) for one in step.requests}
            events += spoil(scheduler.update(step, ModelOutput(step.step_id, tokens)))
        return events

    def history(events: list[Any]) -> list[Line]:
        lines = clean()
        next(line for line in lines if line["kind"] == "oracle")["tokens"] = [10, 11, 12, 13, 14, 15]
        kept = [line for line in lines if line.get("id") != "r0" or line["kind"] == "request"]
        place = next(n for n, line in enumerate(kept) if line["kind"] == "retry")
        seen = [{"t": 1006.5, "kind": "token", "id": "r0", "index": e.index, "token": e.token_id} for e in events]
        seen += [{"t": 1006.5, "kind": "end", "id": "r0", "finish": "length", "error": ""}]
        return renumbered([*kept[:place], *seen, *kept[place:]])

    assert check(history(run(list))).problems == []
    assert check(history(run(broken))).problems
