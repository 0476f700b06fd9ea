"""The record of a demo: what the client got, what was done to the workers, what the executor did about it.

Written by several threads (the client's, the killer's, and the executor's through its listener), read by the display
and by the final report. Nothing in it waits, prints or decides.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from resilient_executor.lifecycle import Event, ExecutorState
from resilient_executor.reference.demo.plan import DemoOptions, DemoRequest, Moment, PlannedKill
from resilient_executor.reference.demo.verdict import Answer
from resilient_executor.reference.request import FinishReason, TokenEvent
from resilient_executor.supervisor.incidents import Cause, Incident

#: Phases of a rebuild, in order.
PHASES: Final = (
    "fence",
    "tear_down",
    "place",
    "spawn",
    "rank",
    "initialise",
    "load",
    "replay",
    "compile",
    "warm_up",
)


@dataclass
class Kill:
    """One kill as it was carried out.

    Attributes:
        at: when the signal was sent, seconds since the Unix epoch.
        epoch: the epoch that it hit.
        phase: of the start or rebuild that it met, or "" in service.
        tokens: tokens since service had begun (again).
        signal: what ended the process, as far as the kernel tells.
        delivered: whether the process has ended by it.
        noticed_at: when the executor knew of it, or None.
    """

    planned: PlannedKill
    rank: int
    pid: int
    at: float
    epoch: int
    phase: str
    tokens: int
    signal: int | None = None
    delivered: bool = False
    noticed_at: float | None = None

    @property
    def noticed_after_s(self) -> float | None:
        """From the signal to the executor's first sign of it."""
        return None if self.noticed_at is None else max(0.0, self.noticed_at - self.at)

    def describe(self) -> str:
        """When it came, for instance ``after 132 tokens, in service``."""
        if self.phase:
            return f"in the rebuild, phase {phase_name(self.phase)}, epoch {self.epoch}"
        return f"in service, after {self.tokens} tokens"


@dataclass
class PhaseRecord:
    """One phase of the rebuild that is shown."""

    name: str
    began: float
    took_s: float | None = None


@dataclass
class Rebuild:
    """The newest rebuild, as far as it has come."""

    incident: Incident
    attempt: int = 1
    phases: list[PhaseRecord] = field(default_factory=list)
    cause_told: bool = False
    ended_after_s: float | None = None


@dataclass(frozen=True)
class Line:
    """One line of the account.

    Attributes:
        mark: ``kill``, ``alarm``, ``good``, ``bad``, ``log`` or "" for plain news.
    """

    at: float
    text: str
    mark: str = ""


@dataclass(frozen=True)
class Snapshot:
    """What the display shows at one moment. ``answers`` are copies; the rest is not changed any more, or only grows."""

    at: float
    began: float
    chapter: str
    chapter_began: float
    state: ExecutorState | None
    epoch: int
    phase: str
    kills: tuple[Kill, ...]
    kills_planned: int
    tensor_parallel_size: int
    requests: tuple[DemoRequest, ...]
    answers: tuple[Answer, ...]
    expected: tuple[Answer, ...]
    token_times: tuple[float, ...]
    rebuild: Rebuild | None


