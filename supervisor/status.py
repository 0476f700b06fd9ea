"""What the operator sees, built from what the supervisor knows and what the executor tells it. Pure: plain data.

Nothing of a request is in it: ranks, steps, times and causes only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor.watch import Watch

_PREFIX: Final = "resilient_executor"
STATES: Final = ("STARTING", "HEALTHY", "SUSPECT", "RECOVERING", "FAILED", "STOPPED")


@dataclass(frozen=True)
class News:
    """What the executor tells its supervisor with every change.

    Attributes:
        state: one of ``STATES``.
        phase: of a start or rebuild that is going on, or "".
        incidents: the newest, oldest first, as plain data.
        incident_counts: (kind of first cause, outcome) -> how many, since the start.
        phase_seconds: phase of a rebuild -> seconds spent in it, all rebuilds together.
        restarts, max_restarts: how much of the restart budget is used.
        standbys: warm standbys by condition: ``ready``, ``preparing``.
        standby_processes: of those that are ready.
    """

    name: str
    state: str
    epoch: int
    phase: str
    pid: int
    world_size: int
    tensor_parallel_size: int
    incidents: Sequence[Mapping[str, Any]] = ()
    incident_counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    restarts: int = 0
    max_restarts: int = 0
    standbys: Mapping[str, int] = field(default_factory=dict)
    standby_processes: Sequence[ProcessIdentity] = ()


def status(
    news: News | None, news_at: float, watch: Watch | None, devices: Mapping[int, Sequence[str]], now: float
) -> dict[str, Any]:
    """Everything, as data that JSON can hold.

    Args:
        news: the newest, or None when there has been none.
        news_at: when the executor was last heard, seconds of the same clock as ``now``.
        watch: the epoch that is being watched, or None.
        devices: rank -> its device ids.
        now: seconds of a steady clock.
    """
    if news is None:
        return {"state": "STARTING", "ranks": [], "incidents": []}
    return {
        "name": news.name,
        "state": news.state,
        "epoch": news.epoch,
        "phase": news.phase,
        "time": time.time(),
        "driver": {"pid": news.pid, "silent_s": round(max(0.0, now - news_at), 3)},
        "world_size": news.world_size,
        "tensor_parallel_size": news.tensor_parallel_size,
        "step_deadline_s": round(watch.deadline.seconds, 3) if watch is not None else None,
        "restarts": {"used": news.restarts, "max": news.max_restarts},
        "standbys": dict(news.standbys),
        "ranks": [_rank(watch, rank, devices, now) for rank in devices] if watch is not None else [],
        "incident_count": sum(news.incident_counts.values()),
        "incident_counts": [
            {"kind": kind, "outcome": outcome, "count": count}
            for (kind, outcome), count in sorted(news.incident_counts.items())
        ],
        "recovery_seconds": {phase: round(seconds, 3) for phase, seconds in news.phase_seconds.items()},
        "incidents": list(news.incidents),
    }


def _rank(watch: Watch, rank: int, devices: Mapping[int, Sequence[str]], now: float) -> dict[str, Any]:
    report = watch.report(rank, now)
    progress = report.progress
    return {
        "rank": rank,
        "pid": report.pid,
        "node": report.node_ip,
        "devices": list(devices[rank]),
        "epoch": watch.epoch,
        "phase": progress.phase.value if progress is not None else "starting",
        "doing": report.doing(),
        "step": progress.step_in_hand if progress is not None else -1,
        "step_age_s": round(progress.step_age_s, 3) if progress is not None else 0.0,
        "last_step": progress.last_step if progress is not None else -1,
        "steps_done": progress.steps_done if progress is not None else 0,
        "heartbeat_age_s": round(report.silence_s, 3),
        "round_trip_s": round(watch.round_trip_s.get(rank, 0.0), 6),
        "suspicion": round(watch.suspicion(rank, now), 2),
    }


#: name -> (kind, help, unit of the value in a rank's data)
_RANK_METRICS: Final = {
    "heartbeat_age_seconds": ("gauge", "Seconds since a rank was last heard", "heartbeat_age_s"),
    "heartbeat_round_trip_seconds": ("gauge", "Round trip of a rank's last heartbeat", "round_trip_s"),
    "suspicion": ("gauge", "Phi of a rank's silence", "suspicion"),
    "step_age_seconds": ("gauge", "Age of the step that a rank has in hand", "step_age_s"),
    "epoch_steps": ("gauge", "Steps that a rank has finished in this epoch", "steps_done"),
}


def prometheus(data: Mapping[str, Any]) -> str:
    """The same in Prometheus' text format."""
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, samples: Sequence[tuple[Mapping[str, object], object]]) -> None:
        if not samples:
            return
        lines.append(f"# HELP {_PREFIX}_{name} {text}")
        lines.append(f"# TYPE {_PREFIX}_{name} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escaped(item)}"' for key, item in labels.items())
            lines.append(f"{_PREFIX}_{name}{{{inside}}} {value}" if inside else f"{_PREFIX}_{name} {value}")

    metric("state", "gauge", "1 for the state now", [({"state": s}, int(s == data["state"])) for s in STATES])
    if "epoch" in data:
        metric("epoch", "gauge", "The newest generation of workers", [({}, data["epoch"])])
        metric("driver_silence_seconds", "gauge", "Since the executor was heard", [({}, data["driver"]["silent_s"])])
        metric(
            "restarts_in_window", "gauge", "Rebuilds that count against the budget", [({}, data["restarts"]["used"])]
        )
        metric("restarts_allowed", "gauge", "The restart budget", [({}, data["restarts"]["max"])])
        warm = [({"condition": condition}, count) for condition, count in data["standbys"].items()]
        metric("standbys", "gauge", "Warm standbys by condition", warm)
        counts = [({"kind": c["kind"], "outcome": c["outcome"]}, c["count"]) for c in data["incident_counts"]]
        metric("incidents_total", "counter", "Incidents by first cause and outcome", counts)
        spent = [({"phase": phase}, seconds) for phase, seconds in data["recovery_seconds"].items()]
        metric("recovery_seconds_total", "counter", "Time spent in rebuilds, by phase", spent)
        if data["step_deadline_s"] is not None:
            metric("step_deadline_seconds", "gauge", "Age at which a step is stalled", [({}, data["step_deadline_s"])])
    for name, (kind, text, key) in _RANK_METRICS.items():
        metric(f"rank_{name}", kind, text, [({"rank": r["rank"]}, r[key]) for r in data["ranks"]])
    return "\n".join(lines) + "\n"


def _escaped(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
