"""Everything that is known of one epoch's workers, and what is made of it. Pure: no Ray, and the clock is passed in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from resilient_executor.protocol import Phase, ProcessIdentity, Progress, Vitals
from resilient_executor.supervisor.detectors import Liveness, LivenessDetector
from resilient_executor.supervisor.incidents import CauseKind
from resilient_executor.supervisor.progress import DriverView, ProgressDetector, StepDeadline
from resilient_executor.supervisor.stalls import RankReport

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig

logger = logging.getLogger(__name__)

#: Clock ticks of processor time between two looks that prove that a process runs: one may be Ray's own housekeeping.
_RAN_TICKS: Final = 2
#: States of a process that somebody has stopped.
_STOPPED: Final = ("T", "t")
#: Where the node's agent cannot be asked, silence must last so many times ``heartbeat_timeout_s``.
_UNSEEN: Final = 2.0


@dataclass(frozen=True)
class WatchSettings:
    """The settings that supervision needs; see :class:`ExecutorConfig`."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    earliest_conviction_s: float
    lease_s: float
    lease_grace_s: float
    step_deadline_min_s: float
    step_deadline_first_s: float
    step_deadline_factor: float
    step_timeout_s: float
    tensor_parallel_size: int
    phase_limits: Mapping[Phase, float] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: ExecutorConfig) -> WatchSettings:
        """Take them from the executor's."""
        return cls(
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            earliest_conviction_s=config.earliest_conviction_s,
            lease_s=config.lease_s,
            lease_grace_s=config.lease_grace_s,
            step_deadline_min_s=config.step_deadline_min_s,
            step_deadline_first_s=config.step_deadline_first_s,
            step_deadline_factor=config.step_deadline_factor,
            step_timeout_s=config.step_timeout_s,
            tensor_parallel_size=config.tensor_parallel_size,
            phase_limits={
                Phase.STARTING: config.starting_timeout_s,
                Phase.LOADING: config.loading_timeout_s,
                Phase.COMPILING: config.compiling_timeout_s,
            },
        )

    def step_deadline(self) -> StepDeadline:
        """A deadline that has learnt nothing yet."""
        return StepDeadline(
            floor_s=self.step_deadline_min_s,
            ceiling_s=self.step_timeout_s,
            first_s=self.step_deadline_first_s,
            factor=self.step_deadline_factor,
        )


@dataclass(frozen=True)
class Conviction:
    """A verdict of the detectors.

    Attributes:
        ranks: whom it names; one that is frozen, or all that have not finished what the group waits for.
    """

    kind: CauseKind
    ranks: tuple[int, ...]
    text: str


