"""The engine worker of the core's protocol around vLLM's ``WorkerWrapperBase``."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

_BEGAN: Final = time.monotonic()

import vllm.envs  # noqa: E402 - the import is timed
from vllm.model_executor.model_loader.utils import get_model_architecture  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.sequence import IntermediateTensors  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: E402

from resilient_executor.vllm import admission, checkpoint, cpu_generators, shared_memory, tracing  # noqa: E402
from resilient_executor.vllm.messages import Handover, StageOutputs, Step  # noqa: E402
from resilient_executor.vllm.rehearsal import rehearse  # noqa: E402

if TYPE_CHECKING:
    from resilient_executor.protocol import RankAssignment

#: A warm standby has this behind it when it takes a rank; its worker's construction is what is left.
_IMPORTED: Final = time.monotonic() - _BEGAN


class VllmWorker(WorkerWrapperBase):  # type: ignore[misc]  # vLLM is untyped here
    """One rank. Calls by name or with a callable reach vLLM's worker through vLLM's own wrapper.

    Args:
        assignment: who this worker is in its epoch.
        vllm_config: the pickled ``VllmConfig``, as it was when the executor started: the same for the first worker and
            for its tenth replacement.
    """

    @staticmethod
    def preload(vllm_config: bytes) -> None:
        """As a warm standby: do ahead what this configuration needs, beside vLLM's imports. Touches no device."""
        config = pickle.loads(vllm_config)
        load_general_plugins()
        resolve_obj_by_qualname(config.parallel_config.worker_cls)
        get_model_architecture(config.model_config)
        _override_kernels_once()
        rehearse(config)

    def __init__(self, assignment: RankAssignment, *, vllm_config: bytes) -> None:
        began = time.monotonic()
        tracing.trace_worker(assignment.rank)
        super().__init__(rpc_rank=assignment.rank, global_rank=assignment.rank)
        config = pickle.loads(vllm_config)
        self._assignment = assignment
        self._has_connector = config.kv_transfer_config is not None
        self._on_cpu = current_platform.is_cpu()
        self._first_stage = assignment.pp_rank == 0
        self._last_stage = assignment.pp_rank == assignment.pp_size - 1
        #: An earlier stage owes its runner a ``sample_tokens``: it receives there what the last stage has sampled.
        self._owes_sampling = False
        kwargs: dict[str, Any] = {
            "vllm_config": config,
            "local_rank": assignment.local_rank,
            "rank": assignment.rank,
            "distributed_init_method": assignment.distributed_init_method,
            "is_driver_worker": assignment.tp_rank == 0,
        }
        if assignment.device_ids:
            kwargs["assigned_physical_gpu_ids"] = physical_ids(assignment.device_ids)
        self.init_worker({assignment.rank: kwargs})
        #: Importing vLLM and building its worker: no rebuild can be faster than that.
        self.import_seconds = _IMPORTED + time.monotonic() - began

    def init_device(self) -> None:
        """Select the device and join the groups; what they share in memory loses its name right after that."""
        super().init_device()
        shared_memory.unlink(os.environ.get("VLLM_DIST_IDENT", ""), self._assignment.rank)

    def load_model(self) -> None:
        """Load the weights, then let the platform settle the block size, which depends on the model's layers."""
        self.worker.load_model()
        update = getattr(current_platform, "update_block_size_for_backend", None)
        if update is not None:
            update(self.vllm_config)
        # As vLLM's own worker processes do here: every look at ``vllm.envs`` reads the environment otherwise.
        if (cache := getattr(vllm.envs, "enable_envs_cache", None)) is not None:
            cache()

    def model_files(self) -> tuple[str, dict[str, tuple[int, int]]]:
        """This worker's node, and the model's files on it: name -> (size, time of the last change in ns)."""
        return self._assignment.node_id, checkpoint.files(self.vllm_config.model_config.model)

    def check_model_files(self, known: dict[str, dict[str, tuple[int, int]]]) -> None:
        """Compare the model's files with those that the first workers have loaded.

        Raises:
            CheckpointChanged: they are others.
        """
        checkpoint.check(known, *self.model_files())

    def get_import_seconds(self) -> float:
        """How long it took to import vLLM and to build its worker."""
        return self.import_seconds

    def bind_thread(self) -> None:
        """Select the device in the graph's own thread."""
        device = getattr(self.worker, "device", None)
        if device is not None and device.type not in ("cpu", "meta") and not current_platform.is_tpu():
            current_platform.set_device(device)

    # -- steps ------------------------------------------------------------------------------------------------------

    def execute_stage(self, step: Step, grammar_output: Any, handover: Handover | None) -> Any:
        """Run this rank's part of a step.

        Returns:
            before the last stage a :class:`Handover`; on it vLLM's ``ModelRunnerOutput``, with a KV connector a
            :class:`StageOutputs`.
        """
        runner = self.worker.model_runner
        connector_outputs = handover.connector_outputs if handover is not None else ()
        own = self._pay_sampling(runner)
        scheduler_output = step.scheduler_output
        if step.admissions:
            admission.admit(runner, step.admissions, scheduler_output)
        if getattr(self, "mm_receiver_cache", None) is not None:
            self._apply_mm_cache(scheduler_output)
        if not self._first_stage:
            _provide_intermediate_tensors(runner)
        tensors = handover.tensors if handover is not None else None
        output = self._forward(runner, scheduler_output, IntermediateTensors(tensors) if tensors is not None else None)

        if isinstance(output, IntermediateTensors):
            self._owes_sampling = True
            if not _receives_samples(runner):
                own = self._pay_sampling(runner)
            return Handover(output.tensors, self._with(connector_outputs, own))
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        if not self._last_stage:  # no tokens in this step, but perhaps finished requests or news of the connector
            return Handover(None, self._with(connector_outputs, output or own))
        if output is None:
            if self._on_cpu:
                cpu_generators.prepare(runner)
            output = runner.sample_tokens(grammar_output)
            if isinstance(output, AsyncModelRunnerOutput):
                output = output.get_output()
        return StageOutputs(output, connector_outputs) if self._has_connector else output

    def _forward(self, runner: Any, scheduler_output: Any, intermediate: IntermediateTensors | None) -> Any:
        annotate = getattr(self.worker, "annotate_profile", None)
        with annotate(scheduler_output) if annotate is not None else contextlib.nullcontext():
            output = runner.execute_model(scheduler_output, intermediate)
            if output is None and getattr(runner, "is_pooling_model", False) and hasattr(runner, "pool"):
                output = runner.pool()  # model runner V2
        return output

    def _pay_sampling(self, runner: Any) -> ModelRunnerOutput | None:
        """On an earlier stage: take what the last stage has sampled in the last step, and the connector's output.

        Where that is a message of the last stage, it must not be awaited in the step itself, which has not reached the
        last stage yet; it is taken before the next step, the order in which vLLM's own workers take it.
        """
        if not self._owes_sampling:
            return None
        self._owes_sampling = False
        return runner.sample_tokens(None)

    def _with(self, earlier: tuple[Any, ...], output: ModelRunnerOutput | None) -> tuple[Any, ...]:
        if not self._has_connector:
            return ()
        return (*earlier, getattr(output, "kv_connector_output", None))


def physical_ids(device_ids: Sequence[str]) -> list[Any]:
    """Ray's device ids of a node as the platform numbers them, sorted."""
    translate = getattr(current_platform, "device_control_id_to_physical_device_id", None)
    ids = [translate(device_id) if translate is not None else int(device_id) for device_id in device_ids]
    return sorted(ids)


def _receives_samples(runner: Any) -> bool:
    """Whether an earlier stage's ``sample_tokens`` waits for a message of the last stage."""
    return bool(getattr(runner, "use_async_scheduling", False)) or getattr(runner, "pp_handler", None) is not None


def _provide_intermediate_tensors(runner: Any) -> None:
    """Allocate the buffer of a later stage's input, which V1 only does in a warm-up run that CPUs skip."""
    if getattr(runner, "intermediate_tensors", _ABSENT) is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _override_kernels_once() -> None:
    """Have the platform replace its kernels now, which looks at every name in every module (0.3 s), and not again.

    Whatever is imported later finds the replaced ones.
    """
    override = getattr(current_platform, "register_triton_kernel_overrides", None)
    if override is not None:
        override()
        current_platform.register_triton_kernel_overrides = lambda: None


_ABSENT = object()
