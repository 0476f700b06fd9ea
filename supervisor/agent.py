"""The node agent: one small actor on every node that has workers.

It holds a pidfd on each worker of its node, so it knows within a millisecond that one has ended, and how. It fences:
kills what must be gone and proves it. It looks at processes that do not answer: whether they run, and what their stacks
are. And it holds their leases: when nobody has renewed them for a while, the supervisor and the executor cannot reach
this node, and have given it up; then it ends all its workers, those included that cannot end themselves.
It lives outside the placement groups of the epochs and outlives them all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from resilient_executor import semaphores, stacks
from resilient_executor.heart import Answer, Beat
from resilient_executor.lease import Lease
from resilient_executor.processes import ProcessHandle, identify, take_ordinary_priority, vitals
from resilient_executor.protocol import ExitStatus, ProcessIdentity, Vitals
from resilient_executor.supervisor.beats import Beats
from resilient_executor.supervisor.calls import within
from resilient_executor.supervisor.estate import Estate
from resilient_executor.supervisor.links import Door, silent_of
from resilient_executor.supervisor.stalls import tidy_stacks

logger = logging.getLogger(__name__)

#: Between two looks at the lease, in seconds.
_LEASE_LOOK_S = 0.5
#: A worker that can end itself has so many seconds more to do it before its agent does.
_PATIENCE_S = 2.0
#: For a process to write its stacks, in seconds.
_STACKS_S = 1.0
#: Between two looks at what news ends a wait for, in seconds.
_AGAIN_S = 3600.0


@dataclass(frozen=True)
class Fenced:
    """What fencing found of one process.

    Attributes:
        process: which.
        gone: proven to have ended.
        lost: why its node cannot be asked, or "".
        exit: how it ended, when the agent saw it end *before* it was told to fence; a death of its own, not by us.
    """

    process: ProcessIdentity
    gone: bool
    exit: ExitStatus | None
    lost: str = ""


class NodeAgent:
    """Watches and fences processes of its own node. An asyncio actor: every wait is a timer or a descriptor."""

    def __init__(self) -> None:
        take_ordinary_priority()
        self._handles: dict[ProcessIdentity, ProcessHandle] = {}
        #: In order of death, each with whether the process died before this agent was told to kill it.
        self._exits: dict[ProcessIdentity, tuple[ExitStatus, bool]] = {}
        self._fenced: set[ProcessIdentity] = set()
        self._changed = asyncio.Event()
        self._leases: dict[ProcessIdentity, Lease] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._door = Door()
        self._beats: Beats | None = None

    async def identity(self) -> ProcessIdentity:
        """This agent's own process."""
        return identify(os.getpid(), ray.get_runtime_context().get_node_id())

    async def stay(self, owner: ProcessIdentity) -> None:
        """Return never: whoever calls learns when this agent has died.

        If this node's cluster is one that ``owner`` has embedded, it ends with it: see :class:`Estate`.
        """
        if (estate := Estate.of(owner)) is not None:
            await self.watch([owner])
            while not await self.exits([owner], 0, _AGAIN_S):
                pass
            if await asyncio.get_running_loop().run_in_executor(None, estate.clear):
                os._exit(0)
        await asyncio.Event().wait()  # without a bound, on purpose: it ends with the process, and that is the news

    async def watch(self, processes: Sequence[ProcessIdentity]) -> None:
        """Watch these from now on, beside those watched already."""
        for process in processes:
            if process in self._handles or process in self._exits:
                continue
            try:
                handle = ProcessHandle(process)
            except ProcessLookupError:
                self._note(
                    process, ExitStatus(process.pid, None, None, time.time(), "it had ended before it was watched")
                )
                continue
            self._handles[process] = handle
            asyncio.get_running_loop().add_reader(handle.fd, self._on_exit, process)

    def _on_exit(self, process: ProcessIdentity) -> None:
        handle = self._handles.pop(process)
        if self._beats is not None:
            self._beats.forget(process)
        asyncio.get_running_loop().remove_reader(handle.fd)
        self._note(process, handle.exit_status())
        handle.close()

    def _note(self, process: ProcessIdentity, status: ExitStatus) -> None:
        self._exits[process] = (status, process not in self._fenced)
        self._changed.set()
        self._changed = asyncio.Event()

    async def exits(
        self, processes: Sequence[ProcessIdentity], known: int, timeout_s: float
    ) -> list[tuple[ProcessIdentity, ExitStatus]]:
        """Which of ``processes`` have ended, in order of death; waits until there are more than ``known`` of them.

        Returns what there is when ``timeout_s`` has passed.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        wanted = set(processes)
        while True:
            changed = self._changed
            found = [(process, status) for process, (status, _) in self._exits.items() if process in wanted]
            remaining = deadline - asyncio.get_running_loop().time()
            if len(found) > known or remaining <= 0:
                return found
            try:
                await within(changed.wait(), remaining)
            except asyncio.TimeoutError:
                continue

    async def fence(self, processes: Sequence[ProcessIdentity], timeout_s: float) -> list[Fenced]:
        """Kill every one of ``processes`` and wait until the kernel says that it is gone, at most ``timeout_s``."""
        await self.watch(processes)
        for process in processes:
            # It may have died of its own just now, and the event loop has not come round to it.
            if process in self._handles and self._handles[process].wait(0.0):
                self._on_exit(process)
        for process in processes:
            handle = self._handles.get(process)
            if handle is None or not handle.is_dying():  # what is dying already does not die of us
                self._fenced.add(process)
            if handle is not None:
                handle.kill()
        await self.exits(processes, len(set(processes)) - 1, timeout_s)
        return [self._fenced_result(process) for process in processes]

    # -- looking ----------------------------------------------------------------------------------------------------

    async def vitals(self, processes: Sequence[ProcessIdentity]) -> dict[ProcessIdentity, Vitals]:
        """How these processes are; those that are gone are left out."""
        seen = {process: vitals(process) for process in processes}
        return {process: one for process, one in seen.items() if one is not None}

    async def stacks(
        self, processes: Sequence[ProcessIdentity], limit: int
    ) -> dict[ProcessIdentity, tuple[Vitals | None, str]]:
        """How these processes are, and their Python stacks, at most ``limit`` characters each."""
        dumps = await asyncio.gather(*(stacks.dump(process, _STACKS_S) for process in processes))
        return {
            process: (vitals(process), tidy_stacks(dump, limit)) for process, dump in zip(processes, dumps, strict=True)
        }

    async def door(self) -> tuple[str, int]:
        """Address and port where other nodes may see whether they reach this one."""
        address = ray.util.get_node_ip_address()
        return address, await self._door.open(address)

    async def silent(self, peers: Mapping[str, tuple[str, int]]) -> list[str]:
        """Those of the nodes (id -> address and port) that this one gets no answer from."""
        return await silent_of(peers)

    # -- heartbeats and leases --------------------------------------------------------------------------------------

    async def beat(
        self,
        beats: Mapping[ProcessIdentity, Beat],
        wait_s: float,
        wanted: Sequence[ProcessIdentity],
        duration_s: float,
        grace_s: float,
    ) -> tuple[float, dict[ProcessIdentity, Answer]]:
        """Pass heartbeats on to workers of this node, and keep all that are wanted: see :class:`Beats`, :meth:`renew`.

        Returns:
            the seconds that it took, and the answers that have come.
        """
        began = time.monotonic()
        await self.renew(wanted, duration_s, grace_s)
        if self._beats is None:
            self._beats = Beats()
        answers = await self._beats.ask(beats, wait_s, duration_s / 3)
        return time.monotonic() - began, answers

    async def renew(self, processes: Sequence[ProcessIdentity], duration_s: float, grace_s: float) -> None:
        """These workers are still wanted. From the first call on, somebody must say so again and again.

        A lease is never made shorter: the executor, which says so in the supervisor's place, gives short ones only.
        """
        now = time.monotonic()
        for process in processes:
            if (kept := self._leases.get(process)) is not None and kept.valid(now + duration_s):
                continue
            lease = Lease(duration_s, grace_s + _PATIENCE_S, now)
            lease.answered("anybody", 1, now)
            lease.beat("anybody", 1)
            self._leases[process] = lease
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep_leases())

    async def _keep_leases(self) -> None:
        while True:
            # Up to the earliest end that is known; a lease that comes meanwhile ends no earlier.
            now = time.monotonic()
            rests = (lease.rest_s(now, _LEASE_LOOK_S) for lease in self._leases.values())
            await asyncio.sleep(min(rests, default=_LEASE_LOOK_S))
            now = time.monotonic()
            self._leases = {process: lease for process, lease in self._leases.items() if process in self._handles}
            unwanted = [process for process, lease in self._leases.items() if lease.spent(now, _LEASE_LOOK_S)]
            for process in unwanted:
                del self._leases[process]
            if unwanted:
                logger.error("nobody wants the workers %s of this node any more", [p.pid for p in unwanted])
                await self.fence(unwanted, _STACKS_S)

    def _fenced_result(self, process: ProcessIdentity) -> Fenced:
        status, own = self._exits.get(process, (None, False))
        return Fenced(process, gone=status is not None, exit=status if own else None)

    async def forget(self, processes: Sequence[ProcessIdentity]) -> None:
        """Drop what is known of processes that are gone, and what they have left: their epoch is buried."""
        for process in processes:
            if process in self._exits:
                del self._exits[process]
                self._fenced.discard(process)
        await asyncio.get_running_loop().run_in_executor(None, semaphores.sweep, os.getppid())  # its parent: the raylet
