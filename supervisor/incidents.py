"""What went wrong: evidence as it comes in, the first cause drawn from it, and the incident that holds both. Pure.

A death in a group is never alone. Its peers report broken connections, the graph reports a closed channel, and often
they do so before the news of the death itself arrives. :func:`first_cause` sorts causes from symptoms.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from resilient_executor.protocol import LEASE_EXIT_CODE, ExitStatus, WorkerInfo
from resilient_executor.supervisor.stalls import StallReport

#: An incident keeps this many pieces of evidence; a hanging group can produce them without end.
MAX_EVIDENCE: Final = 200
#: Longest text of a cause or headline, in characters.
MAX_TEXT: Final = 300
#: Exits that were seen within this many seconds of each other may have been seen in the wrong order: agents look at
#: their processes at intervals, and the clocks of two nodes differ.
SAME_MOMENT_S: Final = 0.25

#: The source of evidence that the supervisor has found itself.
SUPERVISOR: Final = "supervisor"

Outcome = Literal["open", "recovered", "failed"]


class CauseKind(str, enum.Enum):
    """What kind of thing went wrong."""

    PROCESS_EXIT = "process_exit"
    OUT_OF_MEMORY = "out_of_memory"
    FROZEN = "frozen"
    STALLED = "stalled"
    NODE_LOSS = "node_loss"
    NODE_DRAIN = "node_drain"
    LINK_LOSS = "link_loss"
    WORKER_START = "worker_start"
    GRAPH_ERROR = "graph_error"
    RPC_ERROR = "rpc_error"
    UNKNOWN = "unknown"


#: Kinds that can start an incident by themselves; the earliest of them is the first cause.
_ROOTS: Final = frozenset(
    {
        CauseKind.PROCESS_EXIT, CauseKind.OUT_OF_MEMORY, CauseKind.NODE_LOSS, CauseKind.NODE_DRAIN,
        CauseKind.LINK_LOSS, CauseKind.FROZEN, CauseKind.WORKER_START,
    }
)  # fmt: skip
#: Other kinds are symptoms where there is a root; alone they are taken in this order.
_SYMPTOMS: Final = (CauseKind.STALLED, CauseKind.GRAPH_ERROR, CauseKind.RPC_ERROR, CauseKind.UNKNOWN)


@dataclass(frozen=True)
class Evidence:
    """One observation.

    Attributes:
        at: wall-clock time, seconds since the Unix epoch.
        source: who saw it, for instance ``sentinel``, ``heartbeat``, ``agent``, ``graph``, ``rpc``, ``node``.
        rank: the rank that it is about (for a lost node, any rank on it), or None.
        text: what was seen. No prompt, output or environment value.
        kind: what it points to.
    """

    at: float
    source: str
    rank: int | None
    text: str
    kind: CauseKind = CauseKind.UNKNOWN


@dataclass(frozen=True)
class RankExit:
    """The end of a rank's process.

    Attributes:
        rank: the rank that it had.
        status: what its node's kernel tells.
        expected: whether the executor ended it itself (fencing, shutdown); such an exit is never a cause.
    """

    rank: int
    status: ExitStatus
    expected: bool = False


@dataclass(frozen=True)
class Cause:
    """The first cause of an incident.

    Attributes:
        kind: what kind of thing it was.
        rank, pid, node_id, node_ip: whom it happened to, as far as known.
        exit_code, signal: how the process ended, as far as known.
        doing: what the rank was doing, for instance ``step 17`` or ``load_model``; ``idle``; or "" if not known.
        text: what else is known, one line.
    """

    kind: CauseKind
    rank: int | None = None
    pid: int | None = None
    node_id: str = ""
    node_ip: str = ""
    exit_code: int | None = None
    signal: int | None = None
    doing: str = ""
    text: str = ""

    def describe(self) -> str:
        """One line, for instance ``rank 1 (pid 4242, node 10.0.0.3) was killed by SIGKILL during step 17``."""
        when = " while idle" if self.doing == "idle" else f" during {self.doing}" if self.doing else ""
        detail = f": {self.text}" if self.text else ""
        return _one_line(f"{self._who()} {self._what()}{when}{detail}")

    def _who(self) -> str:
        node = self.node_ip or self.node_id
        if self.kind in (CauseKind.NODE_LOSS, CauseKind.NODE_DRAIN):
            return f"node {node or 'of unknown address'}" + (f" (rank {self.rank})" if self.rank is not None else "")
        known = [f"pid {self.pid}"] if self.pid is not None else []
        known += [f"node {node}"] if node else []
        if self.rank is None:
            return f"a process ({', '.join(known)})" if known else _NOBODY[self.kind]
        return f"rank {self.rank}" + (f" ({', '.join(known)})" if known else "")

    def _what(self) -> str:
        if self.kind is CauseKind.PROCESS_EXIT:
            return self._how_it_ended()
        if self.kind is CauseKind.OUT_OF_MEMORY:
            return "ran out of memory and " + self._how_it_ended()
        return _WHAT[self.kind]

    def _how_it_ended(self) -> str:
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        if self.exit_code == LEASE_EXIT_CODE:
            return "ended itself, as nobody renewed its lease"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "died"


_WHAT: Final = {
    CauseKind.FROZEN: "stopped answering",
    CauseKind.STALLED: "made no progress",
    CauseKind.NODE_LOSS: "was lost",
    CauseKind.NODE_DRAIN: "is being drained",
    CauseKind.LINK_LOSS: "was cut",
    CauseKind.WORKER_START: "could not be started",
    CauseKind.GRAPH_ERROR: "failed",
    CauseKind.RPC_ERROR: "failed in a collective RPC",
    CauseKind.UNKNOWN: "failed for an unknown reason",
}
_NOBODY: Final = {
    **dict.fromkeys(CauseKind, "a worker"),
    CauseKind.GRAPH_ERROR: "the graph",
    CauseKind.UNKNOWN: "the group",
    CauseKind.STALLED: "the group",
    CauseKind.LINK_LOSS: "a link between nodes",
}


@dataclass
class Incident:
    """One incident, from the first sign to the end of the rebuild. Written under the overseer's lock, or by its thread.

    One that the executor's shutdown cuts short stays open.

    Attributes:
        number: counted from 1 over the executor's life.
        epoch: the epoch that it hit.
        detected_at: wall-clock time of the first sign, seconds since the Unix epoch.
        cause: the first cause, as far as it is known yet.
        evidence: what was seen, in the order of arrival; at most ``MAX_EVIDENCE`` pieces, see ``evidence_dropped``.
        phases: phase of the rebuild -> seconds; a phase that ran more than once has the sum.
        epochs_tried: the epochs that the rebuild tried, in order.
        resolved_at: wall-clock time of the end, or None.
        outcome: ``open`` until it is resolved.
        report: for a freeze or a stall, what everyone was doing before anybody was killed.
        standbys: how many ranks of the newest attempt were taken by warm standbys.
    """

    number: int
    epoch: int
    detected_at: float
    cause: Cause | None = None
    evidence: list[Evidence] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    epochs_tried: list[int] = field(default_factory=list)
    resolved_at: float | None = None
    outcome: Outcome = "open"
    evidence_dropped: int = 0
    report: StallReport | None = None
    standbys: int = 0

    def add(self, evidence: Evidence) -> None:
        """Keep a piece of evidence. The earliest arrivals are kept: the first cause is among them."""
        if len(self.evidence) < MAX_EVIDENCE:
            self.evidence.append(evidence)
        else:
            self.evidence_dropped += 1

    def spent(self, phase: str, seconds: float) -> None:
        """Add to the duration of a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def resolve(self, outcome: Literal["recovered", "failed"], at: float) -> None:
        """End the incident at ``at``, wall-clock seconds. The first outcome stays."""
        if self.outcome == "open":
            self.outcome = outcome
            self.resolved_at = at

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first sign to the end; None while open. Never negative, though wall clocks can jump."""
        return None if self.resolved_at is None else max(0.0, self.resolved_at - self.detected_at)

    def headline(self) -> str:
        """One line: number, epoch, first cause, outcome."""
        cause = self.cause.describe() if self.cause is not None else "cause not known yet"
        tried = f" after {len(self.epochs_tried)} attempts" if len(self.epochs_tried) > 1 else ""
        warm = f", {self.standbys} ranks from warm standbys" if self.standbys else ""
        took = "" if self.duration_s is None else f"; {self.outcome} in {self.duration_s:.1f} s{tried}{warm}"
        return f"incident {self.number} (epoch {self.epoch}): {cause}{took}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data that JSON can hold."""
        data = asdict(self)
        if self.cause is not None:
            data["cause"] = {**asdict(self.cause), "kind": self.cause.kind.value, "description": self.cause.describe()}
        data["report"] = self.report.lines() if self.report is not None else None
        data["evidence"] = [{**asdict(piece), "kind": piece.kind.value} for piece in self.evidence]
        return {**data, "headline": self.headline(), "duration_s": self.duration_s}


