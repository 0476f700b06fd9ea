"""Moments at which everything periodic in a process happens together.

A process that has rested for a while pays for being woken, far more than for what it then does: on a small machine a
millisecond and more against some tens of microseconds. So what need not have a beat of its own shares one.
"""

from __future__ import annotations

import math
import time
from typing import Final

#: Each process has its own: those of one machine need not all wake up at once.
_ORIGIN: Final = time.monotonic()
#: Part of a period: a timer may fire so early, and still belongs to the moment that it was set for.
_EARLY: Final = 0.01


def until_tick(period_s: float, now: float) -> float:
    """Seconds from ``now``, of ``time.monotonic``, to the next moment; more than 0, and hardly more than a period."""
    passed = (now - _ORIGIN) / period_s
    return (math.floor(passed + _EARLY) + 1 - passed) * period_s


def rest_s(period_s: float, began: float, now: float) -> float:
    """How long a loop may rest at ``now`` whose round began at ``began``: to the next moment, a period at most."""
    return max(0.0, min(period_s - (now - began), until_tick(period_s, now)))


def last_tick(period_s: float, now: float, until: float) -> float:
    """The last moment in the time from ``now`` to ``until``; where there is none, ``until``."""
    tick = until + until_tick(period_s, until) - period_s
    return tick if now < tick < until else until
