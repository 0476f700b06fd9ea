"""Starts, incidents and the shutdown: long, rare, made of phases. All of their spans are kept.

Events arrive in the thread where they happen; the ids of a phase's span are there while it runs, because its calls to
the workers carry them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanContext

from resilient_executor.telemetry import logs, names
from resilient_executor.telemetry.spans import Draft, Ids, Value, root_ids
from resilient_executor.telemetry.steps import cause_error

if TYPE_CHECKING:
    from resilient_executor.lifecycle import Event
    from resilient_executor.supervisor.incidents import Cause, Incident

#: Incidents whose ids are remembered, for steps that were lost in them.
_REMEMBERED: Final = 64


class Operations:
    """Turns the lifecycle's events into drafts. Safe for threads.

    Args:
        executor: its name.
        emit: takes a finished draft.
        opened, closed: told of an incident; ``closed`` gets its root draft, not emitted yet, and the time.
        cause_known: told of an incident's epoch and first cause.
    """

    def __init__(
        self,
        executor: str,
        emit: Callable[[Draft], None],
        cause_known: Callable[[int, Cause | None], None],
        closed: Callable[[Draft, Incident, int], None],
    ) -> None:
        self._executor = executor
        self._emit = emit
        self._cause_known = cause_known
        self._closed = closed
        self._lock = threading.RLock()
        self._root: Draft | None = None
        self._phase: Draft | None = None
        self._last_phase_end_ns = 0
        self._suspect_since_ns = 0
        self._incidents: dict[int, Ids] = {}

    def incident(self, epoch: int) -> SpanContext | None:
        """The span of the incident that has ended ``epoch``, if one has: a shutdown loses steps, too."""
        with self._lock:
            ids = self._incidents.get(epoch)
            return ids.context() if ids is not None else None

    def context(self) -> bytes:
        """The ``traceparent`` of the phase that is going on, or of the operation, or empty."""
        with self._lock:
            draft = self._phase or self._root
            return draft.ids.traceparent() if draft is not None else b""

    def parent(self) -> SpanContext | None:
        """The same as a span's context."""
        with self._lock:
            draft = self._phase or self._root
            return draft.ids.context() if draft is not None else None

    # -- start and shutdown -----------------------------------------------------------------------------------------

    def begin(self, name: str, parent: SpanContext | None) -> None:
        """A start or a shutdown begins."""
        with self._lock:
            self._finish_root("interrupted")
            ids = root_ids(True) if parent is None else Ids(parent.trace_id, root_ids(True).span_id, True)
            self._root = Draft(name, ids, parent, time.time_ns(), attributes={names.EXECUTOR: self._executor})
            logs.set_trace(ids.traceparent())

    def end(self, epoch: int, error: BaseException | None) -> None:
        """It is over."""
        with self._lock:
            logs.set_trace(b"")
            if self._root is not None:
                self._root.attributes[names.EPOCH] = epoch
            self._finish_root(type(error).__name__ if error is not None else "")

    def _finish_root(self, error: str) -> None:
        root, self._root, self._phase = self._root, None, None
        if root is not None:
            root.end_ns, root.error = time.time_ns(), error
            self._emit(root)

    # -- events -----------------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """See :class:`Event`."""
        at_ns = int(event.at * 1e9)
        with self._lock:
            if event.kind == "state":
                suspect = event.state.value == "SUSPECT"
                if suspect or event.state.value == "HEALTHY":
                    self._suspect_since_ns = at_ns if suspect else 0
            elif event.kind == "incident" and event.incident is not None:
                self._open(event.incident, at_ns)
            elif event.kind == "phase_begun":
                logs.identify(event.epoch)
                self._begin_phase(event, at_ns)
            elif event.kind == "phase":
                self._end_phase(event, at_ns)
            elif event.kind in ("recovered", "failed"):
                self._close(event, at_ns)

    def _begin_phase(self, event: Event, at_ns: int) -> None:
        name, root = names.PHASE_PREFIX + event.phase, self._root
        # Without a root it is the compilation at the first step, where ``eager_graph`` is off.
        draft = root.child(name, at_ns) if root is not None else Draft(name, root_ids(True), None, at_ns)
        draft.attributes = {names.EXECUTOR: self._executor, names.PHASE: event.phase, names.EPOCH: event.epoch}
        self._phase = draft

    def _end_phase(self, event: Event, at_ns: int) -> None:
        phase, self._phase = self._phase, None
        self._last_phase_end_ns = at_ns
        if phase is not None:
            phase.end_ns, phase.error = at_ns, event.error
            self._emit(phase)
        if event.phase == "tear_down" and event.incident is not None:
            self._cause_known(event.incident.epoch, event.incident.cause)

    def _open(self, incident: Incident, at_ns: int) -> None:
        self._finish_root("interrupted")
        detected_ns = min(int(incident.detected_at * 1e9), at_ns)
        start_ns = min(detected_ns, self._suspect_since_ns or detected_ns)
        ids = self._incidents[incident.epoch] = root_ids(True)
        if len(self._incidents) > _REMEMBERED:
            del self._incidents[min(self._incidents)]
        root = self._root = Draft(names.INCIDENT_SPAN, ids, None, start_ns)
        root.attributes = {
            names.EXECUTOR: self._executor,
            names.EPOCH: incident.epoch,
            names.INCIDENT: incident.number,
        }
        epoch: dict[str, Value] = {names.EPOCH: incident.epoch}
        if self._suspect_since_ns:
            self._emit(self._child(root, names.SUSPECT_SPAN, start_ns, at_ns, epoch))
        self._emit(self._child(root, names.DETECTION_SPAN, detected_ns, at_ns, epoch))
        logs.set_trace(ids.traceparent())

    def _close(self, event: Event, at_ns: int) -> None:
        root, incident, self._root, self._phase = self._root, event.incident, None, None
        logs.set_trace(b"")
        if root is None or incident is None:
            return
        for piece in incident.evidence:
            marks: dict[str, Value] = {names.SOURCE: piece.source, names.CAUSE: piece.kind.value}
            if piece.rank is not None:
                marks[names.RANK] = piece.rank
            # Its text stays in the incident: it may quote an engine's exception.
            root.events.append((names.EVIDENCE_EVENT, int(piece.at * 1e9), marks))
        root.attributes |= {names.OUTCOME: incident.outcome, names.ATTEMPTS: len(incident.epochs_tried)}
        root.attributes |= cause_attributes(incident.cause)
        root.error = cause_error(incident.cause) if incident.cause is not None else "unknown"
        root.end_ns = at_ns
        if event.kind == "recovered":
            attributes: dict[str, Value] = {names.EPOCH: event.epoch}
            self._emit(self._child(root, names.READMISSION_SPAN, self._last_phase_end_ns, at_ns, attributes))
        self._closed(root, incident, at_ns)

    def _child(self, parent: Draft, name: str, start_ns: int, end_ns: int, attributes: dict[str, Value]) -> Draft:
        draft = parent.child(name, start_ns, end_ns)
        draft.attributes = {names.EXECUTOR: self._executor} | attributes
        return draft

    # -- in the workers ---------------------------------------------------------------------------------------------

    def worker_calls(
        self,
        method: str,
        epoch: int,
        times: Mapping[int, tuple[int, int]],
        error: str,
        identities: Mapping[int, dict[str, Value]],
    ) -> None:
        """What the workers did in the phase that is going on: rank -> begin and end in ns."""
        with self._lock:
            if self._phase is None:
                return
            for rank, (began_ns, ended_ns) in times.items():
                attributes: dict[str, Value] = {
                    **identities.get(rank, {}),
                    names.EPOCH: epoch,
                    names.RANK: rank,
                    names.OUTCOME: "raised" if error else "ok",
                }
                draft = self._child(self._phase, names.WORKER_PREFIX + method, began_ns, ended_ns, attributes)
                draft.error = error
                self._emit(draft)


def cause_attributes(cause: Cause | None) -> dict[str, Value]:
    """A first cause as attributes, without its text, which may quote an engine's exception."""
    if cause is None:
        return {}
    known: dict[str, Value | None] = {
        names.CAUSE: cause.kind.value,
        names.RANK: cause.rank,
        names.PID: cause.pid,
        names.NODE: cause.node_id or None,
        names.CAUSE_SIGNAL: cause_error(cause) if cause.signal is not None else None,
        names.CAUSE_EXIT_CODE: cause.exit_code,
        names.CAUSE_DOING: cause.doing or None,
    }
    return {name: value for name, value in known.items() if value is not None}
