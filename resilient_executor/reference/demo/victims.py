"""Kills workers: really, with SIGKILL, from a thread of its own, at the moments of the plan."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from resilient_executor.lifecycle import ExecutorState
from resilient_executor.processes import ProcessHandle
from resilient_executor.reference.demo.plan import Moment, PlannedKill
from resilient_executor.reference.demo.story import Story

if TYPE_CHECKING:
    from resilient_executor.protocol import WorkerInfo

logger = logging.getLogger(__name__)

#: How long the killer waits for the moment of one kill, and then for a process that it could kill.
_MOMENT_S: Final = 300.0
_VICTIM_S: Final = 10.0
#: For a process to be gone after SIGKILL.
_GONE_S: Final = 5.0


class Killer(threading.Thread):
    """Carries out a plan, kill by kill; each waits for its moment.

    Args:
        plan: the kills, in order.
        story: tells the moments, and keeps what was done.
        workers: the workers of the newest epoch, in rank order.
        node_id: this machine; workers elsewhere cannot be killed from here.
    """

    def __init__(
        self,
        plan: Sequence[PlannedKill],
        story: Story,
        workers: Callable[[], Sequence[WorkerInfo]],
        node_id: str,
    ) -> None:
        super().__init__(name="demo-killer", daemon=True)
        self._plan = plan
        self._story = story
        self._workers = workers
        self._node_id = node_id
        self._stopped = threading.Event()

    def run(self) -> None:
        """Carry out the plan."""
        try:
            for planned in self._plan:
                if not self._await_moment(planned) or not self._kill(planned):
                    return
        except Exception as error:
            logger.exception("the killer failed")
            self._story.trouble = f"the killer failed: {error}"

    def stop(self) -> None:
        """Kill nobody any more; returns when that is certain."""
        self._stopped.set()
        with self._story.changed:
            self._story.changed.notify_all()
        if self.is_alive():
            self.join(_GONE_S + 1)

    def _await_moment(self, planned: PlannedKill) -> bool:
        story, last_epoch = self._story, self._story.last_kill_epoch

        def has_come() -> bool:
            if self._stopped.is_set() or story.state in (ExecutorState.FAILED, ExecutorState.STOPPED):
                return True
            if planned.moment is Moment.IN_REBUILD:
                return any(epoch > last_epoch and phase == planned.phase for epoch, phase in story.phases_begun)
            in_service = story.state is ExecutorState.HEALTHY and story.served_epoch > last_epoch
            return in_service and story.tokens_in_service >= planned.after_tokens

        with story.changed:
            come = story.changed.wait_for(has_come, timeout=_MOMENT_S)
        return come and not self._stopped.wait(planned.delay_s)

    def _kill(self, planned: PlannedKill) -> bool:
        """Kill one worker; whether that was done. A worker that has just died is no victim: then it is the next."""
        deadline = time.monotonic() + _VICTIM_S
        while time.monotonic() < deadline and not self._stopped.is_set():
            workers = list(enumerate(self._workers()))
            for rank, worker in workers[planned.rank :] + workers[: planned.rank]:
                if worker.process.node_id != self._node_id:
                    continue
                try:
                    process = ProcessHandle(worker.process)
                except ProcessLookupError:
                    continue
                with process:
                    kill = self._story.kill_begins(planned, rank, worker.process.pid)
                    process.kill()
                    gone = process.wait(_GONE_S)
                    number = process.exit_status().signal if gone else None
                self._story.kill_ended(kill, delivered=gone and number in (None, signal.SIGKILL), signal=number)
                return True
            self._stopped.wait(0.02)
        return False
