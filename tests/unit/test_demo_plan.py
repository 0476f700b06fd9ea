"""The parts of the demo: its plan, its record, its killer, its display, and its way out."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from resilient_executor.lifecycle import Event, ExecutorState
from resilient_executor.processes import identify
from resilient_executor.protocol import WorkerInfo
from resilient_executor.reference import FinishReason, TokenEvent
from resilient_executor.reference.demo.display import Display, logs_in
from resilient_executor.reference.demo.interrupts import Interrupts
from resilient_executor.reference.demo.leftovers import family, survivors
from resilient_executor.reference.demo.picture import SPARK_WINDOW_S, draw
from resilient_executor.reference.demo.plan import DemoOptions, Moment, PlannedKill, draw_kills, draw_requests
from resilient_executor.reference.demo.story import Story
from resilient_executor.reference.demo.victims import Killer
from resilient_executor.supervisor.incidents import Cause, CauseKind, Incident

NODE = "this node"


def asked(**other: int | str) -> DemoOptions:
    settings = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "kills": 3,
        "seed": 7,
        "requests": 6,
        "max_tokens": 80,
        "sampling": "mixed",
        "plain": True,
        "json_path": None,
        "address": "local",
    }
    return DemoOptions(**{**settings, **other})  # type: ignore[arg-type]


def make_story(**other: int | str) -> Story:
    options = asked(**other)
    return Story(options, draw_requests(options), lambda: NODE)


def event(kind: str, state: ExecutorState, epoch: int, **other: object) -> Event:
    return Event(kind, time.time(), state, epoch, **other)  # type: ignore[arg-type]


# -- the plan ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64), st.integers(0, 20), st.integers(1, 20), st.integers(1, 200))
def test_a_seed_makes_one_plan_and_its_kills_can_come(seed: int, kills: int, requests: int, max_tokens: int) -> None:
    options = asked(seed=seed, kills=kills, requests=requests, max_tokens=max_tokens)
    plan = draw_kills(options)

    assert plan == draw_kills(options)
    assert draw_requests(options) == draw_requests(options)
    assert [one.number for one in plan] == list(range(1, kills + 1))
    assert [one.moment for one in plan[:2]] == [Moment.IN_SERVICE, Moment.IN_REBUILD][:kills]
    for one in plan:
        assert 0 <= one.rank < options.world_size
        if one.moment is Moment.IN_SERVICE:  # every request gets on between two kills, and the kill comes soon
            assert 2 * requests <= one.after_tokens <= max(2 * requests, requests * max_tokens // 2)
        else:
            assert one.phase


def test_seeds_differ() -> None:
    assert len({draw_kills(asked(seed=seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize(("sampling", "greedy"), [("greedy", 6), ("mixed", 3), ("seeded", 0)])
def test_requests_are_sampled_as_asked_and_all_of_one_length(sampling: str, greedy: int) -> None:
    requests = draw_requests(asked(sampling=sampling))

    assert sum(one.sampling == "greedy" for one in requests) == greedy
    assert all(one.params.max_tokens == 80 and one.params.ignore_eos for one in requests)
    assert all(one.params.seed is not None for one in requests if one.sampling == "seeded")


# -- the record -------------------------------------------------------------------------------------------------------


def serve(story: Story, epoch: int) -> None:
    story.on_event(event("state", ExecutorState.HEALTHY, epoch))


def give_tokens(story: Story, count: int) -> None:
    answers = story.rounds[-1] if story.rounds else story.begin_round(disturbed=True)
    for _ in range(count):
        story.token(answers[0], TokenEvent("id", len(answers[0].token_ids), 1, "a"))


def is_settled(story: Story) -> bool:
    return story.settled


def test_the_record_tells_a_kill_its_detection_its_cause_and_the_way_back() -> None:
    story = make_story()
    story.executor_started(ExecutorState.HEALTHY, 1)
    give_tokens(story, 3)
    planned = PlannedKill(1, 3, Moment.IN_SERVICE, after_tokens=3)
    kill = story.kill_begins(planned, 3, 4242)
    story.kill_ended(kill, delivered=True, signal=signal.SIGKILL)
    assert not is_settled(story)

    incident = Incident(1, 1, detected_at=kill.at + 0.031)
    story.on_event(event("state", ExecutorState.RECOVERING, 1))
    story.on_event(event("incident", ExecutorState.RECOVERING, 1, incident=incident))
    for phase in ("fence", "tear_down", "place"):
        epoch = 2 if phase == "place" else 1
        story.on_event(event("phase_begun", ExecutorState.RECOVERING, epoch, phase=phase, incident=incident))
        story.on_event(event("phase", ExecutorState.RECOVERING, epoch, phase=phase, incident=incident, duration_s=0.5))
        incident.cause = Cause(
            CauseKind.PROCESS_EXIT, rank=3, pid=4242, node_id=NODE, node_ip="10.0.0.1", signal=9, doing="step 17"
        )
    second = story.kill_begins(PlannedKill(2, 0, Moment.IN_REBUILD, phase="place"), 0, 4300)
    story.on_event(event("phase_begun", ExecutorState.RECOVERING, 2, phase="fence", incident=incident))
    serve(story, 3)
    story.on_event(event("recovered", ExecutorState.HEALTHY, 3, incident=incident, duration_s=2.5))
    assert not is_settled(story)
    give_tokens(story, 1)

    assert is_settled(story)
    assert kill.noticed_after_s == pytest.approx(0.031, abs=1e-3)
    assert kill.describe() == "in service, after 3 tokens"
    assert second.describe() == "in the rebuild, phase detection, epoch 2"
    assert second.noticed_at is not None
    account = "\n".join(line.text for line in story.take_lines())
    assert story.take_lines() == []
    for text in (
        "kill 1 of 3: SIGKILL to rank 3 (pid 4242)",
        "incident 1: noticed 31 ms after the kill; epoch 1 is given up",
        "first cause: rank 3 (pid 4242) was killed by SIGKILL during step 17; all proven gone after 0.50 s",
        "epoch 2 died before it served, noticed",
        "epoch 3 serves, 2.5 s after the first sign in 2 attempts",
        "the answers go on; nothing had come for",
    ):
        assert text in account
    assert "10.0.0.1" not in account  # there is one node


def test_the_silence_is_the_longest_one_around_the_incident() -> None:
    story = make_story()
    story.token_times = [0.0, 0.1, 9.0, 10.0, 10.1, 10.2, 15.0, 15.1]
    assert story.longest_silence(10.15, 14.0) == pytest.approx(4.8)
    assert story.longest_silence(20.0, 21.0) is None


def test_an_error_at_the_end_of_a_request_is_kept() -> None:
    story = make_story()
    [first, *_] = story.begin_round(disturbed=True)
    story.token(first, TokenEvent("id", 0, None, "", FinishReason.ERROR, RuntimeError("poison")))

    assert (first.finish, first.error, first.token_ids) == ("error", "RuntimeError: poison", [])


# -- the killer -------------------------------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield started
    for one in started:
        one.kill()
        one.wait()


def infos(processes: list[subprocess.Popen[bytes]], node: str = NODE) -> list[WorkerInfo]:
    return [WorkerInfo(i, identify(one.pid, node), "10.0.0.1", (), "") for i, one in enumerate(processes)]


def wait_for_kills(story: Story, count: int) -> None:
    with story.changed:
        assert story.changed.wait_for(lambda: sum(one.delivered for one in story.kills) == count, timeout=20)


def test_workers_are_killed_at_their_moments(processes: list[subprocess.Popen[bytes]]) -> None:
    story, workers = make_story(), infos(processes)
    story.executor_started(ExecutorState.HEALTHY, 1)
    plan = (
        PlannedKill(1, 1, Moment.IN_SERVICE, after_tokens=5),
        PlannedKill(2, 1, Moment.IN_REBUILD, phase="load"),
        PlannedKill(3, 0, Moment.IN_SERVICE, after_tokens=2),
    )
    killer = Killer(plan, story, lambda: workers, NODE)
    killer.start()
    give_tokens(story, 4)
    assert story.kills == []
    give_tokens(story, 1)
    wait_for_kills(story, 1)
    assert processes[1].wait(5) == -signal.SIGKILL

    story.on_event(event("phase_begun", ExecutorState.RECOVERING, 2, phase="spawn"))
    assert len(story.kills) == 1
    story.on_event(event("phase_begun", ExecutorState.RECOVERING, 2, phase="load"))
    wait_for_kills(story, 2)
    assert processes[2].wait(5) == -signal.SIGKILL  # rank 1 was gone already, so it met the next one

    give_tokens(story, 9)  # of an epoch that is dead by now
    assert len(story.kills) == 2
    serve(story, 3)
    give_tokens(story, 2)
    wait_for_kills(story, 3)
    assert processes[0].wait(5) == -signal.SIGKILL
    killer.join(5)
    assert not killer.is_alive()
    assert [(one.rank, one.phase, one.epoch, one.delivered) for one in story.kills] == [
        (1, "", 1, True),
        (2, "load", 2, True),
        (0, "", 3, True),
    ]


def test_a_stopped_killer_kills_nobody(processes: list[subprocess.Popen[bytes]]) -> None:
    story, workers = make_story(), infos(processes)
    story.executor_started(ExecutorState.HEALTHY, 1)
    killer = Killer((PlannedKill(1, 0, Moment.IN_SERVICE, after_tokens=1),), story, lambda: workers, NODE)
    killer.start()
    killer.stop()
    give_tokens(story, 5)

    assert not killer.is_alive()
    assert story.kills == []
    assert all(one.poll() is None for one in processes)


def test_workers_of_other_machines_are_spared(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resilient_executor.reference.demo.victims._VICTIM_S", 0.1)
    story, workers = make_story(), infos(processes, "another node")
    story.executor_started(ExecutorState.HEALTHY, 1)
    give_tokens(story, 1)
    killer = Killer((PlannedKill(1, 0, Moment.IN_SERVICE, after_tokens=1),), story, lambda: workers, NODE)
    killer.start()
    killer.join(10)

    assert not killer.is_alive()
    assert all(one.poll() is None for one in processes)


# -- the display ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 110, 200])
@pytest.mark.parametrize(("requests", "size"), [(1, 1), (6, 2), (40, 4)])
@pytest.mark.parametrize("height", [20, 24, 60])
def test_the_picture_fits_the_terminal(width: int, height: int, requests: int, size: int) -> None:
    story = make_story(requests=requests, tensor_parallel_size=size, pipeline_parallel_size=size)
    workers = [WorkerInfo(i, identify(os.getpid(), NODE), "10.0.0.1", (), "") for i in range(size * size)]
    story.executor_started(ExecutorState.HEALTHY, 1)
    for disturbed in (False, True):
        for number, one in enumerate(story.begin_round(disturbed=disturbed)):
            for index in range(80):
                story.token(one, TokenEvent("id", index, index + (number == 0 and disturbed), "[b]文字\n and words "))
    story.kill_begins(PlannedKill(1, 0, Moment.IN_SERVICE), 0, os.getpid())
    incident = Incident(1, 1, time.time())
    story.on_event(event("incident", ExecutorState.RECOVERING, 1, incident=incident))
    story.on_event(event("phase_begun", ExecutorState.RECOVERING, 1, phase="fence", incident=incident))
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(draw(story.snapshot(SPARK_WINDOW_S), workers, width, height))

    picture = out.getvalue()
    assert len(picture.splitlines()) <= height
    assert "RECOVERING" in picture
    assert "killed: SIGKILL" in picture
    assert "≠ " in picture  # a wrong token is seen while it happens


def test_lines_are_printed_with_their_times_and_all_are_out_at_the_end() -> None:
    story, out = make_story(), io.StringIO()
    with Display(Console(file=out, width=40), story, lambda: (), live=False):
        for number in range(50):
            story.say(f"a line that is longer than the terminal is wide, number {number}")

    lines = out.getvalue().splitlines()
    assert len(lines) == 50
    assert all(" s " in line for line in lines)


def test_an_output_that_nobody_reads_is_noticed_and_hurts_nobody() -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    story = make_story()
    with Display(Console(file=Closed()), story, lambda: (), live=False) as display:
        story.say("a line")

    assert display.broken


def test_logs_join_the_account_except_those_that_it_tells_itself() -> None:
    story, logger = make_story(), logging.getLogger("resilient_executor.somewhere")
    with logs_in(story):
        logger.warning("incident 1: a worker died")
        logger.warning("the supervisor is gone\nand more")
        logger.info("nothing")
        try:
            raise ValueError("not\ngood")
        except ValueError:
            logger.exception("it failed")

    lines = [(line.text, line.mark) for line in story.take_lines()]
    assert lines == [("the supervisor is gone", "log"), ("it failed: ValueError: not good", "bad")]


# -- the way out ------------------------------------------------------------------------------------------------------


def test_an_interrupt_is_raised_at_once_and_again_until_it_is_handled() -> None:
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):  # somebody swallowed it
            interrupts.check()
        interrupts.close()
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.come == signal.SIGINT
    assert said == ["interrupted: shutting down", "shutting down already"]


def test_an_interrupt_waits_for_the_end_of_what_must_not_be_torn_apart() -> None:
    steps: list[str] = []

    def start() -> None:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGTERM)
            steps.append("done")
        steps.append("went on")

    with Interrupts(lambda _: None) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert interrupts.come == signal.SIGTERM
    assert steps == ["done"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda _: None) as interrupts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.claim()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == before
    assert threading.current_thread() is threading.main_thread()


def test_processes_that_are_left_are_found(processes: list[subprocess.Popen[bytes]]) -> None:
    mine = {identify(one.pid, "") for one in processes}
    assert mine <= family()

    processes[0].kill()
    processes[0].wait()
    assert survivors(mine, 0.0) == sorted(f"sleep (pid {one.pid})" for one in processes[1:])

    for one in processes:
        one.kill()  # not waited for: a zombie has ended
    assert survivors(mine, 10.0) == []