class Story:
    """See the module's text. Every method may be called from any thread; listeners of ``changed`` wait in it.

    Attributes:
        changed: notified at every token, event and kill.
    """

    def __init__(self, options: DemoOptions, requests: Sequence[DemoRequest], node_id: Callable[[], str]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.began = time.time()
        self.requests = tuple(requests)
        self.kills_planned = options.kills
        self._tensor_parallel_size = options.tensor_parallel_size
        self.expected: list[Answer] = []
        self.rounds: list[list[Answer]] = []
        self.kills: list[Kill] = []
        #: When each token came, seconds since the Unix epoch; of all runs.
        self.token_times: list[float] = []
        self.trouble = ""
        self.state: ExecutorState | None = None
        self.epoch = 0
        #: Newest epoch that has been in service, and the tokens that came since.
        self.served_epoch = 0
        self.tokens_in_service = 0
        self.phases_begun: list[tuple[int, str]] = []
        self._node_id = node_id
        self._chapter, self._chapter_began = "starting", self.began
        self._phase = ""
        self._answers: list[Answer] = []
        self._rebuild: Rebuild | None = None
        self._silent_since: float | None = None
        self._lines: deque[Line] = deque()
        self._disturbed_from = 0

    # -- the account ------------------------------------------------------------------------------------------------

    def say(self, text: str, mark: str = "") -> None:
        """Add a line."""
        self._lines.append(Line(time.time(), text, mark))

    def take_lines(self) -> list[Line]:
        """The lines that nobody has taken yet."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines

    def enter(self, chapter: str) -> None:
        """Begin a chapter: it is shown with a clock of its own."""
        with self.changed:
            self._chapter, self._chapter_began = chapter, time.time()

    # -- the client -------------------------------------------------------------------------------------------------

    def begin_round(self, *, disturbed: bool) -> list[Answer]:
        """Begin to answer all requests; the undisturbed round is the one that others are compared with."""
        answers = [Answer() for _ in self.requests]
        with self.changed:
            self._answers = answers
            if disturbed:
                self.rounds.append(answers)
            else:
                self.expected = answers
        return answers

    def begin_disturbed_run(self) -> None:
        """Count tokens, for the moments of kills and for the report, from here."""
        with self.changed:
            self.tokens_in_service = 0
            self._disturbed_from = len(self.token_times)

    def token(self, answer: Answer, event: TokenEvent) -> None:
        """Take what the engine gave for one request."""
        now = time.time()
        with self.changed:
            answer.text += event.text_delta
            if event.finish_reason is not None:
                answer.finish = event.finish_reason.value
                if event.finish_reason is FinishReason.ERROR:
                    answer.error = f"{type(event.error).__name__}: {event.error}"
            if event.token_id is not None:
                answer.token_ids.append(event.token_id)
                answer.positions.append(event.index)
                self.token_times.append(now)
                self.tokens_in_service += 1
                if self._silent_since is not None and self.state is ExecutorState.HEALTHY:
                    silence, self._silent_since = now - self._silent_since, None
                    self.say(f"the answers go on; nothing had come for {silence:.1f} s", "good")
            self.changed.notify_all()

    # -- the killer -------------------------------------------------------------------------------------------------

    def kill_begins(self, planned: PlannedKill, rank: int, pid: int) -> Kill:
        """Note a kill right before its signal is sent, so that it is known before its consequences are."""
        with self.changed:
            phase = "" if self.state is ExecutorState.HEALTHY else self._phase or "detection"
            kill = Kill(planned, rank, pid, time.time(), self.epoch, phase, self.tokens_in_service)
            self.kills.append(kill)
            whom = f"rank {rank} (pid {pid})"
            self.say(f"kill {planned.number} of {self.kills_planned}: SIGKILL to {whom}, {kill.describe()}", "kill")
        return kill

    def kill_ended(self, kill: Kill, *, delivered: bool, signal: int | None) -> None:
        """Note what became of it."""
        with self.changed:
            kill.delivered, kill.signal = delivered, signal
            self.changed.notify_all()

    @property
    def last_kill_epoch(self) -> int:
        """The epoch that the newest kill hit; 0 before the first."""
        with self.changed:
            return self.kills[-1].epoch if self.kills else 0

    # -- the executor -----------------------------------------------------------------------------------------------

    def executor_started(self, state: ExecutorState, epoch: int) -> None:
        """The executor serves for the first time."""
        with self.changed:
            self.state, self.epoch, self.served_epoch = state, epoch, epoch

    def on_event(self, event: Event) -> None:
        """The executor's listener."""
        with self.changed:
            self.state, self.epoch = event.state, event.epoch
            if event.kind == "state" and event.state is ExecutorState.HEALTHY:
                self.served_epoch, self.tokens_in_service = event.epoch, 0
            elif event.kind == "incident" and event.incident is not None:
                self._on_incident(event.incident)
            elif event.kind == "phase_begun":
                self._on_phase_begun(event)
            elif event.kind == "phase":
                self._phase = ""
                if self._rebuild is not None and self._rebuild.phases:
                    self._rebuild.phases[-1].took_s = event.duration_s
            elif event.kind == "recovered":
                self._on_recovered(event)
            elif event.kind == "failed":
                self.trouble = "the executor has failed for good"
                self.say(f"{self.trouble}: {event.incident.headline() if event.incident else ''}", "bad")
            self.changed.notify_all()

    def _on_incident(self, incident: Incident) -> None:
        self._rebuild = Rebuild(incident)
        self._silent_since = self.token_times[-1] if self.token_times else None
        after = self._noticed(incident.epoch, incident.detected_at)
        self.say(f"incident {incident.number}: noticed{after}; epoch {incident.epoch} is given up", "alarm")

    def _on_phase_begun(self, event: Event) -> None:
        self._phase = event.phase
        self.phases_begun.append((event.epoch, event.phase))
        rebuild = self._rebuild
        if rebuild is None or event.incident is not rebuild.incident:
            return
        if event.phase == "fence" and rebuild.phases:
            rebuild.attempt += 1
            rebuild.phases.clear()
            after = self._noticed(event.epoch, event.at)
            self.say(f"epoch {event.epoch} died before it served, noticed{after}; once more", "alarm")
        rebuild.phases.append(PhaseRecord(event.phase, event.at))
        if event.phase == "tear_down" and rebuild.incident.cause is not None and not rebuild.cause_told:
            rebuild.cause_told = True
            took = rebuild.phases[0].took_s or 0.0
            self.say(f"first cause: {self.describe(rebuild.incident.cause)}; all proven gone after {took:.2f} s")

    def _on_recovered(self, event: Event) -> None:
        rebuild = self._rebuild
        if rebuild is None:
            return
        rebuild.ended_after_s = event.duration_s
        attempts = f" in {rebuild.attempt} attempts" if rebuild.attempt > 1 else ""
        self.say(f"epoch {event.epoch} serves, {event.duration_s:.1f} s after the first sign{attempts}", "good")

    def _noticed(self, epoch: int, at: float) -> str:
        """Note when the kills of an epoch were noticed; returns it as a text."""
        text = ""
        for kill in self.kills:
            if kill.epoch == epoch and kill.noticed_at is None:
                kill.noticed_at = at
                text = f" {1000 * (kill.noticed_after_s or 0.0):.0f} ms after the kill"
        return text

    def describe(self, cause: Cause) -> str:
        """A cause in one line; its node is left out where there is only one."""
        if cause.node_id == self._node_id():
            cause = dataclasses.replace(cause, node_id="", node_ip="")
        return cause.describe()

    # -- the readers ------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether every kill so far has been recovered from, and tokens have come since."""
        with self.changed:
            return (
                self.state is ExecutorState.HEALTHY
                and self.served_epoch > self.last_kill_epoch
                and self.tokens_in_service > 0
            )

    def snapshot(self, window_s: float) -> Snapshot:
        """What is to be shown now, with the times of the tokens of the last ``window_s`` seconds."""
        now = time.time()
        with self.changed:
            recent = len(self.token_times)
            while recent and self.token_times[recent - 1] > now - window_s:
                recent -= 1
            return Snapshot(
                at=now,
                began=self.began,
                chapter=self._chapter,
                chapter_began=self._chapter_began,
                state=self.state,
                epoch=self.epoch,
                phase=self._phase,
                kills=tuple(self.kills),
                kills_planned=self.kills_planned,
                tensor_parallel_size=self._tensor_parallel_size,
                requests=self.requests,
                answers=tuple(dataclasses.replace(one, token_ids=list(one.token_ids)) for one in self._answers),
                expected=tuple(self.expected) if self.rounds else (),
                token_times=tuple(self.token_times[recent:]),
                rebuild=dataclasses.replace(
                    self._rebuild, phases=[dataclasses.replace(phase) for phase in self._rebuild.phases]
                )
                if self._rebuild is not None
                else None,
            )

    @property
    def disturbed_times(self) -> list[float]:
        """When the tokens of the disturbed run came."""
        return self.token_times[self._disturbed_from :]

    def longest_silence(self, since: float, until: float) -> float | None:
        """The longest time between two tokens that reaches into ``since`` .. ``until``, in seconds.

        Around an incident this is what the client felt of it: a token of the old epoch may still be on its way when the
        kill comes, so the moment of the kill itself is not where the silence begins.
        """
        times = self.disturbed_times
        gaps = [after - before for before, after in itertools.pairwise(times) if before <= until and after >= since]
        return max(gaps, default=None)


def phase_name(phase: str) -> str:
    """A phase as it is shown."""
    return phase.replace("_", " ")


def planned_text(planned: PlannedKill) -> str:
    """A planned kill in one line, for the report."""
    if planned.moment is Moment.IN_REBUILD:
        return f"rank {planned.rank}, in phase {phase_name(planned.phase)} of the next rebuild"
    return f"rank {planned.rank}, {planned.after_tokens} tokens after service begins"
