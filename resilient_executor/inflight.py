"""One step in flight, and its future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from resilient_executor.protocol import StepKind

if TYPE_CHECKING:
    from resilient_executor.pipeline import StepPipeline
    from resilient_executor.telemetry.steps import StepTrace


class InflightStep:
    """One step between submission and end."""

    __slots__ = ("done", "error", "future", "kind", "output", "references", "size", "step_id", "trace")

    def __init__(self, future: StepFuture | None, kind: StepKind, trace: StepTrace | None, size: int) -> None:
        self.step_id = -1
        self.kind = kind
        self.future = future
        self.trace = trace
        self.references: Any = None
        self.output: Any = None
        self.error: Exception | None = None
        self.done = False
        #: Of the request, in bytes.
        self.size = size


class StepFuture(Future[Any]):
    """The future of one step. It can be waited for, polled and given callbacks like any other, but not cancelled."""

    def __init__(self) -> None:
        self._pipeline: StepPipeline | None = None
        self._step: InflightStep | None = None
        super().__init__()
        self.set_running_or_notify_cancel()

    @property
    def _waiters(self) -> list[Any]:
        """Who waits in ``concurrent.futures.wait`` or ``as_completed``: they register here, and read nothing."""
        self._drive(0.0)
        return self._registered

    @_waiters.setter
    def _waiters(self, waiters: list[Any]) -> None:
        self._registered = waiters

    def attach(self, pipeline: StepPipeline, step: InflightStep) -> None:
        """Connect it with the step that will resolve it."""
        self._pipeline, self._step = pipeline, step

    def result(self, timeout: float | None = None) -> Any:
        """The step's output.

        Raises:
            TimeoutError: not within ``timeout`` seconds; the step goes on.
            StepLost: its epoch died.
            Exception: what the worker raised.
        """
        self._drive(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The step's error, or None; waits like :meth:`result`."""
        self._drive(timeout)
        return super().exception(timeout)

    def done(self) -> bool:
        """Whether the step has ended. Does not wait."""
        if not super().done():
            self._drive(0.0)
        return super().done()

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call ``fn`` with this future when the step has ended."""
        super().add_done_callback(fn)
        if not super().done():
            self._drive(0.0)

    def _drive(self, timeout: float | None) -> None:
        """See to it that somebody reads: this thread if it may wait without a limit, else the reader thread."""
        if self._pipeline is None or self._step is None or self._step.done:
            return
        if timeout is None:
            self._pipeline.read_until(self._step)
        else:
            self._pipeline.read_in_background()


def tell(step: InflightStep) -> None:
    """Tell a step's future and its trace that it has ended."""
    future = step.future
    if future is not None:
        if step.error is not None:
            future.set_exception(step.error)
        else:
            future.set_result(step.output)
    if step.trace is not None:
        step.trace.ended(step.error)
