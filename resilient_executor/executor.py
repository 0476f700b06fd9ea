"""The front door: an executor with the signatures of vLLM's ``v1.executor.abstract.Executor``.

What is added to vLLM's contract: a step ends in exactly one of its output, the worker's own exception, ``StepLost``
(the epoch died under it: comes at once, recompute; the next call waits for the rebuild), or ``ExecutorFailed``.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray

from resilient_executor import cluster, placement, protocol, telemetry
from resilient_executor.config import ExecutorConfig
from resilient_executor.environment import EnvironmentRule
from resilient_executor.errors import StateError, StepLost
from resilient_executor.graph import resolve_transport
from resilient_executor.health import check_health
from resilient_executor.journal import Journal, RpcPolicy
from resilient_executor.lifecycle import Event, ExecutorState, Generation, Lifecycle, shut_down_at_exit
from resilient_executor.operations import publish
from resilient_executor.overseer import Overseer
from resilient_executor.pipeline import StepPipeline
from resilient_executor.plans import EngineFuture, Plan, Plans, completed
from resilient_executor.recovery import Recovery
from resilient_executor.rpc import CollectiveRpc
from resilient_executor.supervisor.client import Supervision
from resilient_executor.supervisor.incidents import Incident
from resilient_executor.takedown import take_down
from resilient_executor.worker_group import first_line

logger = logging.getLogger(__name__)

_NOTHING: Final = object()


class ResilientExecutor:
    """Runs a sharded model on Ray workers, and goes on when they die.

    ``execute_model`` and ``sample_tokens`` belong to one thread, the engine's loop; all else to any thread.

    Args:
        config: all settings, see :class:`ExecutorConfig`.

    Raises:
        ConfigError, DependencyError, PlacementError: nothing was started.
        StartupError, TopologyError: the workers did not come up, or form no group; everything was removed again.
    """

    uses_ray = True
    supports_pp = True

    def __init__(self, config: ExecutorConfig) -> None:
        transport = resolve_transport(config) if config.device_key != "GPU" else config.transport
        cluster.check_dependencies(needs_nccl=transport == "nccl")
        environment_rule = EnvironmentRule.from_config(config)
        self._config = config
        self._lifecycle = Lifecycle()
        self._overseer = Overseer(config, self._lifecycle)
        self._journal = Journal()
        self._connected_here = cluster.connect(config)
        self._telemetry = telemetry.start(config)
        self._rpc = CollectiveRpc(config, self._lifecycle, self._overseer, self._journal, self._telemetry)
        self._step_ids = itertools.count()
        self._shutdown_lock = threading.Lock()
        self._starter, self._start_over = threading.current_thread(), threading.Event()
        self._supervision: Supervision | None = None
        self._recovery: Recovery | None = None
        self._pending: Any = _NOTHING
        self._called_ns = 0
        self._plans = Plans()
        self._pending_plan = self._plans.current
        if self._telemetry is not None:
            self._lifecycle.add_listener(self._telemetry.on_event)
        self._at_exit: Callable[[], None] | None = shut_down_at_exit(self)
        try:
            self._config = config = placement.with_current_group(config)
            placement.check_capacity(config)
            with telemetry.starting(self._telemetry, lambda: self.epoch):
                self._start(config, environment_rule.select(os.environ))
        except BaseException:  # Ctrl-C in the middle of a start must leave nothing behind either
            self._start_over.set()
            self.shutdown()
            raise
        self._start_over.set()

    def _start(self, config: ExecutorConfig, variables: dict[str, str]) -> None:
        began = time.monotonic()
        self._supervision = Supervision(config, self._overseer.on_finding, self._overseer.view)
        self._supervision.can_do_without = lambda nodes: placement.has_room_without(config, nodes)
        self._recovery = Recovery(
            config,
            self._lifecycle,
            self._supervision,
            self._journal,
            variables=variables,
            driver_node_id=ray.get_runtime_context().get_node_id(),
            step_ids=self._step_ids,
            telemetry=self._telemetry,
        )
        # Either a shutdown in another thread has found what there is to stop, or it is noticed here.
        self._lifecycle.raise_if_over()
        self._supervision.start()
        publish(config, self._lifecycle, self._recovery, self._supervision)
        self._overseer.start(self._recovery, self._supervision)
        self.start_seconds = time.monotonic() - began
        logger.info("%s: %d workers serve after %.1f s", config.name, config.world_size, self.start_seconds)

    # -- steps ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step. With the sampler on it is only stored, and ``sample_tokens`` runs it.

        Returns:
            None (with ``non_block`` a completed future of None) when the step waits for ``sample_tokens``; else the
            output, or with ``non_block`` its future.

        Raises:
            StateError: the last step still waits for ``sample_tokens``.
            ExecutorFailed, ExecutorStopped: it is over.
        """
        if self._pending is not _NOTHING:
            raise StateError("sample_tokens() must be called after execute_model() has returned None")
        if self._lifecycle.serving is None:
            self._lifecycle.raise_if_over()
        plan = self._plans.current
        if self._telemetry is not None:
            self._called_ns = time.time_ns()
        if not self.needs_sampling(scheduler_output):
            return self._run_step((scheduler_output, None), plan, non_block)
        self._pending, self._pending_plan = scheduler_output, plan
        return completed(None) if non_block else None

    def needs_sampling(self, scheduler_output: Any) -> bool:
        """Whether this step waits for ``sample_tokens``; an adapter may decide it by the batch."""
        return self._config.uses_sampler

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Run the step that ``execute_model`` has stored.

        Returns:
            its output; with ``non_block`` a ``concurrent.futures.Future`` of it, which holds the step's errors, too.

        Raises:
            StateError: no step is stored.
            StepLost: its epoch died. The engine must recompute.
            ExecutorFailed, ExecutorStopped, RecoveryTimeout: there is nothing to run it on.
            Exception: what the worker raised.
        """
        if self._pending is _NOTHING:
            self._lifecycle.raise_if_over()
            raise StateError("execute_model() must be called before sample_tokens()")
        scheduler_output, self._pending = self._pending, _NOTHING
        return self._run_step((scheduler_output, grammar_output), self._pending_plan, non_block)

    def _run_step(self, value: Any, plan: Plan, non_block: bool) -> Any:
        traces = self._telemetry
        trace = traces.begin_step(value, self._called_ns) if traces is not None else None
        future = EngineFuture(self._told) if non_block else None
        try:
            pipeline = self._pipeline_for(plan)
            if future is None:
                return pipeline.run(value, trace=trace)
            pipeline.submit(value, future, trace=trace)
        except Exception as error:
            if trace is not None:
                trace.ended(error)
            if future is None:
                if isinstance(error, StepLost):
                    self._told(error)
                raise
            future.fail(error)
        return future

    def _pipeline_for(self, plan: Plan) -> StepPipeline:
        """The pipeline that may run a step of this plan; waits for a rebuild if the plan begins from nothing.

        Raises:
            StepLost: the plan was made for other workers than those that serve, or before the engine knew of a loss.
        """
        epoch = plan.epoch
        if plan.losses != self._plans.current.losses:
            raise StepLost(epoch, -1)
        generation = self._lifecycle.serving
        if generation is None:
            current = self._lifecycle.current
            if epoch and (current is None or current.epoch != epoch or current.condemned):
                raise StepLost(epoch, -1, self._lifecycle.last_incident(epoch))
            generation = self._lifecycle.await_serving(self._config.recovery_timeout_s)
        if epoch and generation.epoch != epoch:
            raise StepLost(epoch, -1, self._lifecycle.last_incident(epoch))
        self._plans.settle_on(generation.epoch)
        return generation.pipeline or self._late_pipeline(generation)

    def _late_pipeline(self, generation: Generation) -> StepPipeline:
        """Build the graph at the first step, where ``eager_graph`` is off."""
        assert self._recovery is not None
        try:
            deadline = time.monotonic() + self._config.start_timeout_s
            self._recovery.compile(generation, self._overseer, None, deadline)
        except Exception as error:
            self._overseer.graph_broken(generation.epoch, first_line(error))
            raise StepLost(generation.epoch, -1) from error
        assert generation.pipeline is not None
        return generation.pipeline

    def _told(self, lost: StepLost) -> None:
        self._plans.told(lost)
        if lost.incident is None:
            lost.incident = self._lifecycle.last_incident(lost.epoch)

    # -- collective RPC ---------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        *,
        policy: RpcPolicy | None = None,
        key: str | None = None,
        per_rank_args: Sequence[Sequence[Any]] | None = None,
    ) -> Any:
        """Call a method on every worker.

        Args:
            method: its name, or a callable that gets the engine's worker as its first argument.
            timeout: seconds for this call, rebuilds included; None takes ``rpc_timeout_s``.
            args: its positional arguments, the same for every rank.
            kwargs: its keyword arguments, the same for every rank.
            non_block: return a future.
            policy: what becomes of the call when its epoch dies; None takes ``rpc_policies``, else ``ONCE``.
            key: with ``JOURNAL``, a later call with the same key replaces this one in the replay.
            per_rank_args: positional arguments for each rank, in place of ``args``.

        Returns:
            the results in rank order; with ``non_block`` a future of them.

        Raises:
            StateError: ``per_rank_args`` does not fit the number of ranks.
            RpcTimeout: not every rank answered in time.
            RpcLost: the epoch died, and the call is not declared safe to repeat.
            ExecutorFailed, ExecutorStopped, RecoveryTimeout: there is nothing to run it on.
            Exception: what a worker raised.
        """
        self._lifecycle.raise_if_over()
        entry = self._rpc.entry(method, args, kwargs or {}, per_rank_args, key)
        policy = policy or self._rpc.policy_of(entry.name)
        timeout_s = self._config.rpc_timeout_s if timeout is None else timeout
        if non_block:
            return self._rpc.submit(entry, policy, timeout_s)
        return self._rpc.call(entry, policy, timeout_s)

    def forget_rpc(self, key: str) -> bool:
        """Take the journalled call with this key out of the replay: its effect is wanted no more.

        Returns:
            whether there was one.
        """
        return self._rpc.forget(key)

    # -- health -----------------------------------------------------------------------------------------------------

    def check_health(self, timeout: float | None = None) -> None:
        """Make a round trip to every worker through the supervisor, now.

        Args:
            timeout: seconds; None takes ``check_health_timeout_s``.

        Raises:
            ExecutorRecovering: a rebuild is going on; requests wait.
            ExecutorUnhealthy: a worker is dead or silent, or the supervisor cannot be reached.
            ExecutorFailed, ExecutorStopped: it is over.
        """
        self._lifecycle.raise_if_over()
        if self._supervision is None:
            raise StateError("the executor has not been started")
        timeout = self._config.check_health_timeout_s if timeout is None else timeout
        check_health(self._lifecycle, self._overseer, self._supervision, self._config.world_size, timeout)

    @property
    def state(self) -> ExecutorState:
        """The state now."""
        return self._lifecycle.state

    @property
    def epoch(self) -> int:
        """The newest epoch, counted from 1."""
        return self._lifecycle.epoch

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents so far, oldest first."""
        return tuple(self._lifecycle.incidents)

    @property
    def workers(self) -> tuple[protocol.WorkerInfo, ...]:
        """The workers of the newest epoch in rank order; fewer while they come up."""
        return self._lifecycle.worker_infos()

    @property
    def standbys(self) -> dict[str, int]:
        """Warm standbys: how many are ``ready``, and how many are being prepared (``preparing``)."""
        return self._recovery.standbys.counts() if self._recovery is not None else {}

    @property
    def status_url(self) -> str | None:
        """Where the operator's endpoint listens, or None."""
        return self._supervision.status_url if self._supervision is not None else None

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that the engine should keep in flight: one for each stage."""
        return self._config.pipeline_parallel_size

    @property
    def start_phases(self) -> dict[str, float]:
        """Phases of the first start, in seconds."""
        return dict(self._recovery.start_phases) if self._recovery is not None else {}

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener`` called with every change of state, incident and phase. It must be quick."""
        self._lifecycle.add_listener(listener)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the executor has failed for good; at once if it already has."""
        self._lifecycle.add_listener(lambda event: callback() if event.kind == "failed" else None)
        if self.state is ExecutorState.FAILED:
            callback()

    # -- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End everything that was started: workers, graph, bundles, supervisor, agents, embedded cluster.

        May be called at any time, from any thread, more than once.
        """
        self._lifecycle.move(ExecutorState.STOPPED)
        with self._shutdown_lock:
            if self._at_exit is None:
                return
            self._at_exit()
            self._at_exit = None
            self._pending = _NOTHING
            with telemetry.ending(self._telemetry, lambda: self.epoch):
                if ray.is_initialized():
                    self._end_start()
                    if self._recovery is not None and self._supervision is not None:
                        take_down(self._config, self._lifecycle, self._overseer, self._recovery, self._supervision)
                    if self._connected_here:
                        cluster.disconnect()

    def _end_start(self) -> None:
        """If another thread is still starting the executor, make it stop, and wait for it: it holds bundles."""
        deadline = time.monotonic() + self._config.fence_timeout_s
        while threading.current_thread() is not self._starter and time.monotonic() < deadline:
            if self._recovery is not None:
                self._recovery.stopping.set()
            if self._start_over.wait(0.05):
                return
            if (group := getattr(self._lifecycle.current, "group", None)) and self._supervision is not None:
                self._supervision.fence(group.processes())

    def __enter__(self) -> ResilientExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
