"""First causes and incidents (F7, F35)."""

from __future__ import annotations

import json
import pickle
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.errors import StepLost
from resilient_executor.protocol import ExitStatus, ProcessIdentity, WorkerInfo
from resilient_executor.supervisor.incidents import (
    MAX_EVIDENCE,
    MAX_TEXT,
    SUPERVISOR,
    Cause,
    CauseKind,
    Evidence,
    Incident,
    RankExit,
    first_cause,
    signal_name,
)

WORKERS = {
    rank: WorkerInfo(rank, ProcessIdentity(4240 + rank, 1, f"node{rank // 2}"), f"10.0.0.{rank // 2}", (), f"a{rank}")
    for rank in range(4)
}


def killed(rank: int, at: float, number: int = signal.SIGKILL, *, expected: bool = False, note: str = "") -> RankExit:
    return RankExit(rank, ExitStatus(4240 + rank, None, int(number), at, note), expected)


def exited(rank: int, at: float, code: int | None) -> RankExit:
    return RankExit(rank, ExitStatus(4240 + rank, code, None, at))


def seen(at: float, rank: int | None, kind: CauseKind, text: str = "seen") -> Evidence:
    return Evidence(at, "test", rank, text, kind)


def test_a_killed_rank_is_described_in_full() -> None:
    cause = first_cause([killed(2, 5.0)], [], workers=WORKERS, doing={2: "step 17"})
    assert cause.describe() == "rank 2 (pid 4242, node 10.0.0.1) was killed by SIGKILL during step 17"


def test_a_death_wins_over_the_broken_collective_that_was_seen_before_it() -> None:
    broken = seen(4.0, 3, CauseKind.RPC_ERROR, "connection closed by peer")
    graph = seen(4.1, None, CauseKind.GRAPH_ERROR, "channel closed")
    stalled = seen(4.2, 0, CauseKind.STALLED)
    cause = first_cause([killed(2, 5.0)], [broken, graph, stalled])
    assert (cause.kind, cause.rank) == (CauseKind.PROCESS_EXIT, 2)


def test_who_is_killed_for_a_stall_has_died_of_it() -> None:
    """The supervisor kills whoever hangs, and the news of that death may come before the incident is closed."""
    conviction = Evidence(4.0, SUPERVISOR, 1, "step 7 is 9 s old", CauseKind.STALLED)
    cause = first_cause([killed(1, 4.2)], [conviction, seen(4.3, 1, CauseKind.PROCESS_EXIT)])
    assert (cause.kind, cause.rank, cause.text) == (CauseKind.STALLED, 1, "step 7 is 9 s old")
    assert first_cause([killed(2, 3.9)], [conviction]).kind is CauseKind.PROCESS_EXIT


def test_the_earliest_of_several_deaths_wins_and_an_abort_in_the_same_moment_is_a_symptom() -> None:
    assert first_cause([killed(1, 9.0), killed(3, 7.0)], []).rank == 3
    assert first_cause([killed(1, 7.0, signal.SIGABRT), killed(3, 7.1)], []).rank == 3
    assert first_cause([killed(1, 5.0, signal.SIGABRT), killed(3, 7.1)], []).rank == 1
    assert first_cause([killed(1, 5.0, signal.SIGABRT)], []).describe() == "rank 1 (pid 4241) was killed by SIGABRT"


def test_what_the_executor_ended_itself_is_no_cause() -> None:
    fenced = [killed(rank, 6.0, expected=True) for rank in range(4)]
    assert first_cause(fenced, []).kind is CauseKind.UNKNOWN
    frozen = seen(5.0, 1, CauseKind.FROZEN, "no heartbeat for 10.0 s")
    cause = first_cause(fenced, [frozen], workers=WORKERS)
    assert cause.describe() == "rank 1 (pid 4241, node 10.0.0.0) stopped answering: no heartbeat for 10.0 s"


def test_a_freeze_that_came_before_a_crash_is_the_cause_and_one_that_came_after_is_not() -> None:
    crash = exited(2, 6.0, 1)
    assert first_cause([crash], [seen(5.0, 1, CauseKind.FROZEN)]).kind is CauseKind.FROZEN
    assert first_cause([crash], [seen(7.0, 1, CauseKind.FROZEN)]).rank == 2


def test_out_of_memory_names_the_signal_and_the_news() -> None:
    news = seen(7.0, 1, CauseKind.OUT_OF_MEMORY, "cgroup limit of 2 GiB reached")
    cause = first_cause([killed(1, 6.5)], [news], doing={1: "load_model"})
    assert cause.describe() == (
        "rank 1 (pid 4241) ran out of memory and was killed by SIGKILL during load_model: cgroup limit of 2 GiB reached"
    )
    assert first_cause([killed(2, 6.5)], [news]).kind is CauseKind.PROCESS_EXIT, "another rank's news"


def test_a_failed_start_says_more_than_the_exit_code_and_less_than_a_signal() -> None:
    raised = seen(4.0, 1, CauseKind.WORKER_START, "ValueError: no such model")
    cause = first_cause([exited(1, 3.9, 1)], [raised], workers=WORKERS)
    assert cause.describe() == "rank 1 (pid 4241, node 10.0.0.0) could not be started: ValueError: no such model"
    assert first_cause([killed(1, 4.1)], [raised]).signal == signal.SIGKILL


