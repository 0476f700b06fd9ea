"""Liveness of one worker, from the beats of its heart. Pure: the clock is passed in.

Suspicion accrues (after Hayashibara et al., "The phi accrual failure detector"): phi is minus the decimal logarithm of
the probability that a healthy worker with this history is silent for so long. A worker whose beats are steady is
convicted at the earliest moment that is allowed, one whose beats are irregular later: at the limit, or where even that
is no rare silence for it, on a machine that is overloaded, at twice the limit.
Three things keep the innocent out of it:

* a single lost heartbeat changes nothing;
* *a detector that was itself paused convicts nobody*: when the loop that asks for verdicts comes late (a garbage
  collection, a stopped process, a suspended machine), the answers that arrived meanwhile are still unread, so silence
  in that time says nothing about the worker;
* *a process that runs is not frozen*: if its node's kernel sees it use its processor, then something in it holds
  Python's lock, and it is a matter of progress (see ``progress.py``), not of life.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

#: Silence, in intervals, from which a worker may be suspect: two beats are missing then, with room for jitter.
SUSPECT_INTERVALS: Final = 2.5
#: Nobody is convicted before this many intervals, however short the timeout: one lost heartbeat must change nothing.
DEAD_INTERVALS: Final = 3.0
#: Suspect from this phi on: a healthy worker is silent for so long once in a thousand times.
SUSPECT_PHI: Final = 3.0
#: Convicted from this phi on, between the earliest moment and the limit.
DEAD_PHI: Final = 12.0
#: At so many times the limit no history is an excuse any more.
IN_ANY_CASE: Final = 2.0
#: Gaps between beats that are remembered; at two a second, the last minute.
HISTORY: Final = 120
#: The standard deviation is never taken for smaller than this part of an interval: a short history looks too regular.
LEAST_DEVIATION: Final = 0.5
#: phi beyond this is of no use to anybody, and soon infinite.
MAX_PHI: Final = 300.0


class Liveness(str, enum.Enum):
    """What a detector makes of a worker."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True)
class Verdict:
    """A detector's verdict.

    Attributes:
        state: what it makes of the worker.
        reason: one line for people; empty while alive.
    """

    state: Liveness
    reason: str = ""


_ALIVE: Final = Verdict(Liveness.ALIVE)


class Detector(Protocol):
    """What the supervisor needs of a liveness detector. Times are seconds of one steady clock."""

    def heard(self, now: float) -> None:
        """A heartbeat was answered at ``now``."""

    def ran(self, now: float) -> None:
        """The worker's node saw its process use its processor at ``now``."""

    def tick(self, now: float) -> bool:
        """The loop passes at ``now``; returns whether it came late."""

    def evaluate(self, now: float, stopped: bool = False) -> Verdict:
        """Judge the worker at ``now``."""

    def silence_s(self, now: float) -> float:
        """Seconds of silence that count against the worker at ``now``."""

    def suspicion(self, now: float) -> float:
        """Phi at ``now``."""


class HeartbeatHistory:
    """The last gaps between beats, and how unlikely a longer one is."""

    def __init__(self, interval_s: float) -> None:
        self._least_deviation_s = LEAST_DEVIATION * interval_s
        # The expectation counts as two observations, so that the first beats do not decide everything.
        self._gaps: deque[float] = deque([interval_s, interval_s], maxlen=HISTORY)
        self._summary: tuple[float, float] | None = None

    def add(self, gap_s: float) -> None:
        """Note the gap between two beats."""
        self._gaps.append(gap_s)
        self._summary = None

    def _summarised(self) -> tuple[float, float]:
        """Mean and standard deviation. Seldom asked for: only where somebody is silent, or looks."""
        if self._summary is None:
            mean = math.fsum(self._gaps) / len(self._gaps)
            variance = math.fsum((gap - mean) ** 2 for gap in self._gaps) / len(self._gaps)
            self._summary = mean, max(math.sqrt(variance), self._least_deviation_s)
        return self._summary

    def phi(self, silence_s: float) -> float:
        """How suspicious ``silence_s`` is: 1 for one chance in ten, 2 for one in a hundred, and so on."""
        mean, deviation = self._summarised()
        chance = 0.5 * math.erfc((silence_s - mean) / (deviation * math.sqrt(2.0)))
        return min(MAX_PHI, -math.log10(chance)) if chance > 0.0 else MAX_PHI


