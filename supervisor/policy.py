"""How often a group is rebuilt before it is given up, and how long to wait before each try. Pure, the clock included.

Two counts, for two questions:

* *Give up?* Restart intensity, after Erlang/OTP: more than ``max_restarts`` rebuilds in ``window_s`` and it is over.
  The window is measured in **time of service**: its clock stands still while nothing is served. Measured by the wall
  clock, a permanent fault whose every rebuild takes long (a model that loads for minutes and crashes at its first step)
  would never exceed the intensity, and would be restarted for ever. As time of service is never longer than time on the
  wall, no window of wall time holds more than ``max_restarts`` rebuilds either.
* *How long to pause?* The first rebuild after a quiet period starts at once. Those that follow wait, twice as long each
  time up to a cap, with jitter, so that several groups on one sick cluster do not rebuild in step. A rebuild that then
  served for ``quiet_s`` ends the streak: what counts is failures in a row, not the sum of a month.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

#: The pause is drawn from this fraction of its full length up to all of it.
JITTER_FLOOR: Final = 0.5


@dataclass(frozen=True)
class Decision:
    """What to do about a failure.

    Attributes:
        action: rebuild after the pause, or give up for good.
        pause_s: seconds to wait before the rebuild; 0.0 when giving up.
        reason: one line for people.
    """

    action: Literal["rebuild", "give_up"]
    pause_s: float
    reason: str


@dataclass(frozen=True)
class BudgetSnapshot:
    """The budget as shown in status and metrics.

    Attributes:
        used: rebuilds that count against the window.
        max_restarts: how many may.
        window_s: the window, in seconds of service.
        streak: rebuilds since the last quiet period; sets the next pause.
        given_up: whether the budget is spent. It stays so.
    """

    used: int
    max_restarts: int
    window_s: float
    streak: int
    given_up: bool


class RestartBudget:
    """Decides on each failure. Owned by one thread; not safe for several.

    Args:
        max_restarts: rebuilds allowed in the window; 0 gives up at the first failure.
        window_s: the window, in seconds of service.
        backoff_initial_s: full length of the pause before the second rebuild of a streak.
        backoff_max_s: cap of the full length.
        quiet_s: seconds of uninterrupted service that end a streak; None takes ``window_s``.
        rng: source of the jitter; give a seeded one for a repeatable run.

    Raises:
        ValueError: a limit is negative, or a duration is not positive.
    """

    def __init__(
        self,
        *,
        max_restarts: int,
        window_s: float,
        backoff_initial_s: float,
        backoff_max_s: float,
        quiet_s: float | None = None,
        rng: random.Random | None = None,
    ) -> None:
        quiet_s = window_s if quiet_s is None else quiet_s
        if max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, but is {max_restarts}")
        if min(window_s, quiet_s, backoff_initial_s) <= 0 or backoff_max_s < backoff_initial_s:
            raise ValueError("durations must be positive, and backoff_max_s at least backoff_initial_s")
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._backoff_initial_s = backoff_initial_s
        self._backoff_max_s = backoff_max_s
        self._quiet_s = quiet_s
        self._rng = rng if rng is not None else random.Random()
        #: Seconds served until the last failure; the clock of the window.
        self._served_s = 0.0
        self._serving_since: float | None = None
        #: The service clock at each rebuild that may still count.
        self._rebuilds: deque[float] = deque()
        self._streak = 0
        self._given_up = False

    def note_success(self, now: float) -> None:
        """Say that the group serves from ``now`` on (seconds, any steady clock). Repeating it changes nothing."""
        if self._serving_since is None:
            self._serving_since = now

    def decide(self, now: float) -> Decision:
        """Decide on a failure at ``now``, and count the rebuild if there will be one.

        Call it once for each failure, rebuilds that fail included. Once it has given up it always will.
        """
        served_s = self._stop_serving(now)
        if served_s >= self._quiet_s:
            self._streak = 0
        self._forget_old(self._served_s)
        if self._given_up or len(self._rebuilds) >= self._max_restarts:
            self._given_up = True
            return Decision("give_up", 0.0, self._spent())
        pause_s = self._draw_pause()
        self._rebuilds.append(self._served_s)
        self._streak += 1
        count = f"rebuild {len(self._rebuilds)} of at most {self._max_restarts} in {self._window_s:g} s of service"
        when = "at once" if pause_s == 0 else f"after a pause of {pause_s:.1f} s"
        return Decision("rebuild", pause_s, f"{count}, {when}")

    def snapshot(self, now: float | None = None) -> BudgetSnapshot:
        """Return the budget as of ``now``, or as of the last failure when ``now`` is None."""
        clock = self._served_s
        if now is not None and self._serving_since is not None:
            clock += max(0.0, now - self._serving_since)
        used = sum(1 for at in self._rebuilds if clock - at < self._window_s)
        quiet = clock - self._served_s >= self._quiet_s
        return BudgetSnapshot(used, self._max_restarts, self._window_s, 0 if quiet else self._streak, self._given_up)

    def _stop_serving(self, now: float) -> float:
        """Stop the service clock; returns the length of the service that ended (0.0 when there was none)."""
        if self._serving_since is None:
            return 0.0
        served_s = max(0.0, now - self._serving_since)
        self._served_s += served_s
        self._serving_since = None
        return served_s

    def _forget_old(self, clock: float) -> None:
        while self._rebuilds and clock - self._rebuilds[0] >= self._window_s:
            self._rebuilds.popleft()

    def _draw_pause(self) -> float:
        if self._streak == 0:
            return 0.0
        # The exponent is bounded before the power is taken: a float overflows at 2 ** 1024.
        full_s = min(self._backoff_max_s, self._backoff_initial_s * 2.0 ** min(self._streak - 1, 512))
        return full_s * self._rng.uniform(JITTER_FLOOR, 1.0)

    def _spent(self) -> str:
        if self._max_restarts == 0:
            return "no rebuild is allowed (max_restarts is 0)"
        return (
            f"the restart budget is spent: {self._max_restarts} rebuilds within {self._window_s:g} s of service did "
            "not help (max_restarts, restart_window_s)"
        )
