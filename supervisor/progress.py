"""Progress of a group, from what its workers say of themselves with each heartbeat. Pure: the clock is passed in.

Liveness asks whether a worker answers, progress whether it gets anywhere. A step has a deadline that is learnt from the
steps before it: a multiple of the slowest recent one, never less than a floor and never more than a ceiling. A phase of
the start (starting, loading, compiling) has one of its own. Ages are the workers' own: a supervisor that was stopped
for a while reads old ages then, not large ones, so a pause of its own convicts nobody.

A group can hang in three ways, and each is looked for:

* a rank has a step in hand for too long;
* a step is finished by some ranks, or the driver waits for it, and others never get it: it is lost between two of
  them, or a worker sleeps and does not hear that it is rung;
* a rank runs and does not answer at all: something in it holds Python's lock, and does not let go.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from resilient_executor.protocol import Phase, Progress

#: Steps of an epoch before its deadline is learnt rather than given.
MIN_STEPS: Final = 5
#: Heartbeats whose slowest step is remembered; at two a second and with four workers, the last half minute.
MEMORY: Final = 256


#: The driver speaks once a second; what it said longer ago than this, in seconds, says nothing of now.
_WORD_S: Final = 3.0
#: On a busy machine heartbeats may be so far apart, in seconds; a call may begin at the end of such a gap.
_SLOW_BEATS_S: Final = 3.0


@dataclass(frozen=True)
class DriverView:
    """What the driver says of its group.

    Attributes:
        step: the newest that it has in flight, or -1.
        oldest: the oldest that it has in flight, or -1.
        steps_read: how many the group has finished, to its last rank, in this epoch.
        rpc: the collective RPC that it has in flight, or ""; the oldest of several.
        rpc_age_s: for how long.
        serving: the group is in service, and in no phase of a start: every worker has said so.
    """

    step: int = -1
    oldest: int = -1
    steps_read: int = 0
    rpc: str = ""
    rpc_age_s: float = 0.0
    serving: bool = False


class StepDeadline:
    """How old a step may grow. Learns from recent steps; one for the whole group, as a slow rank makes all wait.

    Args:
        floor_s: never less than this.
        ceiling_s: never more; wins over the floor.
        first_s: until ``MIN_STEPS`` steps are known.
        factor: of the slowest recent step.
    """

    def __init__(self, *, floor_s: float, ceiling_s: float, first_s: float, factor: float) -> None:
        if min(floor_s, ceiling_s, first_s) <= 0 or factor < 1:
            raise ValueError("durations must be positive, and the factor at least 1")
        self._floor_s, self._ceiling_s, self._first_s, self._factor = floor_s, ceiling_s, first_s, factor
        self._slowest: deque[float] = deque(maxlen=MEMORY)
        self._steps = 0
        #: Doubled by a conviction, 1 again after a step: a group that is only slow must not be rebuilt in a circle.
        self._patience = 1.0

    def learn(self, slowest_s: float, steps: int) -> None:
        """Note what a heartbeat says: so many more steps are finished, and the slowest took ``slowest_s``."""
        if slowest_s > 0.0:
            self._slowest.append(slowest_s)
        if steps > 0:
            self._steps += steps
            self._patience = 1.0

    def convicted(self) -> None:
        """A step was given up. If not one step is finished until the next conviction, that comes twice as late."""
        self._patience *= 2.0

    @property
    def learnt(self) -> bool:
        """Whether enough steps are known."""
        return self._steps >= MIN_STEPS

    @property
    def seconds(self) -> float:
        """The deadline now."""
        usual = self._factor * max(self._slowest, default=0.0) if self.learnt else self._first_s
        # Patience has a limit of its own: 2 ** 1024 is no float.
        return min(self._ceiling_s, max(self._floor_s, usual) * min(self._patience, 1e9))


@dataclass(frozen=True)
class Stall:
    """A group that gets nowhere.

    Attributes:
        ranks: those that have not done what all wait for.
        age_s: for how long.
        limit_s: how long it may take.
        text: one line for people.
    """

    ranks: tuple[int, ...]
    age_s: float
    limit_s: float
    text: str


class ProgressDetector:
    """Watches the progress of one epoch's group.

    Args:
        ranks: who belongs to it.
        deadline: of its steps; outlives the epoch.
        phase_limits: how long a worker may stay in a phase; one that is not named has no limit.
        interval_s: between two heartbeats, and between two passes of the loop.
        now: seconds of a steady clock.
    """

    def __init__(
        self,
        ranks: range,
        *,
        deadline: StepDeadline,
        phase_limits: Mapping[Phase, float],
        interval_s: float,
        now: float,
    ) -> None:
        self._ranks = ranks
        self._deadline = deadline
        self._limits = phase_limits
        self._interval_s = interval_s
        self._progress: dict[int, Progress] = {}
        self._behind_since: float | None = None
        self._baseline = -1
        self._view = DriverView()
        self._told_at = -math.inf
        self._serving_since = now
        #: Steps that the deadline knows of; None before the driver has said that the group serves.
        self._counted: int | None = None
        #: Rank -> until when its silence was last excused by a call.
        self._excused: dict[int, float] = {}
        #: Ranks that were heard since the driver spoke: what they say is newer.
        self._heard_since: set[int] = set()
        self._last_pass = now

    def heard(self, progress: Progress) -> None:
        """A worker has answered a heartbeat."""
        before = self._progress.get(progress.rank)
        self._progress[progress.rank] = progress
        self._heard_since.add(progress.rank)
        if progress.phase is Phase.SERVING and before is not None:  # a predecessor may have been told of slower ones
            self._deadline.learn(progress.slowest_step_s, 0)

    def told(self, view: DriverView, now: float) -> None:
        """The driver has spoken, at ``now``."""
        if view.serving:
            if not self._view.serving:
                self._serving_since = now
            if self._counted is None:  # what a predecessor has seen of this epoch, it has not told
                self._counted = view.steps_read if self._told_at == -math.inf else 0
            self._deadline.learn(0.0, max(0, view.steps_read - self._counted))
            self._counted = view.steps_read
        self._view, self._told_at = view, now
        self._heard_since.clear()

    def phase_of(self, rank: int, now: float) -> Phase | None:
        """The phase of a rank, None where it is not known.

        One that falls silent as soon as it serves has last said that it loads, which may take ten minutes; the driver
        knows better.
        """
        progress = self._progress.get(rank)
        own = progress.phase if progress is not None else None
        if self._view.serving and rank not in self._heard_since and self._is_fresh(now):
            return Phase.SERVING if own is not Phase.STOPPING else own
        return own

    def evaluate(self, now: float, running_silent: Mapping[int, float] | None = None) -> Stall | None:
        """Judge the group at ``now``.

        Args:
            now: seconds of the same clock.
            running_silent: rank -> seconds without an answer, for those whose processes are seen to run.
        """
        late = now - self._last_pass > 2 * self._interval_s
        self._last_pass = now
        # What a call was excused for does not count afterwards: neither against the rank, nor against the next call.
        silent = {
            rank: min(silence_s, now - self._excused.get(rank, -math.inf))
            for rank, silence_s in (running_silent or {}).items()
        }
        excused = [rank for rank, silence_s in silent.items() if self.may_be_in_a_call(rank, silence_s, now)]
        self._excused.update(dict.fromkeys(excused, now))
        return (
            self._phase_overdue()
            or self._step_overdue(silent)
            or self._deaf({rank: silent[rank] for rank in silent if rank not in excused}, now)
            or self._step_lost(now, late or bool(excused))
        )

    def _phase_overdue(self) -> Stall | None:
        for progress in self._progress.values():
            limit = self._limits.get(progress.phase)
            if limit is not None and progress.phase_age_s > limit:
                name, age = progress.phase.value, progress.phase_age_s
                ranks = tuple(sorted(r for r, p in self._progress.items() if p.phase is progress.phase))
                return Stall(ranks, age, limit, f"{name} for {age:.1f} s (limit {limit:g} s, {name}_timeout_s)")
        return None

    def _step_overdue(self, running_silent: Mapping[int, float]) -> Stall | None:
        busy = [p for p in self._progress.values() if p.phase is Phase.SERVING and p.step_in_hand >= 0]
        limit = self._deadline.seconds
        oldest = max(busy, key=lambda p: p.step_age_s, default=None)
        if oldest is None or oldest.step_age_s <= limit:
            return None
        step = min(p.step_in_hand for p in busy)
        # Who does not answer may be in it since its last heartbeat, and the others wait for it.
        ranks = tuple(sorted({p.rank for p in busy if p.step_in_hand == step} | set(running_silent)))
        return Stall(ranks, oldest.step_age_s, limit, self._overdue(step, oldest.step_age_s, limit))

    def _step_lost(self, now: float, late: bool) -> Stall | None:
        """A step that some have finished, or the driver waits for, and others have not even begun."""
        everyone = [self._progress.get(rank) for rank in self._ranks]
        known = [p for p in everyone if p is not None and self.phase_of(p.rank, now) is Phase.SERVING]
        if len(known) < len(everyone) or any(p.step_in_hand >= 0 for p in known):
            self._behind_since = None
            return None
        # A step that was raised in goes no further: those behind it never see it, and need not.
        newest = max(self._view.step, *(p.last_step for p in known))
        baseline = max(min(p.last_step for p in known), *(step for p in known for step in p.failed_steps), -1)
        if baseline >= newest:
            self._behind_since = None
            return None
        if self._behind_since is None or baseline != self._baseline or late:
            self._behind_since, self._baseline = now, baseline
        age, limit = now - self._behind_since, self._deadline.seconds
        if age <= limit:
            return None
        ranks = tuple(sorted(p.rank for p in known if p.last_step == min(q.last_step for q in known)))
        return Stall(ranks, age, limit, f"{self._overdue(newest, age, limit)}; it has not reached all ranks")

    def _deaf(self, running_silent: Mapping[int, float], now: float) -> Stall | None:
        for rank, silent_s in running_silent.items():
            progress, phase, silence_s = self._progress.get(rank), self.phase_of(rank, now), silent_s
            if progress is None and self._is_fresh(now) and phase is None:  # the driver says that it is none of service
                limit = max([self._deadline.seconds, *self._limits.values()])
            elif progress is None or phase is Phase.SERVING:
                limit = self._deadline.seconds
                if progress is not None and progress.phase is not phase:  # silent before, it was loading
                    silence_s = min(silence_s, now - self._serving_since)
            elif progress.phase in self._limits:
                limit = max(self._deadline.seconds, self._limits[progress.phase] - progress.phase_age_s)
            else:
                continue
            if silence_s > limit:
                text = f"runs, but has not answered for {silence_s:.1f} s (limit {limit:.1f} s): Python's lock is held"
                return Stall((rank,), silence_s, limit, text)
        return None

    def may_be_in_a_call(self, rank: int, silence_s: float, now: float) -> bool:
        """Whether a rank may be in a collective RPC, which excuses its silence.

        In service an old word of its own counts for nothing: the call that it names may be long over. Then the driver
        says whether there is one; it must have begun before the silence did, or soon after, and not while the rank was
        in a step that is still in flight. Where the driver is silent, too, either will do.
        """
        progress, view = self._progress.get(rank), self._view
        own = progress is not None and bool(progress.rpc_in_hand)
        fresh = self._is_fresh(now)
        if fresh and rank in self._heard_since:
            return own
        if not (fresh and view.serving):
            return own or bool(view.rpc)
        in_step = progress is not None and progress.step_in_hand >= view.oldest >= 0
        before = view.rpc_age_s + (now - self._told_at) + 2 * self._interval_s + _SLOW_BEATS_S >= silence_s
        return bool(view.rpc) and before and not in_step

    def _is_fresh(self, now: float) -> bool:
        return now - self._told_at <= _WORD_S

    def _overdue(self, step: int, age_s: float, limit_s: float) -> str:
        how = "learnt from the steps before" if self._deadline.learnt else "no steps to learn from yet"
        return f"step {step} is {age_s:.1f} s old (deadline {limit_s:.1f} s, {how})"
