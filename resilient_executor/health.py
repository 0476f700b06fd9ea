"""The health check: a real round trip to every worker, now; an error that says who, and why."""

from __future__ import annotations

from typing import NoReturn

from resilient_executor.errors import ExecutorRecovering, ExecutorUnhealthy
from resilient_executor.lifecycle import Generation, Lifecycle
from resilient_executor.overseer import Overseer
from resilient_executor.supervisor.client import Supervision, SupervisorUnreachable
from resilient_executor.supervisor.incidents import first_cause


def check_health(
    lifecycle: Lifecycle, overseer: Overseer, supervision: Supervision, world_size: int, timeout_s: float
) -> None:
    """See ``ResilientExecutor.check_health``."""
    lifecycle.raise_if_over()
    generation = lifecycle.current
    if generation is None or generation.condemned or not generation.served:
        _raise_recovering(lifecycle, generation)
    try:
        result = supervision.examine(generation.epoch, timeout_s)
    except SupervisorUnreachable as error:
        raise ExecutorUnhealthy(f"{error}; one that has died or is stopped is being replaced") from error
    for finding in result.findings:
        overseer.on_finding(finding)
    for rank, text in result.dead.items():
        overseer.found_dead(generation, rank, text)
    if generation.condemned:
        _raise_recovering(lifecycle, generation)
    missing = [rank for rank in range(world_size) if rank not in result.progress]
    if missing:
        why = "; ".join(f"rank {r}: {result.silent.get(r, 'not watched yet')}" for r in missing)
        raise ExecutorUnhealthy(f"no live answer from every worker within {timeout_s:g} s: {why}", ranks=tuple(missing))


def _raise_recovering(lifecycle: Lifecycle, generation: Generation | None) -> NoReturn:
    lifecycle.raise_if_over()
    if generation is None or (not generation.exits and not generation.evidence):
        incident = lifecycle.incidents[-1] if lifecycle.incidents else None
        why = incident.headline() if incident is not None else "not started yet"
        ranks: tuple[int, ...] = ()
    else:
        incident = generation.incident
        infos = generation.group.infos if generation.group is not None else []
        cause = first_cause(
            generation.exits, generation.evidence, workers=dict(enumerate(infos)), doing=generation.doing
        )
        why = cause.describe()
        ranks = (cause.rank,) if cause.rank is not None else ()
    phase = f", phase {lifecycle.phase}" if lifecycle.phase else ""
    raise ExecutorRecovering(f"{why} (state {lifecycle.state.value}{phase})", ranks=ranks, incident=incident)