class LivenessDetector:
    """Accrues suspicion against one worker. The loop must call ``evaluate`` about once an interval.

    Args:
        interval_s: between two heartbeats, and between two passes of the loop.
        timeout_s: silence after which the worker is dead if that is suspicious; after twice as much it is in any case.
        now: when the worker is first expected to live. The first heartbeat is due within the same limits.
        earliest_s: silence before which it is never convicted; None takes ``timeout_s``, so that only that counts.

    Raises:
        ValueError: a duration is not positive.
    """

    def __init__(self, *, interval_s: float, timeout_s: float, now: float, earliest_s: float | None = None) -> None:
        earliest_s = timeout_s if earliest_s is None else earliest_s
        if min(interval_s, timeout_s, earliest_s) <= 0:
            raise ValueError("interval_s, timeout_s and earliest_s must be positive")
        self._interval_s = interval_s
        self._suspect_s = SUSPECT_INTERVALS * interval_s
        self._dead_s = max(timeout_s, DEAD_INTERVALS * interval_s)
        self._earliest_s = min(self._dead_s, max(earliest_s, DEAD_INTERVALS * interval_s))
        self._history = HeartbeatHistory(interval_s)
        #: Where the silence that counts begins, and where the stillness does: neither heard nor seen running.
        self._silent_since = now
        self._still_since = now
        self._last_pass = now
        self._started_anew = False

    def heard(self, now: float) -> None:
        """A heartbeat was answered at ``now``; one that is older than the last changes nothing."""
        if now > self._silent_since:
            self._history.add(now - self._silent_since)
            self._silent_since = now
        self._still_since = max(self._still_since, now)
        self._started_anew = False

    def ran(self, now: float) -> None:
        """Its node saw it run: silent it may be, frozen it is not."""
        self._still_since = max(self._still_since, now)

    def tick(self, now: float) -> bool:
        """Note a pass of the loop; returns whether it was late by more than one interval.

        The first late pass in a silence starts the clock anew. Later ones in the same silence only do not count their
        lateness: otherwise a loop that is always late, on an overloaded machine, would never convict a frozen worker.
        """
        late_s = now - self._last_pass - self._interval_s
        self._last_pass = max(self._last_pass, now)
        if late_s <= self._interval_s:
            return False
        forgiven_s = late_s if self._started_anew else now - self._silent_since
        self._silent_since = min(now, self._silent_since + forgiven_s)
        self._still_since = min(now, max(self._silent_since, self._still_since + late_s))
        self._started_anew = True
        return True

    def evaluate(self, now: float, stopped: bool = False) -> Verdict:
        """Judge the worker at ``now``; this is a pass of the loop too.

        Args:
            now: seconds of the same clock.
            stopped: its node knows that its process is stopped: no history excuses that.
        """
        self.tick(now)
        still_s = self.still_s(now)
        if still_s >= self._earliest_s:
            phi = self._history.phi(still_s)
            proven = stopped or phi >= SUSPECT_PHI or still_s >= IN_ANY_CASE * self._dead_s
            if phi >= DEAD_PHI or (still_s >= self._dead_s and proven):
                return Verdict(
                    Liveness.DEAD, f"no heartbeat for {still_s:.1f} s (limit {self._dead_s:g} s, suspicion {phi:.0f})"
                )
        silence_s = self.silence_s(now)
        if silence_s < self._suspect_s:
            return _ALIVE
        phi = self.suspicion(now)
        # However irregular its beats: whoever may be convicted soon is looked at before.
        if phi >= SUSPECT_PHI or silence_s >= self._dead_s:
            return Verdict(
                Liveness.SUSPECT,
                f"no heartbeat for {silence_s:.1f} s (dead at {self._dead_s:g} s, suspicion {phi:.0f})",
            )
        return _ALIVE

    def silence_s(self, now: float) -> float:
        """Seconds of silence that count against the worker at ``now``."""
        return max(0.0, now - self._silent_since)

    def still_s(self, now: float) -> float:
        """Seconds at ``now`` since it was last heard, or seen to run by its node; what does not count is left out."""
        return max(0.0, now - self._still_since)

    def suspicion(self, now: float) -> float:
        """Phi of the silence at ``now``."""
        return self._history.phi(self.silence_s(now))
