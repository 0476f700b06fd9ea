"""What new workers must be told about live requests. Pure.

vLLM sends a request's data once, when it is scheduled for the first time; afterwards only what has changed. Workers
that have replaced others know nothing of it. The ledger keeps what was sent, for as long as the request lives, and says
for each step which of its requests the workers that will run it have never seen.

It follows the engine's view, not the workers': a step is planned for the workers that the engine believes in. When the
engine learns that they are gone (:meth:`RequestLedger.lost`), all requests count as unknown. Steps that were planned
before that are lost with the old workers, whatever they carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

D = TypeVar("D")


class RequestLedger(Generic[D]):
    """Data of live requests by request id. Owned by the engine's thread; not safe for several."""

    def __init__(self) -> None:
        self._data: dict[str, D] = {}
        self._known: set[str] = set()

    def plan(self, *, finished: Iterable[str], new: Mapping[str, D], cached: Iterable[str]) -> list[D]:
        """Take note of a step, in the order in which a worker reads it: finished requests, then new, then cached ones.

        Args:
            finished: requests that the step reports as finished. An id may be used again by a new one of the same step.
            new: request id -> data of requests that the step brings in full.
            cached: requests that the step takes for known.

        Returns:
            the data of those ``cached`` ones that the workers have not seen, in their order. They count as seen from
            now on.

        Raises:
            KeyError: a cached request has never been sent in full.
        """
        for request_id in finished:
            self._data.pop(request_id, None)
            self._known.discard(request_id)
        self._data.update(new)
        self._known.update(new)
        unknown = [request_id for request_id in cached if request_id not in self._known]
        self._known.update(unknown)
        return [self._data[request_id] for request_id in unknown]

    def lost(self) -> None:
        """All workers are gone: whoever runs the next step has seen no request."""
        self._known.clear()

    def amend(self, request_id: str, data: D) -> None:
        """Replace the data of a live request by fuller data."""
        if request_id in self._data:
            self._data[request_id] = data

    def get(self, request_id: str) -> D | None:
        """The data of a live request, or None."""
        return self._data.get(request_id)

    def __len__(self) -> int:
        """Number of live requests."""
        return len(self._data)
