"""vLLM's executor on the resilient one."""

from __future__ import annotations

import copy
import fnmatch
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

from resilient_executor import (
    ExecutorConfig,
    ExecutorRecovering,
    ExecutorState,
    ExecutorStopped,
    ResilientExecutor,
    RpcPolicy,
    StateError,
    StepLost,
    WorkerSpec,
)
from resilient_executor.plans import completed
from resilient_executor.poison import await_cause, died_in_rebuild
from resilient_executor.vllm import control_plane, environment
from resilient_executor.vllm.interrupts import Interrupts
from resilient_executor.vllm.ledger import RequestLedger
from resilient_executor.vllm.messages import Loss, LostStepOutput, StageOutputs, Step
from resilient_executor.vllm.scheduler import full_data, loss_aware
from resilient_executor.vllm.settings import VllmSettings, VolatileWeights
from resilient_executor.vllm.support import refuse_what_cannot_survive
from resilient_executor.vllm.tracing import TraceHeaders

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput

logger = logging.getLogger(__name__)

WORKER: Final = "resilient_executor.vllm.worker:VllmWorker"
#: Between two looks, in seconds: whether the steps in flight have ended; whether a rebuild has.
_DRAIN_LOOK_S: Final = 0.001
_RECOVERY_LOOK_S: Final = 0.01
_NOT_SERVING: Final = (ExecutorState.RECOVERING, ExecutorState.SUSPECT)


class _Core(ResilientExecutor):
    def needs_sampling(self, scheduler_output: Step) -> bool:
        """A batch without tokens has nothing to sample, and runs at once."""
        return self._config.uses_sampler and scheduler_output.scheduler_output.total_num_scheduled_tokens > 0


