"""The lease of one worker: the right to write to a channel, which heartbeats renew. Pure: the clock is passed in.

A worker that has been given up must not come back: nothing that it says may count any more. So it asks its lease before
it writes, and waits when it has run out; when nobody renews it then, the worker ends itself.

A heartbeat that arrives proves nothing about the present: it may have waited in a stopped process for an hour. What it
can prove is that whoever sent it had received an *answer before*; it says which. So a lease is counted from the
worker's own last answer that is known to have arrived, by the worker's own clock, and ends before the sender can have
counted as much silence: no clocks are compared.
"""

from __future__ import annotations

import math
from typing import Final

#: Answers that are remembered for each grantor: one that is proven has been given a beat or two before.
_REMEMBERED: Final = 16
#: Between two looks of a loop that knows of no lease yet, in seconds.
_UNKNOWN_S: Final = 1.0


class Lease:
    """Safe for several threads in the way it is used: renewals are rare, and one that is lost comes again.

    Args:
        duration_s: from a proven answer to the end; none before the first renewal.
        grace_s: how long the worker waits for a new one before it ends itself, in time that it ran.
        now: seconds of a steady clock.
    """

    def __init__(self, duration_s: float, grace_s: float, now: float) -> None:
        self.duration_s, self.grace_s = duration_s, grace_s
        self._until = math.inf
        self._answered: dict[tuple[str, int], float] = {}
        self._last_pass = now
        self._lapsed_s = 0.0

    def beat(self, grantor: str, heard: int) -> None:
        """A heartbeat of ``grantor`` has arrived, who has the answer to its beat number ``heard``; 0 for none."""
        if (answered := self._answered.get((grantor, heard))) is not None:
            until = answered + self.duration_s
            self._until = until if self._until == math.inf else max(self._until, until)

    def answered(self, grantor: str, number: int, now: float) -> None:
        """The heartbeat ``number`` of ``grantor``, counted from 1, is being answered."""
        self._answered[grantor, number] = now
        # Several threads answer at times: a copy, and whoever is first.
        for old in [key for key in list(self._answered) if key[0] == grantor and key[1] <= number - _REMEMBERED]:
            self._answered.pop(old, None)

    def valid(self, now: float) -> bool:
        """Whether the worker may write at ``now``."""
        return now < self._until

    def spent(self, now: float, tick_s: float) -> bool:
        """A pass of the loop that watches the lease; returns whether the worker must end itself.

        Once the lease has run out there must be one every ``tick_s``, see :meth:`rest_s`. Time in which the loop itself
        was stopped is not counted: the news may be waiting behind it.
        """
        elapsed_s = min(max(0.0, now - max(self._last_pass, self._until)), 2 * tick_s)
        self._last_pass = now
        self._lapsed_s = 0.0 if self.valid(now) else self._lapsed_s + elapsed_s
        return self._lapsed_s >= self.grace_s

    def rest_s(self, now: float, tick_s: float) -> float:
        """How long the loop may sleep after a pass: up to the lease's end, as far as it is known, or ``tick_s``.

        Before the first renewal no longer than the lease that it brings, and at most a second.
        """
        left_s = self._until - now if self._until < math.inf else min(self.duration_s, _UNKNOWN_S)
        return max(tick_s, left_s)
