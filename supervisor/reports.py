"""Collects what a stall report needs from the node agents, in bounded time; and what Ray says of a death."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayError

from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor.calls import within
from resilient_executor.supervisor.incidents import CauseKind
from resilient_executor.supervisor.stalls import StallReport, make_report, share_of
from resilient_executor.supervisor.watch import Watch

#: For the agents to bring the stacks, in seconds; those that do not come are not waited for.
_STACKS_S: Final = 1.5


async def ask_agents(
    agents: Mapping[str, ActorHandle],
    method: str,
    processes: Sequence[ProcessIdentity],
    *arguments: Any,
    timeout_s: float,
) -> dict[ProcessIdentity, Any]:
    """Ask each node's agent about its processes, all at once; what does not come in time is left out."""
    by_node: dict[str, list[ProcessIdentity]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append(process)

    async def ask(node_id: str) -> dict[ProcessIdentity, Any]:
        reference = getattr(agents[node_id], method).remote(by_node[node_id], *arguments)
        try:
            return await within(reference, timeout_s)
        except (RayError, asyncio.TimeoutError):
            return {}

    answers = await asyncio.gather(*(ask(node_id) for node_id in by_node.keys() & agents.keys()))
    return {process: answer for part in answers for process, answer in part.items()}


async def collect(
    watch: Watch,
    processes: Mapping[ProcessIdentity, int],
    agents: Mapping[str, ActorHandle],
    suspects: Sequence[int],
    text: str,
    *,
    tensor_parallel_size: int,
) -> StallReport:
    """Make the report of an epoch.

    Args:
        watch: what is known of it.
        processes: process -> rank, of all its workers.
        agents: node id -> agent.
        suspects: the ranks that are to be explained.
        text: why the report is made.
        tensor_parallel_size: ranks in a stage.
    """
    now = time.monotonic()
    found = await ask_agents(agents, "stacks", list(processes), share_of(len(processes)), timeout_s=_STACKS_S)
    ranks = {}
    for process, rank in processes.items():
        vitals, stacks = found.get(process, (None, "(no stacks: the node's agent did not answer)"))
        ranks[rank] = watch.report(rank, now, vitals, stacks)
    return make_report(
        at=time.time(),
        epoch=watch.epoch,
        suspects=suspects,
        text=text,
        ranks=ranks,
        tensor_parallel_size=tensor_parallel_size,
    )


def death_notice(error: BaseException, rank: int) -> tuple[CauseKind, int, str]:
    """What Ray's paragraph about a dead actor says, in a few words: kind of cause, the rank, and a text."""
    match = re.search(r"Worker exit type: (\w+)", str(error))
    exit_type = match.group(1) if match else type(error).__name__
    if isinstance(error, OutOfMemoryError) or "OUT_OF_MEMORY" in exit_type:
        return CauseKind.OUT_OF_MEMORY, rank, "Ray's memory monitor killed it to protect the node (OUT_OF_MEMORY)"
    return CauseKind.PROCESS_EXIT, rank, f"Ray reports {exit_type}"