class ResilientVllmExecutor(Executor):  # type: ignore[misc]  # vLLM is untyped here
    """Runs vLLM's workers on Ray, and goes on when they die: requests continue, token by token the same.

    Use it as ``distributed_executor_backend``, as a class or as ``"resilient_executor.vllm.ResilientVllmExecutor"``.
    Settings: see :class:`VllmSettings`.
    """

    uses_ray = True
    supports_pp = True

    def _init_executor(self) -> None:
        """Start the workers and put the scheduler in place.

        Raises:
            ConfigError: a setting is wrong, or a feature is configured that would not survive a death.
            StartupError, PlacementError, DependencyError: see :class:`ResilientExecutor`.
        """
        environment.show_our_log()
        environment.end_quickly()
        config: VllmConfig = self.vllm_config
        self._settings = settings = VllmSettings.parse(config.additional_config, os.environ)
        refuse_what_cannot_survive(config, settings)
        self._uses_v2 = bool(getattr(config, "use_v2_model_runner", False))
        self._has_connector = config.kv_transfer_config is not None
        self._ledger: RequestLedger[NewRequestData] = RequestLedger()
        #: The newest epoch of whose end the engine knows.
        self._lost_epoch = 0
        self._inflight: deque[_StepFuture] = deque()
        self._journal_keys: set[str] = set()
        self._ending = False
        self._interrupts = Interrupts()
        self._trace_headers = TraceHeaders()
        self._core_config_in_use = self._core_config(config, settings)
        self._core = _Core(self._core_config_in_use)
        # An engine whose start fails after ours forgets its executor without a word.
        weakref.finalize(self, self._core.shutdown)
        self._core.collective_rpc(
            "check_model_files",
            args=(dict(self._core.collective_rpc("model_files", policy=RpcPolicy.READ)),),
            policy=RpcPolicy.JOURNAL,
        )
        self._interrupts.starting = False
        self._interrupts.reassert()
        scheduler_config = config.scheduler_config
        environment.hide_scheduler_warning()
        scheduler_config.scheduler_cls = loss_aware(scheduler_config.get_scheduler_cls(), self._trace_headers)

    def _core_config(self, config: VllmConfig, settings: VllmSettings) -> ExecutorConfig:
        parallel = config.parallel_config
        chosen: dict[str, Any] = {**environment.from_platform(parallel), **settings.executor}
        return ExecutorConfig(
            worker=WorkerSpec(WORKER, kwargs={"vllm_config": cloudpickle.dumps(workers_config(config))}),
            tensor_parallel_size=parallel.world_size // parallel.pipeline_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            uses_sampler=config.model_config.runner_type != "pooling",
            output_aggregator=_weakly(self._aggregate) if self._has_connector else None,
            describe_step=self._trace_headers.describe,
            **chosen,
        )

    # -- steps ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """See vLLM. A step that is lost gives a :class:`LostStepOutput`."""
        step = self._plan(scheduler_output)
        runs_at_once = not self._core.needs_sampling(step)
        if self._ending or (runs_at_once and not self._await_workers()):
            return completed(self._nothing()) if non_block else self._nothing()
        try:
            result = self._core.execute_model(step, non_block=non_block)
        except StepLost as lost:
            return self._lost(lost)
        return self._track(result) if non_block and runs_at_once else result

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """See vLLM."""
        if not self._await_workers():
            return completed(self._nothing()) if non_block else self._nothing()
        try:
            result = self._core.sample_tokens(grammar_output, non_block=non_block)
        except StepLost as lost:
            return self._lost(lost)
        return self._track(result) if non_block else result

    def _await_workers(self) -> bool:
        """Wait for a rebuild that goes on. Returns False if this process is asked to end meanwhile: nothing runs then.

        The executor underneath would wait, too, but vLLM's handlers for signals only take a note, for its loop to read.
        """
        deadline = time.monotonic() + self._core_config_in_use.recovery_timeout_s
        while self._core.state in _NOT_SERVING and time.monotonic() < deadline:
            if self._interrupts.requested:
                self._ending = True
                break
            time.sleep(_RECOVERY_LOOK_S)
        return not self._ending

    def _nothing(self) -> LostStepOutput:
        """The output of a step of an engine that is about to end."""
        return LostStepOutput(Loss(0, self._refresh, lambda: None, 0))

    def _plan(self, scheduler_output: SchedulerOutput) -> Step:
        admissions = self._ledger.plan(
            finished=scheduler_output.finished_req_ids,
            new={new.req_id: new for new in scheduler_output.scheduled_new_reqs},
            cached=scheduler_output.scheduled_cached_reqs.req_ids,
        )
        return Step(scheduler_output, () if self._uses_v2 else tuple(admissions))

    def _track(self, future: Future[Any]) -> Future[Any]:
        tracked = _StepFuture(future, self._lost)
        while self._inflight and self._inflight[0].delivered:
            self._inflight.popleft()
        self._inflight.append(tracked)
        return tracked

    def _lost(self, lost: StepLost) -> LostStepOutput:
        if lost.epoch > self._lost_epoch:  # several steps may be lost in one epoch, with newer ones planned in between
            self._lost_epoch = lost.epoch
            self._ledger.lost()
        return LostStepOutput(
            Loss(
                lost.epoch,
                self._refresh,
                lambda: await_cause(lambda: self._core.incidents, lost.epoch),
                self._settings.poison_crashes,
                died_in_rebuild(self._core.incidents, lost.epoch),
            )
        )

    def _refresh(self, scheduler: Any) -> None:
        """The scheduler starts over: bring what only it knows up to date."""
        for request_id, request in getattr(scheduler, "requests", {}).items():
            if getattr(request, "mm_features", None) and (data := self._ledger.get(request_id)) is not None:
                self._ledger.amend(request_id, full_data(scheduler, request_id, data))
        connector = scheduler.get_kv_connector() if self._has_connector else None
        if connector is not None:
            content: dict[Any, Any] = {}
            for worker_metadata in self.get_kv_connector_handshake_metadata() or ():
                content.update(worker_metadata or {})
            if content:
                connector.set_xfer_handshake_metadata_pp_aware(content)

    def _aggregate(self, outputs: Sequence[StageOutputs]) -> ModelRunnerOutput:
        """With a KV connector: one output out of those of all ranks, in rank order."""
        stages = len(outputs[0].earlier)
        ranks = [
            ModelRunnerOutput.with_kv_conn_output_only(one.earlier[stage]) for stage in range(stages) for one in outputs
        ]
        ranks += [one.output for one in outputs]
        aggregator = self.kv_output_aggregator
        first_of_last_stage = stages * len(outputs)
        if aggregator is None:
            return outputs[0].output
        return aggregator.aggregate(ranks, output_rank=first_of_last_stage)

    # -- collective RPC ---------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """See vLLM. What becomes of a call when the workers die: see :mod:`control_plane` and ``rpc_policies``.

        Raises:
            ConfigError: weights would be changed in a way that could not be repeated on new workers.
            RpcLost: the workers died under a call that nobody has declared safe to repeat.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        self._check_weights(name)
        self._drain()
        if not self._await_workers():
            raise ExecutorStopped("the process has been asked to end")
        treated = None
        if (policy := self._settings.rpc_policies.get(name)) is not None:
            treated = control_plane.Treatment(policy, key=None)
        elif isinstance(method, str):
            treated = control_plane.treatment(method, args, kwargs or {})
        if treated is None:
            treated = control_plane.Treatment(RpcPolicy.ONCE)
        self._forget(treated.undoes)
        if treated.key is not None:
            self._journal_keys.add(treated.key)
        return self._core.collective_rpc(
            method, timeout, args, kwargs, non_block, policy=treated.policy, key=treated.key
        )

    def _check_weights(self, name: str) -> None:
        if name not in control_plane.VOLATILE or name in self._settings.rpc_policies:
            return
        if self._settings.volatile_weights is VolatileWeights.REFUSE:
            raise StateError(
                f"{name} puts weights into the workers that could not be given to new ones after a death. Set "
                "volatile_weights='checkpoint' to go on with the checkpoint's weights in that case, or declare the "
                "method in rpc_policies if it can be repeated"
            )
        logger.warning("%s: after a rebuild the workers will have the checkpoint's weights again", name)

    def _forget(self, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            for key in [key for key in self._journal_keys if fnmatch.fnmatchcase(key, pattern)]:
                self._journal_keys.discard(key)
                self._core.forget_rpc(key)

    def _drain(self) -> None:
        """Wait until no step is in flight: a call must not meet one in the workers, on each rank a different one.

        The executor underneath bounds it: a step ends within ``step_timeout_s``.
        """
        while any(not future.done() for future in self._inflight):
            time.sleep(_DRAIN_LOOK_S)

    # -- health and end ---------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise if requests will not be served. While a rebuild goes on they will."""
        try:
            self._core.check_health()
        except ExecutorRecovering:
            return

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """See vLLM: called once when the executor has failed for good."""
        self._core.register_failure_callback(callback)

    def shutdown(self) -> None:
        """End everything; may be called at any time, more than once."""
        core = getattr(self, "_core", None)
        if core is not None:
            with self._interrupts.held_off():
                core.shutdown()
            self._interrupts.close()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps may be planned before the results of earlier ones are known: all of them are lost together."""
        return True

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that the engine keeps in flight (vLLM before 0.26 asks the executor)."""
        stages = self.vllm_config.parallel_config.pipeline_parallel_size
        ahead = 2 if stages == 1 and getattr(self.vllm_config.scheduler_config, "async_scheduling", False) else stages
        return int(getattr(self.vllm_config, "max_concurrent_batches", ahead))

    @property
    def core(self) -> ResilientExecutor:
        """The executor underneath: state, incidents, workers, listeners."""
        return self._core


def _weakly(method: Callable[[Sequence[StageOutputs]], ModelRunnerOutput]) -> Callable[[Sequence[StageOutputs]], Any]:
    """The method without a hold on its object: the core must not keep vLLM's executor alive, see the finalizer."""
    reference = weakref.WeakMethod(method)

    def call(outputs: Sequence[StageOutputs]) -> ModelRunnerOutput:
        alive = reference()
        assert alive is not None, "vLLM has dropped its executor in the middle of a step"
        return alive(outputs)

    return call


class _StepFuture(Future[Any]):
    """The future of a step as vLLM sees it: a lost step has an output, too."""

    def __init__(self, inner: Future[Any], lost: Callable[[StepLost], LostStepOutput]) -> None:
        super().__init__()
        self._inner = inner
        self._lost = lost
        #: vLLM has taken its result.
        self.delivered = False

    def result(self, timeout: float | None = None) -> Any:
        """The output, or a :class:`LostStepOutput`."""
        try:
            return self._inner.result(timeout)
        except StepLost as lost:
            return self._lost(lost)
        finally:
            self.delivered = self._inner.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The step's error; being lost is none."""
        error = self._inner.exception(timeout)
        return None if isinstance(error, StepLost) else error

    def done(self) -> bool:
        """Whether the step has ended. Does not wait."""
        return self._inner.done()

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call ``fn`` with this future when the step has ended."""
        self._inner.add_done_callback(lambda _: fn(self))


def workers_config(config: VllmConfig) -> VllmConfig:
    """The config as workers get it: for them this is a Ray executor, and no scheduler of ours exists."""
    config = copy.copy(config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.distributed_executor_backend = "ray"
    config.parallel_config.placement_group = None
    return config
