"""Finding the request that kills its workers, so that the others need not die with it. Pure.

A request is suspected when its workers have died twice with it in flight and it has made no progress in between. The
suspects are then tried apart, one at a time and all alone. One that gets on, alone, is cleared. One that takes its
workers along, alone, is convicted: at once if the process ended by its own doing (a segmentation fault, an abort, an
exit), after four times if it was killed from outside or nobody knows, because that may be a coincidence. Where somebody
kills workers in their rebuilds as well, which no request can do, such deaths prove nothing and count from one again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from resilient_executor.supervisor.incidents import CauseKind

if TYPE_CHECKING:
    from resilient_executor.supervisor.incidents import Cause, Incident

#: Deaths alone that convict where the death may have come from outside.
_COINCIDENCE: Final = 4
#: For a cause to become known, in seconds, and between two looks.
_CAUSE_S: Final = 15.0
_CAUSE_LOOK_S: Final = 0.01
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class _Record:
    """What is held against a request.

    Attributes:
        progress: its number of output tokens when its workers last died.
        deaths: how many times in a row they have died at that very point.
        alone: how many of those times it was alone.
    """

    progress: int
    deaths: int = 1
    alone: int = 0


class Quarantine:
    """Counts deaths, and says who must be tried apart. Owned by the engine's thread.

    Args:
        suspect_after: deaths in a row without progress that make a suspect; 0 never suspects anybody.
    """

    def __init__(self, suspect_after: int) -> None:
        self._suspect_after = suspect_after
        self._records: dict[str, _Record] = {}
        self._suspects: list[str] = []

    @property
    def on_trial(self) -> str | None:
        """The request that must run alone now, or None."""
        return self._suspects[0] if self._suspects else None

    def died(self, in_flight: Iterable[tuple[str, int]], cause: Cause | None, stormy: bool = False) -> str | None:
        """Workers have died.

        Args:
            in_flight: (request id, number of output tokens) of every request that was in flight, oldest first.
            cause: the first cause of their death, or None if it is not known.
            stormy: workers have died in the rebuild before it, too; see :func:`died_in_rebuild`.

        Returns:
            the request that is convicted of it, or None. It is no longer held.
        """
        if self._suspect_after == 0 or (cause is not None and cause.kind is CauseKind.NODE_LOSS):
            return None
        present = dict(in_flight)
        alone = self.on_trial if self.on_trial in present and len(present) == 1 else None
        for request_id, progress in present.items():
            record = self._records.get(request_id)
            if record is None or record.progress != progress:
                self._records[request_id] = _Record(progress)
            else:
                record.deaths += 1
        if alone is not None:
            self._records[alone].alone = 1 if stormy else self._records[alone].alone + 1
            if self._records[alone].alone >= (1 if _own_doing(cause) else _COINCIDENCE):
                self.acquit_all()
                return alone
            return None
        # The newest are the most likely: what runs now began to fail when they came.
        for request_id in reversed(present):
            if self._records[request_id].deaths >= self._suspect_after and request_id not in self._suspects:
                self._suspects.append(request_id)
        return None

    def progressed(self, request_id: str, progress: int) -> bool:
        """The request on trial has run. Returns whether it is cleared by that."""
        record = self._records.get(request_id)
        if request_id != self.on_trial or (record is not None and record.progress == progress):
            return False
        self.forget(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """The request is cleared, or it has ended."""
        self._records.pop(request_id, None)
        if request_id in self._suspects:
            self._suspects.remove(request_id)

    def acquit_all(self) -> None:
        """The culprit is found: nothing is held against anybody."""
        self._records.clear()
        self._suspects.clear()


def _own_doing(cause: Cause | None) -> bool:
    """Whether the process certainly ended by itself."""
    if cause is None:
        return False
    if cause.signal is not None:
        return cause.signal not in _FROM_OUTSIDE
    return cause.exit_code is not None


def await_cause(incidents: Callable[[], Sequence[Incident]], epoch: int, timeout_s: float = _CAUSE_S) -> Cause | None:
    """What the workers of an epoch died of.

    An engine hears of a lost step before there is an incident, and of the first cause it is certain only when what is
    left of the epoch has been fenced.

    Args:
        incidents: gives those of the executor so far, oldest first.
        epoch: the one that died.
        timeout_s: how long to wait for it.

    Returns:
        the cause, or None if it has not become known.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for incident in reversed(incidents()):
            if incident.epoch == epoch and (incident.cause is not None or incident.outcome != "open"):
                return incident.cause
        time.sleep(_CAUSE_LOOK_S)
    return None


def died_in_rebuild(incidents: Sequence[Incident], epoch: int) -> bool:
    """Whether the rebuild that has made ``epoch`` took more than one attempt: a killer is about that is no request."""
    return any(len(one.epochs_tried) > 1 and one.epochs_tried[-1] == epoch for one in incidents)