def test_a_lost_node_says_more_than_exits_that_nobody_can_explain() -> None:
    lost = seen(9.0, 2, CauseKind.NODE_LOSS, "health check failed")
    cause = first_cause([exited(2, 8.0, None), exited(3, 8.1, None)], [lost], workers=WORKERS)
    assert cause.describe() == "node 10.0.0.1 (rank 2) was lost: health check failed"
    assert first_cause([killed(3, 8.0)], [lost], workers=WORKERS).rank == 3
    assert first_cause([], [seen(1.0, None, CauseKind.NODE_LOSS, "node7")]).describe().endswith("was lost: node7")


def test_the_sentinel_and_the_agent_see_one_death() -> None:
    sentinel = seen(4.9, 1, CauseKind.PROCESS_EXIT, "actor died")
    assert first_cause([], [sentinel]).describe() == "rank 1 died: actor died"
    assert first_cause([exited(1, 5.0, 3)], [sentinel]).describe() == "rank 1 (pid 4241) exited with code 3"
    assert first_cause([exited(1, 5.0, None)], []).describe() == "rank 1 (pid 4241) died"


@pytest.mark.parametrize("kind", list(CauseKind))
def test_every_kind_alone_is_found_and_described(kind: CauseKind) -> None:
    for rank in (None, 1):
        cause = first_cause([], [seen(1.0, rank, kind, "line one\nline  two")], doing={1: "idle"})
        assert cause.kind is kind
        assert cause.describe().endswith("line one line two")
        assert "\n" not in cause.describe()
        assert rank is None or "while idle" in cause.describe()


EXITS = st.builds(
    RankExit,
    st.integers(0, 3),
    st.builds(
        ExitStatus, st.integers(1, 9), st.none() | st.integers(0, 9), st.none() | st.integers(1, 64), st.floats(0, 9)
    ),
    st.booleans(),
)
EVIDENCE = st.builds(
    Evidence,
    st.floats(0, 9),
    st.just("t"),
    st.none() | st.integers(0, 3),
    st.text(max_size=400),
    st.sampled_from(CauseKind),
)


@given(st.lists(EXITS, max_size=6), st.lists(EVIDENCE, max_size=6))
def test_any_evidence_gives_one_line_and_a_root_wins_over_symptoms(
    exits: list[RankExit], evidence: list[Evidence]
) -> None:
    cause = first_cause(exits, evidence, workers=WORKERS)
    assert 0 < len(cause.describe()) <= MAX_TEXT
    assert cause.describe() == " ".join(cause.describe().split())
    symptoms = {CauseKind.GRAPH_ERROR, CauseKind.RPC_ERROR, CauseKind.STALLED, CauseKind.UNKNOWN}
    has_root = any(not e.expected for e in exits) or any(e.kind not in symptoms for e in evidence)
    assert (cause.kind not in symptoms) == has_root
    assert first_cause(exits[::-1], evidence, workers=WORKERS).kind == cause.kind


def test_an_incident_tells_its_story() -> None:
    incident = Incident(number=3, epoch=7, detected_at=100.0)
    assert incident.headline() == "incident 3 (epoch 7): cause not known yet"
    incident.cause = Cause(CauseKind.PROCESS_EXIT, rank=1, pid=42, signal=9, doing="step 17")
    incident.add(seen(99.0, 1, CauseKind.RPC_ERROR))
    incident.spent("fence", 0.5)
    incident.spent("fence", 0.25)
    incident.epochs_tried += [8, 9]
    incident.resolve("recovered", at=104.25)
    incident.resolve("failed", at=999.0)
    assert incident.headline() == (
        "incident 3 (epoch 7): rank 1 (pid 42) was killed by SIGKILL during step 17; "
        "recovered in 4.2 s after 2 attempts"
    )
    data = json.loads(json.dumps(incident.to_dict(), allow_nan=False))
    assert data["cause"]["kind"] == "process_exit"
    assert data["cause"]["description"] == incident.cause.describe()
    assert data["evidence"] == [{"at": 99.0, "source": "test", "rank": 1, "text": "seen", "kind": "rpc_error"}]
    assert (data["phases"], data["outcome"], data["duration_s"]) == ({"fence": 0.75}, "recovered", 4.25)
    assert pickle.loads(pickle.dumps(incident)) == incident
    assert incident.headline() in str(StepLost(7, 12, incident))


def test_evidence_is_capped_and_the_rest_counted() -> None:
    incident = Incident(1, 1, 0.0)
    for i in range(MAX_EVIDENCE + 5):
        incident.add(seen(float(i), None, CauseKind.UNKNOWN))
    assert len(incident.evidence) == MAX_EVIDENCE
    assert incident.evidence[0].at == 0.0
    assert incident.evidence_dropped == 5


def test_signals_have_names() -> None:
    assert signal_name(11) == "SIGSEGV"
    assert signal_name(200) == "signal 200"
