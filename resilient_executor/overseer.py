"""Turns news into verdicts: which epoch is dying, and of what. One thread carries the verdicts out.

News comes from four sides: the supervisor's findings, the graph's errors, the errors of calls, and workers' own
exceptions. An exception of a worker is held against the supervisor's word before anybody believes it: a broken
collective looks like an application error, and arrives before the news of the death that broke it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import ExecutorFailed
from resilient_executor.lifecycle import FINAL, ExecutorState, Generation, Lifecycle, RpcInHand
from resilient_executor.recovery import Recovery
from resilient_executor.settling import CallSettling, Outcome, Settling, StepSettling, spoilt
from resilient_executor.supervisor.actor import Examination, Finding
from resilient_executor.supervisor.client import SLOW_S, Supervision, SupervisorUnreachable
from resilient_executor.supervisor.incidents import SUPERVISOR, CauseKind, Evidence, Incident, RankExit
from resilient_executor.supervisor.progress import DriverView

logger = logging.getLogger(__name__)

#: How long an exception is held, at most, while every worker is asked whether it lives.
HOLD_S: Final = 2.0
#: Between two looks at whether a group has come back into step.
_SETTLE_LOOK_S: Final = 0.02


@dataclass(frozen=True)
class _Rebuild:
    generation: Generation


@dataclass(frozen=True)
class _Settle:
    """A worker raised; see whether its peers come out of what they were doing with it.

    Attributes:
        generation: of the worker.
        what: it raised in.
        followed: whether more has been sent to the workers behind that, and its outcome is not believed yet.
    """

    generation: Generation
    what: Settling
    followed: Callable[[], bool]


class Overseer:
    """Condemns generations and has them replaced. Implements the pipelines' ``Judge``."""

    def __init__(self, config: ExecutorConfig, lifecycle: Lifecycle) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._recovery: Recovery | None = None
        self._supervision: Supervision | None = None
        self._lock = threading.RLock()
        self._work: queue.SimpleQueue[_Rebuild | _Settle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="resilient-executor-overseer", daemon=True)

    def start(self, recovery: Recovery, supervision: Supervision) -> None:
        """Start the first generation in this thread, then the overseer's own thread.

        Raises:
            StartupError: the first generation could not be started.
        """
        self._recovery, self._supervision = recovery, supervision
        recovery.start(self, self._commit)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; a rebuild in progress is given up. Returns whether it has ended in time."""
        if self._recovery is not None:
            self._recovery.stopping.set()
        current = self._lifecycle.current
        if current is not None and current.group is not None:
            current.group.abandoned = "the executor is being shut down"
        self._work.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- verdicts ---------------------------------------------------------------------------------------------------

    def _commit(self, generation: Generation, ends: Incident | None = None) -> bool:
        """Put a built generation into service, unless it has been condemned on the way; that ends the incident."""
        with self._lock:
            if generation.condemned:
                return False
            generation.served = True
            return self._lifecycle.move(ExecutorState.HEALTHY, serving=generation, ends=ends)

    def condemn(self, generation: Generation, evidence: Evidence, own_exit: RankExit | None = None) -> None:
        """End an epoch: from here on, nothing of it is believed. What else is known of its end is kept, too."""
        with self._lock:
            if evidence in generation.evidence:
                return
            generation.evidence.append(evidence)
            if generation.incident is not None:
                generation.incident.add(evidence)
                generation.incident.report = generation.incident.report or generation.report
            if own_exit is not None and all(own_exit.status.pid != one.status.pid for one in generation.exits):
                generation.exits.append(own_exit)
            if generation.condemned:
                return
            self._note_doing(generation)
            if generation.served and self._lifecycle.state not in FINAL:
                self._open_incident(generation)  # first: whoever sees what follows finds it
            generation.condemned = True
            if generation.group is not None:
                generation.group.abandoned = f"the epoch was given up ({evidence.text})"
            if generation.pipeline is not None:
                generation.pipeline.condemn(None)
            generation.calm.set()  # last: whoever waits for it looks next at whether the generation is condemned
            if generation.incident is not None and self._lifecycle.move(ExecutorState.RECOVERING):
                self._work.put(_Rebuild(generation))

    def _open_incident(self, dead: Generation) -> None:
        incident = dead.incident = self._lifecycle.open_incident(dead.epoch, dead.evidence[0].at)
        for evidence in dead.evidence:
            incident.add(evidence)
        incident.report = dead.report

    def _note_doing(self, generation: Generation) -> None:
        step = generation.pipeline.oldest_step if generation.pipeline is not None else -1
        activity = (
            f"step {step}" if step >= 0 else generation.rpc or ("idle" if generation.served else self._lifecycle.phase)
        )
        for rank in range(self._config.world_size):
            generation.doing.setdefault(rank, activity)

    def view(self, epoch: int) -> DriverView:
        """What is known here of an epoch, for its supervisor."""
        generation = self._lifecycle.current
        if generation is None or generation.epoch != epoch:
            return DriverView()
        # A graph that is built with the first step is a phase of a group in service.
        serving = generation.served and not generation.condemned and not self._lifecycle.phase
        oldest = next(iter(generation.rpcs.copy()), None)
        rpc, began = ("", time.monotonic()) if oldest is None else (oldest.name, oldest.began)
        pipe = generation.pipeline
        steps = (-1, -1, 0) if pipe is None else (pipe.newest_step, pipe.oldest_step, pipe.steps_read)
        return DriverView(*steps, rpc, time.monotonic() - began, serving)

    def on_finding(self, finding: Finding) -> None:
        """News from the supervisor about one worker."""
        generation = self._lifecycle.current
        if generation is None or generation.epoch != finding.epoch:
            return
        # A heartbeat may be older than the end of that call.
        doing = finding.doing.rpc_in_hand if finding.doing is not None else ""
        if finding.rank is not None and doing and generation.rpc:
            generation.doing[finding.rank] = doing
        generation.report = generation.report or finding.report
        if finding.pair is not None:
            generation.cut.add(finding.pair)
        own_exit = None
        if finding.rank is not None and finding.exit is not None:
            own_exit = RankExit(finding.rank, finding.exit)
        evidence = Evidence(finding.at, SUPERVISOR, finding.rank, finding.text, finding.kind)
        self.condemn(generation, evidence, own_exit)
        if finding.report is not None and generation.group is not None and self._supervision is not None:
            # Whoever waits for it, a compilation for instance, must not wait until somebody fences it.
            for rank in finding.report.suspects:
                self._supervision.kill(generation.group.infos[rank].process)

    def found_dead(self, generation: Generation, rank: int, text: str) -> None:
        """A round trip met a dead worker."""
        self.condemn(generation, Evidence(time.time(), "health check", rank, text, CauseKind.PROCESS_EXIT))

    # -- Judge ------------------------------------------------------------------------------------------------------

    def graph_broken(self, epoch: int, text: str) -> None:
        """The graph gave an error of its own."""
        generation = self._lifecycle.current
        if generation is not None and generation.epoch == epoch:
            self.condemn(generation, Evidence(time.time(), "graph", None, text, CauseKind.GRAPH_ERROR))

    def step_raised(self, epoch: int, step_id: int) -> bool:
        """A worker raised in a step. Returns whether the epoch is dying of something else."""
        generation = self._lifecycle.current
        if generation is None or generation.epoch != epoch or generation.pipeline is None:
            return True
        pipeline = generation.pipeline
        step = StepSettling(step_id, self._config.tensor_parallel_size, self._config.pipeline_parallel_size)
        return self._hold(_Settle(generation, step, lambda: pipeline.sent_step > step_id))

    def rpc_raised(self, generation: Generation, call: RpcInHand) -> bool:
        """A worker raised in a collective RPC. Returns whether the epoch is dying of something else."""

        def followed() -> bool:
            later = [*generation.rpcs, *generation.given_up]
            return any(other.number > call.number for other in later)

        return self._hold(_Settle(generation, CallSettling(call.name, call.references), followed))

    def rpc_broken(self, generation: Generation, text: str) -> None:
        """A collective RPC failed otherwise than by a worker's own exception."""
        self.condemn(generation, Evidence(time.time(), "rpc", None, text, CauseKind.RPC_ERROR))

    def _hold(self, settle: _Settle) -> bool:
        """Ask every worker whether it lives. An answer proves it: a process whose death broke a socket gives none."""
        generation = settle.generation
        self._examine(generation)
        with self._lock:
            if not generation.served:  # its builder sees the exception itself
                return generation.condemned
            generation.unsettled += 1
            if generation.condemned:
                return True
            generation.calm.clear()
            self._work.put(settle)
            self._lifecycle.move(ExecutorState.SUSPECT)
        return False

    def _examine(self, generation: Generation, timeout_s: float = HOLD_S) -> Examination | None:
        """One round trip to all workers; condemns the generation when one is dead. None when nobody could be asked."""
        assert self._supervision is not None
        try:
            result = self._supervision.examine(generation.epoch, timeout_s)
        except SupervisorUnreachable as error:
            logger.warning("%s", error)
            return None
        for finding in result.findings:
            self.on_finding(finding)
        for rank, text in result.dead.items():
            self.found_dead(generation, rank, text)
        return result

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Without a bound: a daemon that has nothing to do until there is work; ``stop`` sends None.
        while (work := self._work.get()) is not None:
            try:
                if isinstance(work, _Rebuild):
                    self._rebuild(work.generation)
                else:
                    self._settle(work)
            except Exception as error:
                # Nobody else would ever end this state: callers must not wait for a thread that has lost its way.
                logger.exception("the overseer failed at %s", type(work).__name__)
                failure = ExecutorFailed(f"internal error in the overseer: {type(error).__name__}: {error}")
                incident = work.generation.incident
                self._lifecycle.move(ExecutorState.FAILED, failure=failure, ends=incident)
                self._lifecycle.emit("failed", incident=incident)
                self.condemn(
                    work.generation, Evidence(time.time(), "overseer", None, str(failure), CauseKind.GRAPH_ERROR)
                )

    def _rebuild(self, dead: Generation) -> None:
        assert self._recovery is not None
        incident = dead.incident
        assert incident is not None  # opened with the verdict that has queued this
        if dead.pipeline is not None:
            dead.pipeline.incident = incident
        self._lifecycle.emit("incident", incident=incident)
        if self._recovery.recover(dead, incident, self, self._commit):
            logger.warning("%s", incident.headline())
            self._lifecycle.emit("recovered", duration_s=incident.duration_s or 0.0, incident=incident)

    def _settle(self, work: _Settle) -> None:
        """See whether the peers of a rank that raised come back into step; if they do not, rebuild."""
        generation = work.generation
        deadline = time.monotonic() + self._config.settle_timeout_s
        last = deadline + SLOW_S
        late: list[int] = []
        what = work.what
        while time.monotonic() < deadline:
            asked = time.monotonic()
            result = self._examine(generation)
            if generation.condemned:
                return
            if result is not None:
                outcomes = what.outcomes(result.progress)
                late = [rank for rank, outcome in enumerate(outcomes) if outcome is Outcome.AHEAD]
                if not late:
                    self._judge_settled(work, outcomes)
                    return
            else:  # a supervisor that is slow, or replaced, is no fault of the workers: that time does not count
                deadline = min(last, deadline + time.monotonic() - asked)
            time.sleep(_SETTLE_LOOK_S)
        text = (
            f"ranks {late} did not come out of {what} within {self._config.settle_timeout_s:g} s "
            f"(settle_timeout_s) after a rank raised in it"
        )
        self.condemn(generation, Evidence(time.time(), "settle", None, text, CauseKind.STALLED))

    def _judge_settled(self, work: _Settle, outcomes: Sequence[Outcome]) -> None:
        """All are out of it. What was sent behind it may have made them meet in the wrong places.

        An accelerator may still wait in a collective that its rank has left: what is sent next would meet that.
        """
        generation = work.generation
        why = spoilt(work.what, outcomes)
        if why and (self._config.device_key != "CPU" or work.followed()):
            self.condemn(generation, Evidence(time.time(), "settle", None, why, CauseKind.STALLED))
            return
        with self._lock:
            generation.unsettled -= 1
            if generation.unsettled or generation.condemned:
                return
            generation.calm.set()
            self._commit(generation)
