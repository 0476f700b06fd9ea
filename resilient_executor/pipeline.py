"""Steps in flight through one epoch's graph: the hot path of the executor.

Steps enter and leave in order. A blocking step is read by the thread that submitted it, without a hop to another
thread; a future is read by the thread that asks for its result. A reader thread exists only where somebody asks without
waiting (``done``, a callback, a timeout). Two locks, one for either end of the graph, are all that a step takes.

A step ends in one of three ways: its output; the worker's own exception; :class:`StepLost`, when the epoch is
condemned. After it is condemned nothing that comes out of the graph is believed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from ray.exceptions import RayTaskError

from resilient_executor import protocol
from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import StepLost, brief
from resilient_executor.inflight import InflightStep, StepFuture, tell
from resilient_executor.protocol import StepKind, WorkerException

if TYPE_CHECKING:
    from resilient_executor.graph import StepGraph
    from resilient_executor.supervisor.incidents import Incident
    from resilient_executor.telemetry.steps import StepTrace

#: A wire holds at least so many bytes on their way, and so many messages.
_HELD_BYTES: Final = 65_536
_HELD_MESSAGES: Final = 8
#: How long somebody who cannot go on without a verdict waits for it, beyond the time that the judge was given: that may
#: have to wait for a supervisor that gets no processor.
VERDICT_GRACE_S: Final = 100.0


class Judge(Protocol):
    """What the pipeline asks of the executor when something other than an output comes out of the graph."""

    def graph_broken(self, epoch: int, text: str) -> None:
        """The graph gave an error of its own. Condemns the epoch before it returns."""

    def step_raised(self, epoch: int, step_id: int) -> bool:
        """A worker raised. Returns whether that worker's epoch is dying, so that the exception is only a symptom.

        Otherwise ``calm`` is not set from before the return until it is known whether the rank's peers kept step.

        Args:
            epoch: the epoch of the step.
            step_id: the step, still at the head of the pipeline.
        """


class StepPipeline:
    """One epoch's graph with the steps in it."""

    def __init__(
        self,
        graph: StepGraph,
        epoch: int,
        config: ExecutorConfig,
        judge: Judge,
        step_ids: Iterator[int],
        calm: threading.Event,
    ) -> None:
        """Take over the graph.

        Args:
            graph: of the epoch.
            epoch: whose steps these are.
            config: of the executor.
            judge: whom to ask about errors.
            step_ids: gives each step its number when it is sent, so that numbers rise on every rank.
            calm: set unless a worker raised, and nobody knows yet whether its peers kept step.
        """
        self.epoch = epoch
        self.incident: Incident | None = None
        self._graph = graph
        self._judge = judge
        self._limit = config.inflight_limit
        self._aggregate = config.output_aggregator
        self._output_rank = config.output_rank
        self._verdict_timeout_s = config.settle_timeout_s + config.check_health_timeout_s + VERDICT_GRACE_S
        self._inflight: deque[InflightStep] = deque()
        # Reentrant: an aggregator runs in the thread that reads, and may read in its turn.
        self._submit_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._reader_lock = threading.Lock()
        #: Real steps whose replies have come, over the epoch.
        self.steps_read = 0
        self._condemned = False
        self._calm = calm
        self._step_ids = step_ids
        #: The step that was sent last, or is being sent; -1 for none.
        self.sent_step = -1
        self._wanted = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def condemned(self) -> bool:
        """Whether the epoch is over."""
        return self._condemned

    @property
    def oldest_step(self) -> int:
        """The step at the head of the pipeline, or -1 when none is in flight."""
        try:
            return self._inflight[0].step_id
        except IndexError:
            return -1

    @property
    def newest_step(self) -> int:
        """The step at the end of the pipeline, or -1 when none is in flight."""
        try:
            return self._inflight[-1].step_id
        except IndexError:
            return -1

    # -- one end ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        value: Any,
        future: StepFuture | None = None,
        kind: StepKind = StepKind.STEP,
        trace: StepTrace | None = None,
    ) -> InflightStep:
        """Send a step into the graph. When it is full, the oldest step is read out first, into its future.

        Raises:
            StepLost: the epoch is condemned, or this is how it is found out.
        """
        context = trace.header if trace is not None else b""
        body = protocol.request_body(value, context)
        step = InflightStep(future, kind, trace, len(body))
        while True:
            # Room is made before the lock is taken: what is read ends futures, and their callbacks may submit.
            while len(self._inflight) >= self._limit and not self._condemned:
                self._read(full=True)
            with self._submit_lock:
                if self._condemned:
                    raise StepLost(self.epoch, -1, self.incident)
                if len(self._inflight) >= self._limit:
                    continue  # another thread was quicker
                self._send(step, len(context), body)
                return step

    def _send(self, step: InflightStep, context_length: int, body: bytes) -> None:
        """Send a step for which there is room; the lock for it is held."""
        if self._inflight and self._graph.by_wire and self._may_wait(step.size):
            # It may have to wait for a rank that cannot go on until its own large reply is read.
            self.read_in_background()
        # Known before a rank can see it: whoever judges what an exception has spoilt asks what came behind it.
        step.step_id = self.sent_step = next(self._step_ids)
        try:
            step.references = self._graph.submit(
                protocol.encode_request(self.epoch, step.step_id, step.kind, context_length, body)
            )
        except BaseException as error:  # Ctrl-C, too: some ranks may have it, and some not
            self._judge.graph_broken(self.epoch, brief(error))
            if not isinstance(error, Exception):
                raise
            raise StepLost(self.epoch, step.step_id, self.incident) from error
        if step.trace is not None:
            step.trace.sent(self.epoch, step.step_id)
        self._inflight.append(step)
        if step.future is not None:
            # Not before: whoever asks it reads until its step has ended, and one that was refused never would.
            step.future.attach(self, step)
        if self.condemned:  # meanwhile; whoever ends what is in flight may have been here already
            self.read_in_background()

    def _may_wait(self, size: int) -> bool:
        inflight = self._inflight.copy()
        return len(inflight) >= _HELD_MESSAGES or (
            self._graph.crosses_nodes and sum(step.size for step in inflight) + size > _HELD_BYTES
        )

    # -- the other end ----------------------------------------------------------------------------------------------

    def run(self, value: Any, kind: StepKind = StepKind.STEP, trace: StepTrace | None = None) -> Any:
        """Submit a step and wait for its output.

        Raises:
            StepLost: the epoch died.
            Exception: what the worker raised.
        """
        step = self.submit(value, kind=kind, trace=trace)
        self.read_until(step)
        if step.error is not None:
            raise step.error
        return step.output

    def read_until(self, step: InflightStep) -> None:
        """Read steps out of the graph, oldest first, until ``step`` has ended."""
        while not step.done:
            self._read(step)

    def _read(self, wanted: InflightStep | None = None, full: bool = False) -> None:
        """Read the oldest step, unless ``wanted`` has ended meanwhile, or, with ``full``, there is room again.

        A future is told after the lock has been released: its callbacks do as they please.
        """
        with self._read_lock:
            if (wanted is not None and wanted.done) or (full and len(self._inflight) < self._limit):
                return
            ended = self._read_next()
        if ended is not None:
            tell(ended)
        if self._condemned:
            self._lose_all()

    def _read_next(self) -> InflightStep | None:
        """Read the oldest step, and end it; the read lock is held. Returns None when there was none."""
        # Not set: a worker raised in something earlier, and nobody knows yet whether its peers kept step.
        if not self._calm.is_set() and not self._calm.wait(self._verdict_timeout_s):
            self._judge.graph_broken(
                self.epoch, "a worker raised, and it was not found out whether its peers kept step"
            )
        if self._condemned or not self._inflight:
            return self._lose_next()
        step = self._inflight[0]
        error: Exception | None = None
        replies: list[bytes] = []
        try:
            replies = self._graph.fetch(step.references)
            self._check(step, replies)
            if step.trace is not None:
                step.trace.answered(replies)
        except Exception as raised:  # noqa: BLE001 - everything that is not the worker's own is the graph's
            error = self._worker_error(raised, step)
            if error is None:
                self._judge.graph_broken(self.epoch, brief(raised))
        if self.condemned:
            return self._lose_next()
        self._inflight.popleft()
        step.references = None
        if error is None and step.kind == StepKind.STEP:  # a warm-up has no output that an aggregator could understand
            self.steps_read += 1
            try:
                step.output = self._output_of(replies)
            except Exception as raised:  # noqa: BLE001 - the engine's own: its classes, its aggregator
                error = raised
            except BaseException:  # Ctrl-C: it is in no queue any more, and somebody else may wait for it
                step.error, step.done = StepLost(self.epoch, step.step_id, self.incident), True
                tell(step)
                raise
        step.error = error
        step.done = True
        return step

    def _check(self, step: InflightStep, replies: list[bytes]) -> None:
        """Check whom the replies are from and which step they answer."""
        for tp_rank, reply in enumerate(replies):
            got = protocol.reply_header(reply)
            if got != (self.epoch, step.step_id, self._output_rank + tp_rank):
                raise RuntimeError(
                    f"expected a reply to step {step.step_id} of epoch {self.epoch} from rank "
                    f"{self._output_rank + tp_rank}, and got (epoch, step, rank) = {got}"
                )

    def _output_of(self, replies: list[bytes]) -> Any:
        if self._aggregate is None:
            return protocol.reply_output(replies[0])
        return self._aggregate([protocol.reply_output(reply) for reply in replies])

    def _worker_error(self, raised: Exception, step: InflightStep) -> Exception | None:
        """The worker's own exception, if that is what was raised and the epoch is not dying of something else."""
        cause = getattr(raised, "cause", None) if isinstance(raised, RayTaskError) else None
        if not isinstance(cause, WorkerException) or cause.epoch != self.epoch or cause.call_id != step.step_id:
            return None
        if self._judge.step_raised(self.epoch, step.step_id):
            return None
        return cause.original()

    def _lose_next(self) -> InflightStep | None:
        if not self._inflight:
            return None
        step = self._inflight.popleft()
        self._graph.discard(step.references)
        step.references = None
        step.error = StepLost(self.epoch, step.step_id, self.incident)
        step.done = True
        return step

    def _lose_all(self) -> None:
        """One after the other: the callback of one may ask for the next one's result."""
        lost: InflightStep | None
        while self._inflight:
            with self._read_lock:
                lost = self._lose_next()
            if lost is not None:
                tell(lost)

    def read_in_background(self) -> None:
        """Have the reader thread read the next step."""
        with self._reader_lock:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._read_loop, name="resilient-executor-read", daemon=True)
                self._reader.start()
        self._wanted.set()

    def _read_loop(self) -> None:
        while self._inflight or not self._condemned:
            self._wanted.wait(1.0)
            self._wanted.clear()  # before the look: who sets it has put its step in flight
            while self._inflight:
                self._read()

    # -- the end of the epoch ---------------------------------------------------------------------------------------

    def condemn(self, incident: Incident | None) -> None:
        """Believe nothing of this epoch any more. Does not wait; see :meth:`lose_inflight`."""
        if incident is not None:
            self.incident = incident
        self._condemned = True
        self._calm.set()

    def lose_inflight(self, timeout_s: float) -> bool:
        """End every step in flight as lost, once whoever reads has been released by the graph's teardown.

        Returns:
            whether that could be done within ``timeout_s``; otherwise the reader does it when it comes out.
        """
        # In a thread of its own: futures are told in it, and their callbacks may wait for what the caller does next.
        thread = threading.Thread(target=self._lose_all, name="resilient-executor-lose", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()