class Watch:
    """The workers of one epoch: what they say, when they last said it, and what their nodes see of them."""

    def __init__(
        self,
        epoch: int,
        processes: Sequence[tuple[ProcessIdentity, str]],
        settings: WatchSettings,
        deadline: StepDeadline,
        now: float,
    ) -> None:
        """Begin to watch.

        Args:
            epoch: their generation.
            processes: process and node address of each, in rank order.
            settings: limits.
            deadline: of their steps; it goes on learning from one epoch to the next.
            now: seconds of a steady clock.
        """
        self.epoch = epoch
        self.progress: dict[int, Progress] = {}
        self.round_trip_s: dict[int, float] = {}
        self.deadline = deadline
        self._processes = list(processes)
        self._settings = settings
        self._heard_at = dict.fromkeys(range(len(processes)), now)
        self._vitals: dict[int, Vitals] = {}
        self._runs: set[int] = set()
        self._frozen: set[int] = set()
        self._stalled = False
        interval_s = settings.heartbeat_interval_s
        self._liveness = {
            rank: LivenessDetector(
                interval_s=interval_s,
                # The loop looks once an interval: with that, nobody is given up later than was promised.
                timeout_s=settings.heartbeat_timeout_s - interval_s,
                earliest_s=settings.earliest_conviction_s,
                now=now,
            )
            for rank in range(len(processes))
        }
        self._group = ProgressDetector(
            range(len(processes)),
            deadline=deadline,
            phase_limits=settings.phase_limits,
            interval_s=interval_s,
            now=now,
        )

    def heard(self, progress: Progress, now: float, round_trip_s: float) -> None:
        """A worker has answered a heartbeat."""
        rank = progress.rank
        self.progress[rank] = progress
        self.round_trip_s[rank] = round_trip_s
        self._heard_at[rank] = now
        self._liveness[rank].heard(now)
        self._group.heard(progress)
        self._vitals.pop(rank, None)
        self._runs.discard(rank)

    def saw(self, rank: int, vitals: Vitals, now: float) -> None:
        """A worker's node has looked at its process."""
        before = self._vitals.get(rank)
        self._vitals[rank] = vitals
        used = 0 if before is None else vitals.cpu_ticks - before.cpu_ticks
        # In a start or a call it may wait for its disk with the lock held, for as long as that may take.
        may_wait = self._may_wait(rank, now) and vitals.state not in _STOPPED
        if vitals.runnable or used >= _RAN_TICKS or may_wait:
            self._liveness[rank].ran(now)
            self._runs.add(rank)
        else:
            self._runs.discard(rank)

    def told(self, view: DriverView, now: float) -> None:
        """The driver has spoken of its group."""
        self._group.told(view, now)

    def judge(self, now: float) -> tuple[list[Conviction], list[int]]:
        """A pass of the loop: fresh convictions, and the ranks whose processes should be looked at."""
        convictions, suspects = [], []
        for rank, detector in self._liveness.items():
            seen = self._vitals.get(rank)
            verdict = detector.evaluate(now, stopped=seen is not None and seen.state in _STOPPED)
            if verdict.state is Liveness.DEAD and rank not in self._frozen and self._is_proven(rank, now):
                self._frozen.add(rank)
                convictions.append(Conviction(CauseKind.FROZEN, (rank,), verdict.reason))
            if verdict.state is not Liveness.ALIVE:
                suspects.append(rank)
        running_silent = {rank: self._liveness[rank].silence_s(now) for rank in suspects if rank in self._runs}
        try:
            stall = self._group.evaluate(now, running_silent)
        except Exception:  # whoever is frozen is to be found all the same
            logger.exception("the progress of epoch %d could not be judged", self.epoch)
            stall = None
        if stall is not None and not self._stalled and not self._frozen:
            self._stalled = True
            self.deadline.convicted()
            convictions.append(Conviction(CauseKind.STALLED, stall.ranks, stall.text))
        return convictions, suspects

    def _may_wait(self, rank: int, now: float) -> bool:
        silence_s = self._liveness[rank].silence_s(now)
        return self._group.phase_of(rank, now) is not Phase.SERVING or self._group.may_be_in_a_call(
            rank, silence_s, now
        )

    def _is_proven(self, rank: int, now: float) -> bool:
        """Whether the node's agent looked last and did not see it run.

        Where the agent does not answer, or has seen it run and is slow to look again, it takes twice the time.
        """
        looked = rank in self._vitals and rank not in self._runs
        return looked or self._liveness[rank].still_s(now) >= _UNSEEN * self._settings.heartbeat_timeout_s

    def silence_s(self, rank: int, now: float) -> float:
        """Seconds since a worker was last heard, whether they count against it or not."""
        return max(0.0, now - self._heard_at[rank])

    def suspicion(self, rank: int, now: float) -> float:
        """Phi of a worker."""
        return self._liveness[rank].suspicion(now)

    def report(self, rank: int, now: float, vitals: Vitals | None = None, stacks: str = "") -> RankReport:
        """What is known of a rank at ``now``."""
        process, node_ip = self._processes[rank]
        return RankReport(
            rank=rank,
            pid=process.pid,
            node_ip=node_ip,
            progress=self.progress.get(rank),
            silence_s=self.silence_s(rank, now),
            process=vitals.describe() if vitals is not None else "",
            stacks=stacks,
        )
