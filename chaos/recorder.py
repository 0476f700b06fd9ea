"""Records what happens: one line of JSON for each thing, in the order in which it was seen, in one file.

Each line has ``n`` (its number, from 0), ``t`` (seconds since the Unix epoch) and ``kind``. Kinds, with their fields:

=============  ========================================================================================================
``run``        the head: seed, engine, command, settings that bounds follow from
``oracle``     ``workload``, ``tokens``, ``finish``: what an undisturbed run gives for it
``request``    ``id``, ``workload``: taken in
``token``      ``id``, ``index``, ``token``: reached the client
``end``        ``id``, ``finish``, ``error``
``retry``      ``lost_steps``: so many steps were lost, and their requests are computed again
``fault``      ``number``, ``fault``, ``epoch``, ``ranks``, ``victims``, ``felt``, ``expect``, ``detect_s``: carried out
``state``      ``state``, ``epoch``, ``phase``
``phase``      ``phase``, ``epoch``, ``duration_s``, ``error``: one phase of a rebuild is over
``incident``   ``number``, ``epoch``, ``detected_at``: opened
``resolved``   ``number``, ``outcome``, ``cause``, ``cause_kind``, ``duration_s``: over
``health``     ``began``, ``ok``, ``why``: the answer of a health check, which was asked at ``began``
``rpc``        ``error``: the answer of a collective RPC that does no harm
``holdings``   ``when`` (``before``, ``during``, ``after``), ``things`` by kind, ``rss_mb``, ``epoch``
``stop``       the end of the history, with nothing lost behind it
=============  ========================================================================================================
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resilient_executor import Event, Incident
from resilient_executor.chaos.control import Strike

Line = dict[str, Any]


class Recorder:
    """Writes one history. Safe for several threads; a line is in the file's buffer when ``note`` returns.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._number = 0
        self._resolved: set[int] = set()
        self.path = path

    def note(self, kind: str, **fields: Any) -> None:
        """Write one line; after the end nothing is written any more."""
        with self._lock:
            if self._file.closed:
                return
            line = {"n": self._number, "t": round(time.time(), 6), "kind": kind, **fields}
            self._number += 1
            self._file.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")
            if kind != "token":
                self._file.flush()

    def on_event(self, event: Event) -> None:
        """A listener for ``ResilientExecutor.add_listener``."""
        if event.kind == "state":
            self.note("state", state=event.state.value, epoch=event.epoch, phase=event.phase)
        elif event.kind == "phase":
            fields = {"epoch": event.epoch, "duration_s": round(event.duration_s, 4), "error": event.error}
            self.note("phase", phase=event.phase, **fields)
        elif event.kind == "incident" and event.incident is not None:
            incident = event.incident
            self.note("incident", number=incident.number, epoch=incident.epoch, detected_at=incident.detected_at)
        elif event.kind in ("recovered", "failed") and event.incident is not None:
            self._on_resolved(event.incident)

    def _on_resolved(self, incident: Incident) -> None:
        cause = incident.cause
        self.note(
            "resolved",
            number=incident.number,
            outcome=incident.outcome,
            cause=cause.describe() if cause is not None else "unknown",
            cause_kind=cause.kind.value if cause is not None else "unknown",
            duration_s=incident.duration_s,
        )

    def on_strike(self, strike: Strike) -> None:
        """A fault was carried out."""
        fault = strike.fault
        self.note(
            "fault",
            number=strike.number,
            at=strike.at,
            fault=fault.to_json(),
            text=fault.describe(),
            epoch=strike.epoch,
            ranks=strike.ranks,
            victims=strike.victims,
            felt=fault.felt,
            expect=fault.traits.expect.value,
            detect_s=fault.traits.detect_s,
        )

    def close(self) -> None:
        """Write the last line; twice is fine."""
        self.note("stop")
        with self._lock:
            self._file.close()


def read(path: Path) -> list[Line]:
    """The lines of a history; a last line that was cut off (the recorder was killed) is left out.

    Raises:
        ValueError: a line inside it is none.
    """
    lines: list[Line] = []
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts) - 1:
                raise ValueError(f"{path}: line {number + 1} is no JSON") from None
    return lines


def of_kind(history: Iterable[Line], kind: str) -> list[Line]:
    """The lines of one kind."""
    return [line for line in history if line["kind"] == kind]