def first_cause(
    exits: Iterable[RankExit],
    evidence: Iterable[Evidence],
    *,
    workers: Mapping[int, WorkerInfo] | None = None,
    doing: Mapping[int, str] | None = None,
) -> Cause:
    """Draw the first cause from what is known so far; call it again when more is known.

    The rules: an exit that the executor caused itself counts for nothing. Among what can start an incident (an exit, a
    lost node, a freeze, a failed start, a stall that the supervisor found) the earliest wins. Broken collectives, graph
    errors and peers that do not come back into step are symptoms, and count only where there is nothing else.

    Args:
        exits: ends of processes, in any order.
        evidence: observations, in any order.
        workers: rank -> what the worker said of itself, for pid and node.
        doing: rank -> what it was doing, see :class:`Cause`.
    """
    observed = sorted(evidence, key=lambda piece: piece.at)
    ended = [one for one in exits if not one.expected]
    known, activity = workers or {}, doing or {}

    roots = [piece for piece in observed if piece.kind in _ROOTS or _is_conviction(piece)]
    roots, ended = _same_event_once(roots, ended, known)
    exit_ = _first_exit(ended)
    root = roots[0] if roots else None
    if exit_ is not None and (root is None or exit_.status.at <= root.at):
        return _cause_of_exit(exit_, observed, known, activity)
    if root is not None:
        return _cause_of_evidence(root, known, activity)
    for kind in _SYMPTOMS:
        for piece in observed:
            if piece.kind is kind:
                return _cause_of_evidence(piece, known, activity)
    return Cause(CauseKind.UNKNOWN)


