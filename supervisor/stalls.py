"""The stall report: who is where, who waits for whom, and what each worker's threads are doing. Pure.

It is made before anything is killed, because afterwards nobody can be asked any more. It holds names of files and
functions, step numbers and times; no argument, prompt, output or environment value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from resilient_executor.protocol import Phase, Progress

#: Characters of one rank's stacks, and of all together.
MAX_STACK: Final = 6_000
MAX_STACKS: Final = 48_000
#: Frames that show what a worker works on; threads that have one come first.
_WORK: Final = re.compile(r" in (run_step|run_rpc|init_worker|init_device|load_model|shut_down)$", re.MULTILINE)
#: Threads of supervision wait by profession.
_WATCHMEN: Final = re.compile(r" in (sentinel|heartbeat|_keep_lease)$", re.MULTILINE)
#: Innermost frames of a thread that waits for its peers.
_COLLECTIVE: Final = re.compile(r'File "[^"]*(?:torch/distributed|/nccl|/mpi)[^"]*", line \d+ in (\w+)')
#: A heartbeat that is older, in seconds, is missing.
_FRESH_S: Final = 2.0
#: So many frames of a stack are looked at for that, from the innermost.
_INNERMOST: Final = 6


@dataclass(frozen=True)
class RankReport:
    """One rank at the moment of the report.

    Attributes:
        progress: the newest that it has said of itself; None if it has said nothing.
        silence_s: how old that is.
        process: what its node's kernel says: ``runs``, ``sleeps``, ``is stopped``, ``is stuck in the kernel``, or "".
        stacks: its threads' Python stacks, or why there are none.
    """

    rank: int
    pid: int
    node_ip: str
    progress: Progress | None
    silence_s: float
    process: str = ""
    stacks: str = ""

    def doing(self) -> str:
        """What it is busy with, in a few words."""
        progress = self.progress
        if progress is None:
            return "has not said anything"
        # Until the next heartbeat is late, what it said last is the best that is known of now.
        since_s = self.silence_s if self.silence_s > _FRESH_S else 0.0
        if progress.rpc_in_hand:
            return f"in call {progress.rpc_in_hand}"
        if progress.step_in_hand >= 0:
            return f"in step {progress.step_in_hand} for {progress.step_age_s + since_s:.1f} s"
        if progress.phase is not Phase.SERVING:
            return f"{progress.phase.value} for {progress.phase_age_s + since_s:.1f} s"
        return f"{'asleep' if progress.asleep else 'idle'} after step {progress.last_step}"

    @property
    def collective(self) -> str:
        """The collective that its working thread waits in, as far as its stack shows that; or ""."""
        working = self.stacks.split("\n\n", 1)[0]
        if not _WORK.search(working):
            return ""
        frames = [line for line in working.splitlines() if line.lstrip().startswith("File ")][:_INNERMOST]
        return next((found.group(1) for line in frames if (found := _COLLECTIVE.search(line))), "")


@dataclass(frozen=True)
class StallReport:
    """Everything that was known when a group was given up, before anybody was killed.

    Attributes:
        at: wall-clock time, seconds since the Unix epoch.
        suspects: the ranks that the detector named.
        text: why, one line.
    """

    at: float
    epoch: int
    suspects: tuple[int, ...]
    text: str
    ranks: tuple[RankReport, ...]
    tensor_parallel_size: int = 1

    @property
    def culprit(self) -> int | None:
        """The one rank that all others wait for, if it can be told."""
        waiting = self.waits()
        guilty = [rank for rank in self.suspects if not waiting.get(rank)]
        return guilty[0] if len(guilty) == 1 else None

    def waits(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the ranks that it waits for; those that wait for nobody are left out."""
        suspects = set(self.suspects)
        stuck = {one.rank for one in self.ranks if one.rank in suspects and not one.collective}
        found: dict[int, tuple[int, ...]] = {}
        first = min((self._stage(rank) for rank in suspects), default=0)
        for one in self.ranks:
            others = tuple(sorted((stuck or suspects) - {one.rank}))
            idle = one.progress is not None and one.progress.step_in_hand < 0 and not one.progress.rpc_in_hand
            waits_in_step = one.rank in suspects and one.collective
            waits_for_input = one.rank not in suspects and idle and self._stage(one.rank) > first
            if others and (waits_in_step or waits_for_input):
                found[one.rank] = others
        return found

    def _stage(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def lines(self, stacks: bool = True) -> list[str]:
        """The report as text."""
        waiting, culprit = self.waits(), self.culprit
        lines = [f"epoch {self.epoch}: {self.text}"]
        for one in self.ranks:
            parts = [one.doing()]
            if one.collective:
                parts.append(f"in the collective {one.collective}")
            if one.rank in waiting:
                parts.append(f"waits for {_ranks(waiting[one.rank])}")
            if one.rank == culprit:
                parts.append("all others wait for it")
            if one.process:
                parts.append(f"its process {one.process}")
            parts.append(f"last heard {one.silence_s:.1f} s ago")
            lines.append(f"rank {one.rank} (pid {one.pid}, node {one.node_ip}): {', '.join(parts)}")
            if stacks and one.stacks:
                lines += [f"    {line}" for line in one.stacks.splitlines()]
        return lines


def tidy_stacks(dump: str, limit: int = MAX_STACK) -> str:
    """What ``faulthandler`` has written, with the threads that work first, and those that only watch left out."""
    threads = [block.strip("\n") for block in re.split(r"\n\s*\n", dump) if block.strip()]
    kept = [block for block in threads if not _WATCHMEN.search(block)]
    kept.sort(key=lambda block: not _WORK.search(block))  # stable: otherwise as they came
    text = "\n\n".join(kept)
    return text if len(text) <= limit else text[: limit - 20].rpartition("\n")[0] + "\n  ... (shortened)"


def share_of(ranks: int) -> int:
    """Characters of stacks for each of so many ranks."""
    return min(MAX_STACK, MAX_STACKS // max(1, ranks))


def make_report(
    *,
    at: float,
    epoch: int,
    suspects: Sequence[int],
    text: str,
    ranks: Mapping[int, RankReport],
    tensor_parallel_size: int,
) -> StallReport:
    """Put the report together."""
    ordered = tuple(ranks[rank] for rank in sorted(ranks))
    return StallReport(at, epoch, tuple(sorted(suspects)), text, ordered, tensor_parallel_size)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
