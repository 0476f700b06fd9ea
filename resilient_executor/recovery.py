"""The rebuild, as one sequence of phases.

    fence -> tear down -> place -> spawn -> rank -> initialise -> load -> replay -> compile -> warm up -> serve

A start is the same sequence without the first two. A death in any phase makes that attempt fail; the next attempt,
with the next epoch, begins by burying what the failed one has left. Whoever calls :meth:`Recovery.recover` decides
nothing: the restart budget does.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import tenacity
from ray.exceptions import RayError

from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import (
    ConfigError,
    DependencyError,
    ExecutorFailed,
    ExecutorStopped,
    ResilientExecutorError,
    StartupError,
    TopologyError,
    WorkerStartError,
)
from resilient_executor.graph import StepGraph
from resilient_executor.journal import Journal, JournalEntry, RpcPolicy
from resilient_executor.lifecycle import ExecutorState, Generation, Lifecycle
from resilient_executor.pipeline import Judge, StepPipeline
from resilient_executor.protocol import Phase, StepKind
from resilient_executor.sites import Sites
from resilient_executor.standbys import Standbys
from resilient_executor.supervisor.actor import Member
from resilient_executor.supervisor.client import Supervision
from resilient_executor.supervisor.incidents import Cause, CauseKind, Evidence, Incident, RankExit, first_cause
from resilient_executor.supervisor.policy import BudgetSnapshot, RestartBudget
from resilient_executor.worker_group import WorkerGroup, ended_at, first_line

if TYPE_CHECKING:
    from tenacity import RetryCallState

    from resilient_executor.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)


#: Errors of a start that the next attempt would meet again.
_NO_ATTEMPT_CAN_SUCCEED: Final = (ConfigError, DependencyError, ExecutorStopped, TopologyError)

Commit = Callable[[Generation, "Incident | None"], bool]


class FenceError(ResilientExecutorError):
    """A process of an old epoch could not be proven gone; its device must not be used again."""


class Recovery:
    """Builds and buries generations. One thread at a time: the one that starts the executor, then the overseer's."""

    def __init__(
        self,
        config: ExecutorConfig,
        lifecycle: Lifecycle,
        supervision: Supervision,
        journal: Journal,
        *,
        variables: Mapping[str, str],
        driver_node_id: str,
        step_ids: itertools.count[int],
        telemetry: Telemetry | None,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._supervision = supervision
        self._journal = journal
        self._variables = variables
        self._driver_node_id = driver_node_id
        self._step_ids = step_ids
        self._telemetry = telemetry
        if telemetry is not None:
            telemetry.ask_for_pulse(supervision.pulse)
        self._budget = RestartBudget(
            max_restarts=config.max_restarts,
            window_s=config.restart_window_s,
            backoff_initial_s=config.backoff_initial_s,
            backoff_max_s=config.backoff_max_s,
            quiet_s=config.backoff_reset_s,
        )
        self.stopping = threading.Event()
        self.standbys = Standbys(
            config, variables, supervision.fence, supervision.kill, lambda: lifecycle.emit("standbys")
        )
        self._sites = Sites(config, lifecycle, supervision, driver_node_id, self.stopping)
        #: Phases of the first start -> seconds.
        self.start_phases: dict[str, float] = {}

    @property
    def budget(self) -> BudgetSnapshot:
        """How much of the restart budget is used."""
        return self._budget.snapshot(time.monotonic())

    # -- the two ways to a serving generation -----------------------------------------------------------------------

    def start(self, judge: Judge, commit: Commit) -> None:
        """Build the first generation; a failed attempt is repeated ``start_attempts`` times in all.

        Args:
            judge: for the generation's pipeline.
            commit: puts a built generation into service, which ends the incident, if there is one; returns False if
                the generation has been condemned meanwhile.

        Raises:
            StartupError: every attempt failed; ``__cause__`` is the last failure.
            ConfigError, DependencyError, TopologyError: no attempt can succeed.
        """

        def attempt() -> None:
            old = self._lifecycle.current
            generation = self._build(old, judge, None)
            if not commit(generation, None):
                raise WorkerStartError("a worker died right after the start", phase="serve")

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._config.start_attempts),
            wait=tenacity.wait_random_exponential(self._config.backoff_initial_s, self._config.backoff_max_s),
            retry=tenacity.retry_if_exception(_worth_another_attempt),
            sleep=self._pause,
            before_sleep=_log_attempt,
            reraise=True,
        )
        try:
            retrying(attempt)
        except _NO_ATTEMPT_CAN_SUCCEED:
            raise
        except Exception as error:
            attempts = self._config.start_attempts
            raise StartupError(
                f"the executor could not be started in {attempts} attempts: {_one_line(error)}"
            ) from error
        self._in_service()

    def _in_service(self) -> None:
        self._budget.note_success(time.monotonic())
        current = self._lifecycle.current
        if current is not None and current.group is not None:
            group = current.group
            self.standbys.serve([info.process.node_id for info in group.infos], group.handles[0])

    def recover(self, dead: Generation, incident: Incident, judge: Judge, commit: Commit) -> bool:
        """Replace a dead generation, however many attempts the budget allows.

        Returns:
            whether there is a new one in service; otherwise the executor has failed, or is being stopped.
        """
        old = dead
        self.standbys.rest()
        self._sites.begin()
        while not self.stopping.is_set():
            decision = self._budget.decide(time.monotonic())
            try:
                self.bury(old, incident)
                where = self._sites.note_death(old, incident)
                logger.warning("%s; epoch %d, %s%s", incident.headline(), old.epoch, decision.reason, where)
                if decision.action == "give_up":
                    return self._give_up(incident, decision.reason)
                if old.group is not None:
                    self._sites.look_for_cuts(old.group.infos, tuple(old.cut))
                self._pause(decision.pause_s)
                generation = self._build(old, judge, incident)
                if commit(generation, incident):
                    break
                old = generation
            except ExecutorStopped:
                return False
            except Exception as error:
                # A worker that dies while the graph is compiled gives Ray's own error: a death like any other.
                if not isinstance(error, (ResilientExecutorError, RayError)):
                    logger.exception("epoch %d: the rebuild failed", self._lifecycle.epoch)
                old = self._lifecycle.current or old
                incident.report = incident.report or old.report
                incident.add(Evidence(time.time(), "rebuild", None, first_line(error), CauseKind.WORKER_START))
                if decision.action == "give_up":
                    return self._give_up(incident, f"{decision.reason}; {error}")
        else:
            return False
        try:
            self._in_service()
        except Exception:  # it serves: nothing that is only for the next death may end it
            logger.exception("epoch %d serves, but its standbys could not be asked for", self._lifecycle.epoch)
        return True

    def _give_up(self, incident: Incident, reason: str) -> bool:
        incident.resolve("failed", time.time())
        self.end()
        failure = ExecutorFailed(f"{incident.headline()}; {reason}", incident)
        logger.error("the executor has failed: %s", failure)
        self._lifecycle.move(ExecutorState.FAILED, failure=failure)
        self._lifecycle.emit("failed", incident=incident)
        return False

    def _pause(self, seconds: float) -> None:
        if self.stopping.wait(seconds):
            raise ExecutorStopped("the executor is being shut down")

    def end(self) -> None:
        """Give back whatever is held beside the generation itself: bundles and standbys. Twice is fine."""
        self.standbys.stop()
        self.release()

    def release(self) -> None:
        """Give back every bundle that is still held. Twice is fine."""
        self._sites.release()

    # -- burying ----------------------------------------------------------------------------------------------------

    def bury(self, old: Generation, incident: Incident | None) -> None:
        """Prove every process of a generation gone, and release whoever waits in its graph. Twice is fine.

        The workers go first: the graph's teardown waits for their loops, and one that is stuck in a collective with a
        dead peer never comes back.

        Raises:
            FenceError: a process could not be proven gone within ``fence_timeout_s``.
        """
        group = old.group
        with self._phase("fence", incident):
            self._supervision.retire(old.epoch)
            if group is not None:
                self._fence(old, group, incident)
            # Within the phase: whoever sees that it is over finds the cause that fencing has brought to light.
            if incident is not None and old.epoch == incident.epoch:
                incident.cause = self._first_cause(old, incident)
        with self._phase("tear_down", incident):
            if old.graph is not None:
                old.graph.tear_down(self._config.teardown_timeout_s)
                old.graph = None
            if old.pipeline is not None:
                old.pipeline.condemn(incident)
                old.pipeline.lose_inflight(self._config.teardown_timeout_s)
        if group is not None:
            # In a rebuild nobody waits for this; at the end, whatever is left now stays.
            wait_s = 0.0 if incident is not None else self._config.teardown_timeout_s
            self._supervision.forget([info.process for info in group.infos], wait_s)

    def _fence(self, old: Generation, group: WorkerGroup, incident: Incident | None) -> None:
        ranks = {process: rank for rank, process in enumerate(group.processes())}
        results = self._supervision.fence(list(ranks))
        known = {one.status.pid for one in old.exits}
        old.exits += [
            RankExit(ranks[f.process], f.exit) for f in results if f.exit is not None and f.process.pid not in known
        ]
        for lost in results:
            if lost.lost and incident is not None and old.epoch == incident.epoch:
                at, rank = incident.detected_at, ranks[lost.process]
                incident.add(Evidence(at, "node", rank, lost.lost, CauseKind.NODE_LOSS))
        group.kill()
        if alive := [ranks[f.process] for f in results if not f.gone]:
            raise FenceError(
                f"ranks {alive} of epoch {old.epoch} could not be proven gone within "
                f"{self._config.fence_timeout_s:g} s (fence_timeout_s)"
            )

    def _first_cause(self, old: Generation, incident: Incident) -> Cause:
        infos = old.group.infos if old.group is not None else []
        if old.group is not None and len(old.exits) > 1:
            old.exits = [_seen_by_ray(one, old.group) for one in old.exits]
        return first_cause(old.exits, incident.evidence, workers=dict(enumerate(infos)), doing=old.doing)

    # -- building ---------------------------------------------------------------------------------------------------

    def _phase(self, name: str, incident: Incident | None) -> AbstractContextManager[None]:
        durations = self.start_phases if incident is None else {}
        return self._lifecycle.in_phase(name, incident, durations)

    def _build(self, old: Generation | None, judge: Judge, incident: Incident | None) -> Generation:
        """Build one generation on fresh bundles.

        Raises:
            WorkerStartError, PlacementError, TopologyError, ray.exceptions.RayError, StepLost: the attempt failed; what
                it has made is in ``lifecycle.current``, for the next attempt to bury.
            ExecutorStopped: the executor is being shut down.
        """
        if self.stopping.is_set():
            raise ExecutorStopped("the executor is being shut down")
        if old is not None and incident is None:
            self.bury(old, incident)
        config = self._config
        deadline = time.monotonic() + config.start_timeout_s
        # The epoch moves first, so that nothing of the old world counts any more.
        new = Generation(epoch=(old.epoch if old is not None else 0) + 1)
        self._lifecycle.current = new
        if incident is not None:
            incident.epochs_tried.append(new.epoch)

        with self._phase("place", incident):
            reservation = self._sites.place(new.epoch, rebuild=incident is not None)
        group = new.group = WorkerGroup(new.epoch, config, stopping=self.stopping, telemetry=self._telemetry)
        with self._phase("spawn", incident):
            taken = group.spawn(reservation, self.standbys)
            if incident is not None:
                incident.standbys = taken
            group.describe(deadline)
        with self._phase("rank", incident):
            group.rank(self._driver_node_id, deadline)
            members = [
                Member(rank, handle, info.process, info.node_ip, info.device_ids)
                for rank, (handle, info) in enumerate(zip(group.handles, group.infos, strict=True))
            ]
            self._supervision.adopt(new.epoch, members)
            self._sites.check_links(group.infos)
            if self._telemetry is not None:
                self._telemetry.workers(new.epoch, group.infos)
        with self._phase("initialise", incident):
            group.initialise(self._variables, deadline)
        with self._phase("load", incident):
            group.load(deadline)
        with self._phase("replay", incident):
            for entry in self._journal:
                self._replay(group, entry, deadline)
        if config.eager_graph or old is not None:
            self.compile(new, judge, incident, deadline)
        else:
            group.set_phase(Phase.SERVING, deadline)  # its graph comes with its first step; until then it is idle
        return new

    def _replay(self, group: WorkerGroup, entry: JournalEntry, deadline: float) -> None:
        """Repeat one call of the journal."""
        trace = None
        if self._telemetry is not None:
            trace = self._telemetry.begin_call(entry.name, RpcPolicy.JOURNAL.value, in_phase=True)
        error: BaseException | None = None
        try:
            group.results(entry.name, group.call(entry, trace), max(0.0, deadline - time.monotonic()), trace)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if trace is not None:
                trace.ended(error)

    def compile(self, new: Generation, judge: Judge, incident: Incident | None, deadline: float) -> None:
        """Build the generation's graph and send a step through it that does no work but pays for all first uses."""
        group = new.group
        assert group is not None
        with self._phase("compile", incident):
            bell = group.prepare_graph(self._driver_node_id, deadline)
            new.graph = StepGraph(group.handles, self._config, bell)
            new.pipeline = StepPipeline(new.graph, new.epoch, self._config, judge, self._step_ids, new.calm)
        with self._phase("warm_up", incident):
            trace = self._telemetry.begin_warm_up() if self._telemetry is not None else None
            new.pipeline.run(None, kind=StepKind.WARM_UP, trace=trace)
            group.set_phase(Phase.SERVING, deadline)


def _seen_by_ray(one: RankExit, group: WorkerGroup) -> RankExit:
    """An exit that no agent saw, with the time at which Ray did.

    When the agent died with a worker, its successor finds several processes gone, and not in which order.
    """
    at = ended_at(group.handles[one.rank]) if one.status.is_blind else None
    return one if at is None else replace(one, status=replace(one.status, at=at))


def _worth_another_attempt(error: BaseException) -> bool:
    """Tenacity shows it Ctrl-C, too."""
    return isinstance(error, Exception) and not isinstance(error, _NO_ATTEMPT_CAN_SUCCEED)


def _one_line(error: Exception) -> str:
    """Our own errors are one line already; Ray's are tracebacks."""
    return str(error) if isinstance(error, ResilientExecutorError) else first_line(error)


def _log_attempt(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    pause = state.next_action.sleep if state.next_action is not None else 0.0
    cause = first_line(error) if error is not None else "unknown"
    logger.warning("start attempt %d failed, next one in %.1f s: %s", state.attempt_number, pause, cause)