def _is_conviction(piece: Evidence) -> bool:
    """A stall that the supervisor has found: its report came first, and whatever died then died of it."""
    return piece.kind is CauseKind.STALLED and piece.source == SUPERVISOR


def signal_name(number: int) -> str:
    """Return for instance ``SIGKILL``; ``signal 42`` for a number without a name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _same_event_once(
    roots: list[Evidence], exits: list[RankExit], workers: Mapping[int, WorkerInfo]
) -> tuple[list[Evidence], list[RankExit]]:
    """Where evidence and an exit are two sights of one event, keep the one that says more.

    A signal says more than a failed start or out-of-memory news, which then only adds its text (see
    :func:`_cause_of_exit`). A failed start says more than the exit code that followed it. A lost node says more than an
    exit about which nobody knows anything.
    """
    signalled = {one.rank for one in exits if one.status.signal is not None}
    explained = {CauseKind.WORKER_START, CauseKind.OUT_OF_MEMORY, CauseKind.PROCESS_EXIT}
    kept = [piece for piece in roots if not (piece.rank in signalled and piece.kind in explained)]
    started_badly = {piece.rank for piece in kept if piece.kind is CauseKind.WORKER_START}
    lost_ranks = {piece.rank for piece in kept if piece.kind is CauseKind.NODE_LOSS and piece.rank is not None}
    # Ray's news of the actors of a dead node comes before that of the node.
    kept = [p for p in kept if not (p.rank in lost_ranks and p.kind in (CauseKind.PROCESS_EXIT, CauseKind.FROZEN))]
    lost_nodes = {workers[rank].process.node_id for rank in lost_ranks if rank in workers}

    def superseded(one: RankExit) -> bool:
        if one.rank in started_badly:
            return True
        on_lost_node = one.rank in lost_ranks or (
            one.rank in workers and workers[one.rank].process.node_id in lost_nodes
        )
        return on_lost_node and one.status.signal is None and one.status.exit_code is None

    remaining = [one for one in exits if not superseded(one)]
    # What is left of bare "process ended" evidence says less than an exit of the same rank.
    exited = {one.rank for one in remaining}
    return [p for p in kept if not (p.rank in exited and p.kind is CauseKind.PROCESS_EXIT)], remaining


def _first_exit(exits: Sequence[RankExit]) -> RankExit | None:
    """The earliest exit; among those of the same moment, an abort is a symptom (Ray aborts readers of a dead peer)."""
    if not exits:
        return None
    earliest = min(one.status.at for one in exits)
    together = [one for one in exits if one.status.at - earliest <= SAME_MOMENT_S]
    return min(together, key=lambda one: (one.status.signal == signal.SIGABRT, one.status.at, one.rank))


def _cause_of_exit(
    one: RankExit, observed: Sequence[Evidence], workers: Mapping[int, WorkerInfo], doing: Mapping[int, str]
) -> Cause:
    worker = workers.get(one.rank)
    memory = [p for p in observed if p.kind is CauseKind.OUT_OF_MEMORY and p.rank == one.rank]
    return Cause(
        kind=CauseKind.OUT_OF_MEMORY if memory else CauseKind.PROCESS_EXIT,
        rank=one.rank,
        pid=one.status.pid,
        node_id=worker.process.node_id if worker else "",
        node_ip=worker.node_ip if worker else "",
        exit_code=one.status.exit_code,
        signal=one.status.signal,
        doing=doing.get(one.rank, ""),
        text=_one_line(one.status.note or (memory[0].text if memory else "")),
    )


def _cause_of_evidence(piece: Evidence, workers: Mapping[int, WorkerInfo], doing: Mapping[int, str]) -> Cause:
    worker = workers.get(piece.rank) if piece.rank is not None else None
    return Cause(
        kind=piece.kind,
        rank=piece.rank,
        pid=worker.process.pid if worker else None,
        node_id=worker.process.node_id if worker else "",
        node_ip=worker.node_ip if worker else "",
        doing=doing.get(piece.rank, "") if piece.rank is not None else "",
        text=_one_line(piece.text),
    )


def _one_line(text: str) -> str:
    """Collapse white space and shorten: logs and headlines are one line each."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."
