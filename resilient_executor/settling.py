"""After a worker's own exception: whether its peers have come out of what they did with it, and what it has spoilt.

A rank that raised goes on to what comes next, and meets peers in it that may still be in what it raised in. So two
things count: that everybody is out of it, and, when more was in flight behind it, that those who work together all
raised or all did not.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from resilient_executor.protocol import Progress, WorkerException
from resilient_executor.ranks import grid

#: For a result that is here already, in seconds.
_AT_HAND_S: Final = 5.0


class Outcome(enum.Enum):
    """What a rank has made of a step or a call."""

    #: It is in it, or has not begun it yet.
    AHEAD = "ahead"
    FINISHED = "finished"
    RAISED = "raised"
    #: The rank that feeds it raised, so it never sees the step.
    PASSED_OVER = "passed over"


class Settling(Protocol):
    """What a worker has raised in."""

    def __str__(self) -> str:
        """What it is called."""

    def outcomes(self, progress: Mapping[int, Progress]) -> list[Outcome]:
        """What each rank has made of it, in rank order, by what is known of them now."""

    def groups(self) -> Sequence[Sequence[int]]:
        """The ranks that meet in collectives."""


class StepSettling:
    """A step.

    Args:
        step_id: of the step that is at the head of the pipeline: the replies to all before it have been read.
        tensor_parallel_size, pipeline_parallel_size: of the group.
    """

    def __init__(self, step_id: int, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
        self.step_id = step_id
        self._stages = grid(tensor_parallel_size, pipeline_parallel_size)

    def __str__(self) -> str:
        return f"step {self.step_id}"

    def outcomes(self, progress: Mapping[int, Progress]) -> list[Outcome]:
        """See :class:`Settling`. That a rank is between steps says nothing: it may not have begun this one."""
        found: list[Outcome] = []
        for number, stage in enumerate(self._stages):
            feeders = self._stages[number - 1] if number else ()
            for place, rank in enumerate(stage):
                of_rank = progress.get(rank)
                if of_rank is None:
                    found.append(Outcome.AHEAD)
                elif feeders and found[feeders[place]] in (Outcome.RAISED, Outcome.PASSED_OVER):
                    found.append(Outcome.PASSED_OVER)
                elif of_rank.last_step < self.step_id:
                    found.append(Outcome.AHEAD)
                else:
                    found.append(Outcome.RAISED if self.step_id in of_rank.failed_steps else Outcome.FINISHED)
        return found

    def groups(self) -> Sequence[Sequence[int]]:
        """The stages."""
        return self._stages


class CallSettling:
    """A collective RPC.

    Args:
        name: of the method.
        references: Ray's, in rank order.
    """

    def __init__(self, name: str, references: Sequence[Any]) -> None:
        self._name = name
        self._references = list(references)

    def __str__(self) -> str:
        return f"collective RPC {self._name}"

    def outcomes(self, progress: Mapping[int, Progress]) -> list[Outcome]:
        """See :class:`Settling`. Ray knows who has answered."""
        done, _ = ray.wait(self._references, num_returns=len(self._references), timeout=0, fetch_local=False)
        return [_outcome(one) if one in done else Outcome.AHEAD for one in self._references]

    def groups(self) -> Sequence[Sequence[int]]:
        """All ranks."""
        return [range(len(self._references))]


def _outcome(reference: Any) -> Outcome:
    try:
        ray.get(reference, timeout=_AT_HAND_S)
    except GetTimeoutError:  # a large result on another node; an error is small, and here
        return Outcome.FINISHED
    except RayTaskError as error:
        return Outcome.RAISED if isinstance(error.cause, WorkerException) else Outcome.AHEAD
    except RayError:  # a death, which is somebody else's matter
        return Outcome.AHEAD
    return Outcome.FINISHED


def spoilt(settling: Settling, outcomes: Sequence[Outcome]) -> str:
    """Why what was in flight behind it cannot be believed; "" when it can."""
    for group in settling.groups():
        finished = [rank for rank in group if outcomes[rank] is Outcome.FINISHED]
        others = [rank for rank in group if outcomes[rank] is not Outcome.FINISHED]
        if finished and others:
            how = "raised in" if any(outcomes[rank] is Outcome.RAISED for rank in others) else "never came to"
            return (
                f"ranks {others} {how} {settling}, and their peers {finished} did not: collectives of what was sent "
                "behind it may meet the wrong ones"
            )
    return ""
