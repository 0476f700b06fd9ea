"""Tells the supervisor's endpoint what only the executor knows: state, phase, incidents, restart budget."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from resilient_executor.config import ExecutorConfig
from resilient_executor.lifecycle import Event, Lifecycle
from resilient_executor.recovery import Recovery
from resilient_executor.supervisor.client import Supervision
from resilient_executor.supervisor.incidents import Incident
from resilient_executor.supervisor.status import News

#: Incidents that are shown; all are counted.
SHOWN: Final = 20


class Publisher:
    """A listener of the lifecycle that passes on what has changed. It must be quick, and is."""

    def __init__(
        self, config: ExecutorConfig, lifecycle: Lifecycle, recovery: Recovery, tell: Callable[[News], None]
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._tell = tell
        lifecycle.add_listener(self._on_event)
        tell(self.news())

    def _on_event(self, event: Event) -> None:
        self._tell(self.news())

    def news(self) -> News:
        """Everything, as it is now."""
        lifecycle, config = self._lifecycle, self._config
        incidents = list(lifecycle.incidents)
        budget = self._recovery.budget
        phases: Counter[str] = Counter()
        for incident in incidents:
            phases.update(incident.phases)
        return News(
            name=config.name,
            state=lifecycle.state.value,
            epoch=lifecycle.epoch,
            phase=lifecycle.phase,
            pid=os.getpid(),
            world_size=config.world_size,
            tensor_parallel_size=config.tensor_parallel_size,
            incidents=[_shown(incident) for incident in incidents[-SHOWN:]],
            incident_counts=Counter((_kind(incident), incident.outcome) for incident in incidents),
            phase_seconds=phases,
            restarts=budget.used,
            max_restarts=budget.max_restarts,
            standbys=self._recovery.standbys.counts(),
            standby_processes=self._recovery.standbys.processes(),
        )


def publish(config: ExecutorConfig, lifecycle: Lifecycle, recovery: Recovery, supervision: Supervision) -> None:
    """Tell the supervisor everything from now on; open its endpoint, where one is configured.

    Raises:
        ConfigError: its address cannot be listened at.
    """
    if config.status_port is not None:
        supervision.open_endpoint()
    Publisher(config, lifecycle, recovery, supervision.tell)


def _kind(incident: Incident) -> str:
    return incident.cause.kind.value if incident.cause is not None else "unknown"


def _shown(incident: Incident) -> dict[str, Any]:
    return {
        "number": incident.number,
        "epoch": incident.epoch,
        "detected_at": incident.detected_at,
        "kind": _kind(incident),
        "cause": incident.cause.describe() if incident.cause is not None else "not known yet",
        "outcome": incident.outcome,
        "duration_s": incident.duration_s,
        "phases": dict(incident.phases),
        "report": incident.report.lines(stacks=False) if incident.report is not None else None,
    }
