"""For which workers a step was planned: the engine's schedule belongs to the workers that know its requests.

Workers can be replaced between two steps, with nothing in flight that could be lost. The engine must hear of it all the
same, or its next step would meet workers that have never seen its requests. So each step carries the plan under which
it was scheduled, and one that was planned for others than those that serve is lost without being sent.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from resilient_executor.errors import StepLost
from resilient_executor.inflight import StepFuture


class Plan(NamedTuple):
    """What the engine knew when it scheduled a step.

    Attributes:
        epoch: the epoch whose workers know its requests; 0 when it begins from nothing, for any epoch.
        losses: how many losses it had been told of.
    """

    epoch: int
    losses: int


class Plans:
    """What the engine knows now. Belongs to the engine's thread, as the steps do."""

    def __init__(self) -> None:
        self.current = Plan(0, 0)
        self._told_epoch = 0

    def settle_on(self, epoch: int) -> None:
        """A step goes to this epoch's workers: from now on they know the engine's requests."""
        if epoch != self.current.epoch:
            self.current = Plan(epoch, self.current.losses)

    def told(self, lost: StepLost) -> None:
        """The engine has learnt of a loss, and begins from nothing. Further losses of the same epoch are old news."""
        if lost.epoch > self._told_epoch:
            self._told_epoch = lost.epoch
            self.current = Plan(0, self.current.losses + 1)


class EngineFuture(StepFuture):
    """A step's future that says when the engine learns of a loss from it."""

    def __init__(self, told: Callable[[StepLost], None]) -> None:
        super().__init__()
        self._report: Callable[[StepLost], None] | None = told

    def result(self, timeout: float | None = None) -> Any:
        """See :meth:`StepFuture.result`."""
        try:
            return super().result(timeout)
        except StepLost as lost:
            self._note(lost)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :meth:`StepFuture.exception`."""
        error = super().exception(timeout)
        if isinstance(error, StepLost):
            self._note(error)
        return error

    def fail(self, error: Exception) -> None:
        """End it without a step."""
        self.set_exception(error)

    def _note(self, lost: StepLost) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(lost)


def completed(value: Any) -> Future[Any]:
    """A future that has ended already."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
