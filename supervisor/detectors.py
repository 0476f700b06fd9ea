"""Liveness of one worker, from the beats of its heart. Pure: the clock is passed in.

A worker that is silent is first suspect, then dead; a single lost heartbeat changes nothing. And *a detector that was
itself paused convicts nobody*: when the loop that asks for verdicts comes late (a garbage collection, a machine that
was suspended, a process that was stopped), the answers that arrived meanwhile are still unread, so silence in that time
says nothing about the worker.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

#: Silence, in heartbeat intervals, from which a worker is suspect: two beats are missing then, with room for jitter.
SUSPECT_INTERVALS: Final = 2.5
#: Nobody is convicted before this many intervals, however short the timeout: one lost heartbeat must change nothing.
DEAD_INTERVALS: Final = 3.0


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


class Detector(Protocol):
    """What the supervisor needs of a liveness detector. Times are seconds of one steady clock."""

    def heard(self, now: float) -> None:
        """A heartbeat was answered at ``now``."""

    def tick(self, now: float) -> bool:
        """The loop passes at ``now``; returns whether it came late."""

    def evaluate(self, now: float) -> Verdict:
        """Judge the worker at ``now``."""

    def silence_s(self, now: float) -> float:
        """Seconds of silence that count against the worker at ``now``."""


class LivenessDetector:
    """Fixed limits on the silence of one worker. The loop must call ``evaluate`` about once an interval.

    Args:
        interval_s: between two heartbeats, and between two passes of the loop.
        timeout_s: silence after which the worker is dead; never less than ``DEAD_INTERVALS`` intervals.
        now: when the worker is first expected to live. The first heartbeat is due within the same limits.

    Raises:
        ValueError: a duration is not positive.
    """

    def __init__(self, *, interval_s: float, timeout_s: float, now: float) -> None:
        if interval_s <= 0 or timeout_s <= 0:
            raise ValueError("interval_s and timeout_s must be positive")
        self._interval_s = interval_s
        self._suspect_s = SUSPECT_INTERVALS * interval_s
        self._dead_s = max(timeout_s, DEAD_INTERVALS * interval_s)
        #: Where the silence that counts begins.
        self._silent_since = now
        self._last_pass = now
        self._started_anew = False

    def heard(self, now: float) -> None:
        """A heartbeat was answered at ``now``; one that is older than the last changes nothing."""
        self._silent_since = max(self._silent_since, now)
        self._started_anew = False

    def tick(self, now: float) -> bool:
        """Note a pass of the loop; returns whether it was late by more than one interval.

        The first late pass in a silence starts the clock anew. Later ones in the same silence only do not count their
        lateness: otherwise a loop that is always late, on an overloaded machine, would never convict a frozen worker.
        """
        late_s = now - self._last_pass - self._interval_s
        self._last_pass = max(self._last_pass, now)
        if late_s <= self._interval_s:
            return False
        self._silent_since = min(now, self._silent_since + late_s) if self._started_anew else now
        self._started_anew = True
        return True

    def evaluate(self, now: float) -> Verdict:
        """Judge the worker at ``now``; this is a pass of the loop too."""
        self.tick(now)
        silence_s = self.silence_s(now)
        if silence_s >= self._dead_s:
            return Verdict(Liveness.DEAD, f"no heartbeat for {silence_s:.1f} s (limit {self._dead_s:g} s)")
        if silence_s >= self._suspect_s:
            return Verdict(Liveness.SUSPECT, f"no heartbeat for {silence_s:.1f} s (dead at {self._dead_s:g} s)")
        return Verdict(Liveness.ALIVE)

    def silence_s(self, now: float) -> float:
        """Seconds of silence that count against the worker at ``now``."""
        return max(0.0, now - self._silent_since)
