"""How heartbeats went since somebody asked last, for metrics. Pure: the clock is passed in."""

from __future__ import annotations

from collections import deque
from typing import Final

#: Round trips that are kept for each rank while nobody asks.
_KEPT: Final = 64


class Pulse:
    """Round trips and silence of each worker of one epoch."""

    def __init__(self) -> None:
        self._round_trips: dict[int, deque[float]] = {}
        self._heard: dict[int, float] = {}

    def heard(self, rank: int, now: float, round_trip_s: float) -> None:
        """A heartbeat was answered at ``now``."""
        self._round_trips.setdefault(rank, deque(maxlen=_KEPT)).append(round_trip_s)
        self._heard[rank] = now

    def take(self, now: float) -> dict[int, tuple[list[float], float]]:
        """Rank -> round trips since the last call, and seconds since the last answer."""
        taken = {rank: (list(self._round_trips.get(rank, ())), max(0.0, now - at)) for rank, at in self._heard.items()}
        self._round_trips.clear()
        return taken
