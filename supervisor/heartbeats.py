"""The supervisor's heartbeats: for each node one call to its agent; for a worker alone where that does not work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from resilient_executor.errors import brief
from resilient_executor.heart import Beat
from resilient_executor.protocol import Progress
from resilient_executor.supervisor.calls import within
from resilient_executor.supervisor.pulse import Pulse
from resilient_executor.supervisor.watch import Watch, WatchSettings

if TYPE_CHECKING:
    from resilient_executor.supervisor.actor import Member

logger = logging.getLogger(__name__)


class Heartbeats:
    """Those of one epoch. Its tasks run until they are cancelled.

    Args:
        watch: is told what is heard.
        pulse: the same, for metrics.
        settings: interval and leases.
        grantor: under whose name leases are renewed.
        refused: called with a rank that says that it is of another group, and what it says.
        spawn: makes a task.
    """

    def __init__(
        self,
        watch: Watch,
        pulse: Pulse,
        settings: WatchSettings,
        grantor: str,
        refused: Callable[[int, str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._watch, self._pulse = watch, pulse
        self._settings, self._grantor = settings, grantor
        self._refused, self._spawn = refused, spawn

    async def of_node(self, members: Sequence[Member], agent: ActorHandle) -> None:
        """Beats for one node's workers, through its agent, which must also be kept from ending them.

        When the agent dies or is slow, its workers are called one by one from then on; so is one who does not answer
        on this way. The agent asks nobody again who owes it an answer: meanwhile the silence grows.
        """
        settings, interval_s = self._settings, self._settings.heartbeat_interval_s
        # In time for the calls that take its place, before any lease has run out.
        limit_s = interval_s / 2 + settings.lease_s / 3
        wanted = [member.process for member in members]
        left = dict(zip(wanted, members, strict=True))
        heard = dict.fromkeys(left, 0)
        number = 0
        while left:
            began, number = time.monotonic(), number + 1
            beats = {process: Beat(self._watch.epoch, self._grantor, number, heard[process]) for process in left}
            try:
                call = agent.beat.remote(beats, interval_s / 2, wanted, settings.lease_s, settings.lease_grace_s)
                took_s, answers = await within(call, limit_s)
                now = time.monotonic()
                for process, answer in answers.items():
                    if answer.progress is not None:
                        heard[process] = answer.number
                        self._heard(answer.progress, now, now - began - took_s + answer.trip_s)
                        continue
                    member = left.pop(process)
                    if answer.reachable:
                        self._refused(member.rank, answer.refusal)
                    else:
                        self._spawn(self.of_worker(member, number, heard[process]))
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, its workers must not suffer for it
                if time.monotonic() - began > limit_s + interval_s:
                    continue  # it was this process that did not run
                logger.warning("heartbeats go past the agent of %s: %s", members[0].node_ip, brief(error))
                break
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))
        for process, member in left.items():
            self._spawn(self.of_worker(member, number, heard[process]))
        while True:
            try:
                await agent.renew.remote(wanted, settings.lease_s, settings.lease_grace_s)
            except RayActorError:
                return  # it ends nobody any more
            await asyncio.sleep(settings.lease_s / 3)

    async def of_worker(self, member: Member, number: int, heard: int) -> None:
        """Beats for one worker, by calls of Ray, one after the other.

        Args:
            member: the worker.
            number: of the last beat that was sent to it.
            heard: of the last one whose answer has come; the worker's lease is counted from there.
        """
        interval_s = self._settings.heartbeat_interval_s
        while True:
            began, number = time.monotonic(), number + 1
            try:
                progress = await member.handle.heartbeat.remote(self._watch.epoch, self._grantor, number, heard)
                now, heard = time.monotonic(), number
                self._heard(progress, now, now - began)
            except RayActorError:
                pass  # the sentinel says the same, and says why
            except Exception as error:  # noqa: BLE001 - StaleEpoch and the like: alive, but not of this group
                self._refused(member.rank, brief(error))
                return
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))

    def _heard(self, progress: Progress, now: float, round_trip_s: float) -> None:
        self._watch.heard(progress, now, round_trip_s)
        self._pulse.heard(progress.rank, now, round_trip_s)
