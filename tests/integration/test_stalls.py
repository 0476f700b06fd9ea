"""Whatever hangs is noticed within the default bounds, explained, and costs no token (F2, F3).

``ROUNDS`` in the environment repeats each of them, on alternating ranks, and tries a pipeline too; the default is one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import leaks
import pytest
from stuck_worker import KINDS

from resilient_executor import CauseKind, ExecutorConfig, ExecutorState, Incident, ResilientExecutor, WorkerSpec
from resilient_executor.reference import ReferenceEngine, SamplingParams
from resilient_executor.reference.bench import JOURNALLED

#: What the defaults promise: seconds from the stall, or the freeze, to its notice.
STALL_S, FREEZE_S = 10.0, 5.0
#: The two ways to be stuck that look least alike.
SHORT = ("blocked in python", "spinning in C with the lock")
#: A test machine may be busier than a server.
SLACK_S = 1.0
PROMPTS = ["It was a fine evening, and", "My dear Emma,"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
ROUNDS = int(os.environ.get("ROUNDS", "1"))

pytestmark = pytest.mark.timeout(180 * ROUNDS)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)][: 1 if ROUNDS == 1 else 2], ids=str)
def executor(ray_cluster: str, request: pytest.FixtureRequest) -> Iterator[ResilientExecutor]:
    config = ExecutorConfig(
        worker=WorkerSpec("stuck_worker:StuckWorker"),
        tensor_parallel_size=request.param[0],
        pipeline_parallel_size=request.param[1],
        rpc_policies=JOURNALLED,
        max_restarts=1000,
        backoff_initial_s=0.01,
        backoff_max_s=0.01,
        name="stalls",
    )
    with ResilientExecutor(config) as running:
        yield running


@pytest.fixture(scope="module")
def engine(executor: ResilientExecutor) -> ReferenceEngine:
    return ReferenceEngine(executor, poison_crashes=0)


@pytest.fixture(scope="module")
def undisturbed(engine: ReferenceEngine) -> list[tuple[int, ...]]:
    return tokens(engine)


def tokens(engine: ReferenceEngine) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


def recovered(executor: ResilientExecutor, incidents: int) -> Incident:
    deadline = time.monotonic() + 90.0

    def over() -> bool:
        return executor.state is ExecutorState.HEALTHY and len(executor.incidents) > incidents

    while not over():
        assert time.monotonic() < deadline, executor.state
        time.sleep(0.02)
    assert len(executor.incidents) == incidents + 1, "one fault is one incident"
    incident = executor.incidents[-1]
    assert incident.cause is not None
    return incident


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.long) for k in KINDS])
def test_a_step_that_never_ends_on_one_rank(
    executor: ResilientExecutor,
    engine: ReferenceEngine,
    undisturbed: list[tuple[int, ...]],
    kind: str,
    tmp_path: Path,
) -> None:
    for round_ in range(ROUNDS):
        rank, mark, incidents = (round_ + len(kind)) % 2, tmp_path / str(round_), len(executor.incidents)
        executor.collective_rpc("arrange", args=(kind, rank, 6, str(mark)))
        assert tokens(engine) == undisturbed
        incident = recovered(executor, incidents)
        assert incident.cause is not None
        noticed_s = incident.detected_at - float(mark.read_text())
        print(f"{kind}, rank {rank}: noticed after {noticed_s:.2f} s, over after {incident.duration_s:.2f} s more")
        assert noticed_s < STALL_S + SLACK_S
        assert (incident.cause.kind, incident.cause.rank) == (CauseKind.STALLED, rank)
        assert incident.report is not None
        report = incident.report.ranks[rank]
        assert f"in {KINDS[kind]}" in report.stacks.split("\n\n", 1)[0], "its working thread comes first"
        assert incident.report.culprit == rank
        if executor.workers[rank].process.pid and kind != "blocked in python":
            assert report.process == "runs"


@pytest.mark.parametrize("idle", [pytest.param(True, marks=pytest.mark.long), False], ids=["idle", "in flight"])
def test_a_stopped_process(
    executor: ResilientExecutor, engine: ReferenceEngine, undisturbed: list[tuple[int, ...]], idle: bool
) -> None:
    for round_ in range(ROUNDS):
        assert tokens(engine) == undisturbed
        time.sleep(1.0)
        rank, incidents, stopped = round_ % 2, len(executor.incidents), list[float]()
        pid = executor.workers[rank].process.pid

        def stop(pid: int = pid, stopped: list[float] = stopped) -> None:
            stopped.append(time.time())
            os.kill(pid, signal.SIGSTOP)

        if idle:
            stop()
        else:
            timer = threading.Timer(0.15, stop)
            timer.start()
            engine.add_request("The house", SamplingParams(max_tokens=200, ignore_eos=True), f"long-{round_}")
            list(engine.stream())
            timer.join()
        incident = recovered(executor, incidents)
        assert incident.cause is not None
        noticed_s = incident.detected_at - stopped[0]
        print(f"stopped, rank {rank}: noticed after {noticed_s:.2f} s, over after {incident.duration_s:.2f} s more")
        assert noticed_s < FREEZE_S + SLACK_S
        assert (incident.cause.kind, incident.cause.rank) == (CauseKind.FROZEN, rank)
        assert incident.report is not None
        assert incident.report.ranks[rank].process == "is stopped"
        assert "most recent call first" in incident.report.ranks[1 - rank].stacks, "the others' stacks are there"
        assert leaks.alive([pid]) == []
        assert tokens(engine) == undisturbed


def test_one_that_is_stuck_before_anybody_has_heard_that_it_serves(executor: ResilientExecutor, tmp_path: Path) -> None:
    """In its first step, with the lock: the last that was heard of it is that it starts, which may take long.

    Heartbeats are rare, so that it is so each time. In a pipeline nobody is in the step with it.
    """
    if ROUNDS > 1:
        pytest.skip("once is enough")
    mark, interval_s = tmp_path / "mark", 5.0
    config = replace(
        executor._config, name="silent", tensor_parallel_size=1, pipeline_parallel_size=2,
        heartbeat_interval_s=interval_s, heartbeat_timeout_s=25.0, step_deadline_first_s=STALL_S - 2.0,
    )  # fmt: skip
    with ResilientExecutor(config) as silent:
        engine = ReferenceEngine(silent, poison_crashes=0)
        silent.collective_rpc("arrange", args=("spinning in C with the lock", 0, 1, str(mark)))
        through = tokens(engine)
        incident = recovered(silent, 0)
        assert incident.cause is not None
        noticed_s = incident.detected_at - float(mark.read_text())
        print(f"noticed after {noticed_s:.2f} s")
        assert noticed_s < STALL_S + 4 * interval_s + SLACK_S
        assert (incident.cause.kind, incident.cause.rank) == (CauseKind.STALLED, 0)
        assert tokens(engine) == through
