"""What travels between the adapter's parts: steps to the workers, results back, marks to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from resilient_executor.supervisor.incidents import Cause


class Step(NamedTuple):
    """What a worker gets for one step.

    Attributes:
        scheduler_output: vLLM's own.
        admissions: ``NewRequestData`` of requests that the step takes for known, and that new workers have never seen.
            Model runner V1 only; V2 gets resumed requests in full anyway.
    """

    scheduler_output: SchedulerOutput
    admissions: Sequence[Any] = ()


class Handover(NamedTuple):
    """What a stage passes to the next one.

    Attributes:
        tensors: hidden states by name, or None when the step has no tokens.
        connector_outputs: KV connector outputs of this TP rank's earlier stages, in order; empty without a connector.
    """

    tensors: dict[str, Any] | None
    connector_outputs: tuple[Any, ...] = ()


class StageOutputs(NamedTuple):
    """What the last stage returns where a KV connector wants to hear from all ranks.

    Attributes:
        output: this rank's own output.
        earlier: KV connector outputs of this TP rank's earlier stages.
    """

    output: ModelRunnerOutput
    earlier: tuple[Any, ...]


@dataclass(frozen=True)
class Loss:
    """One death of all workers, as the scheduler learns of it.

    Attributes:
        epoch: the generation that died; 0 where there is nothing to start over for: the step was planned before the
            engine knew of a loss that it knows of now, or the engine is about to end.
        refresh: called with the scheduler when it has started over.
        cause: the first cause of the death; waits a moment for it, None if it does not become known.
        poison_crashes: the setting.
        stormy: workers had died in the rebuild that made this generation, too.
    """

    epoch: int
    refresh: Callable[[Any], None]
    cause: Callable[[], Cause | None]
    poison_crashes: int
    stormy: bool = False


class LostStepOutput(ModelRunnerOutput):  # type: ignore[misc]  # vLLM is untyped here
    """The output of a step that died with its workers: nothing, and the reason."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(req_ids=[], req_id_to_index={})
        self.loss = loss


def blank_output(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """An output for every request of a step in which nothing was computed."""
    ids = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[] for _ in ids],
    )
