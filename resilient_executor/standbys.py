"""Warm standbys: processes that have done their imports, and wait to take the place of a rank.

Most of a cold rebuild is the start of an interpreter and the imports of the engine. A standby has that behind it. It
holds no device and no bundle: it is placed by node, outside every placement group, so that it outlives the epochs'
bundles. When a rank is to be created on its node, it takes the rank, and from then on it is a worker like any other:
it belongs to that epoch, has a lease, and is fenced with it.

One thread sees to them while the executor serves: it makes one at a time, at a low priority, and replaces those that
die. During a rebuild it stands still. Nothing that happens to a standby is an incident.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import ray
from ray.exceptions import RayError, RayTaskError

from resilient_executor.actors import actor_class
from resilient_executor.config import EVERY_RANK, ExecutorConfig
from resilient_executor.placement import on_node, worker_options
from resilient_executor.worker_group import process_of, worker_class

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from resilient_executor.placement import Reservation
    from resilient_executor.protocol import ProcessIdentity
    from resilient_executor.supervisor.agent import Fenced

logger = logging.getLogger(__name__)

#: Between two looks, in seconds; and the pause after a standby that has died, which doubles up to the longest.
_LOOK_S: Final = 0.5
_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 120.0
#: For the thread to end, and for an answer that is there, in seconds.
_END_S: Final = 5.0
#: For a standby to answer before it is given a rank, in seconds: a frozen one would keep the rebuild waiting. One that
#: is only slow is not missed much: the rank starts cold.
_ANSWER_S: Final = 1.0
#: A rank that is created before it has a number.
UNRANKED: Final = -1


@dataclass
class Standby:
    """One process that waits.

    Attributes:
        node_id: where it is.
        handle: its actor.
        alive: a call that fails when the process has ended, and never returns before.
        prepared: a call that returns when its imports are done; None once they are.
        since: when it was made, seconds of the monotonic clock.
        process: its process, once its imports are done.
    """

    node_id: str
    handle: ActorHandle
    alive: Any
    prepared: Any
    since: float
    process: ProcessIdentity | None = None


@dataclass(frozen=True)
class Taken:
    """A standby that has been given a rank.

    Attributes:
        handle: its actor.
        info: Ray's reference to what it says of itself; fails with whatever kept it from taking the rank.
        holder: an actor in the bundle that claims its device; None where the bundle alone does, on CPUs.
    """

    handle: ActorHandle
    info: Any
    holder: ActorHandle | None


class DeviceHolder:
    """Claims a bundle's device for a standby that has taken the bundle's rank. It never touches the device."""

    def devices(self) -> tuple[str, ...]:
        """The ids that Ray has given to this bundle."""
        return tuple(str(i) for ids in ray.get_runtime_context().get_accelerator_ids().values() for i in ids)


class Standbys:
    """All standbys of one executor. ``take`` is called by the thread that rebuilds; the refill has one of its own."""

    def __init__(
        self,
        config: ExecutorConfig,
        variables: Mapping[str, str],
        fence: Callable[[Sequence[ProcessIdentity]], Sequence[Fenced]],
        kill: Callable[[ProcessIdentity], None],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._changed = changed
        self._fence = fence
        self._kill = kill
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._standbys: list[Standby] = []
        self._wanted: Mapping[str, int] = {}
        self._rank: ActorHandle | None = None
        self._serving = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._off = ""
        self._deaths = 0
        self._not_before = 0.0

    @property
    def enabled(self) -> bool:
        """Whether any are wanted."""
        return self._config.warm_standbys != 0 and not self._off

    def counts(self) -> dict[str, int]:
        """How many are ready, and how many are being prepared."""
        with self._lock:
            ready = sum(standby.prepared is None for standby in self._standbys)
            return {"ready": ready, "preparing": len(self._standbys) - ready}

    def processes(self) -> tuple[ProcessIdentity, ...]:
        """Of those that are ready."""
        with self._lock:
            return tuple(s.process for s in self._standbys if s.prepared is None and s.process is not None)

    # -- while it serves, and while it does not ----------------------------------------------------------------------

    def serve(self, nodes: Sequence[str], rank: ActorHandle) -> None:
        """A generation serves: see to it that there are standbys. Does not wait.

        Args:
            nodes: the node of each of its ranks.
            rank: one of them, whose imports standbys do as well.
        """
        if not self.enabled:
            return
        with self._lock:
            self._wanted = wanted_standbys(self._config, nodes)
            self._rank = rank
            self._serving = True
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="resilient-executor-standbys", daemon=True)
                self._thread.start()

    def rest(self) -> None:
        """A rebuild is going on: make none."""
        with self._lock:
            self._serving = False

    def stop(self) -> None:
        """End them all, and have it proven. Twice is fine."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        with self._lock:
            standbys, self._standbys = self._standbys, []
        processes = [process for standby in standbys if (process := process_of(standby.handle)) is not None]
        if alive := [found.process.pid for found in self._fence(processes) if not found.gone]:
            logger.error("standbys %s could not be proven gone", alive)
        for standby in standbys:
            ray.kill(standby.handle, no_restart=True)

    # -- taking -----------------------------------------------------------------------------------------------------

    def nodes_of(self, reservation: Reservation) -> list[str]:
        """The node of each bundle in order of creation, "" where unknown; none if there is nobody to take a rank."""
        if not self.enabled or not any(self.counts().values()):
            return []
        self._weed()
        table = ray.util.placement_group_table(reservation.group)
        nodes = {int(index): str(node) for index, node in table.get("bundles_to_node_id", {}).items()}
        return [nodes.get(index, "") for index in reservation.bundle_indices]

    def take(self, node_id: str, reservation: Reservation, created_rank: int) -> Taken | None:
        """Have a standby of that node take a rank; None if there is none that is ready.

        One that still imports is left to it: at its low priority it could take longer than a cold start, and nothing
        would end a rebuild that waits for an import that hangs.
        """
        standby = self._pick(node_id)
        if standby is None:
            return None
        config, holder, devices = self._config, None, None
        if config.device_key != "CPU":
            # A bundle on CPUs is reserved whoever runs in it; a device has a number, and only an actor in it is told.
            strategy = reservation.strategy(created_rank)
            options = worker_options(config)
            holder = actor_class(DeviceHolder).options(**options, scheduling_strategy=strategy).remote()
            devices = holder.devices.remote()
        info = standby.handle.take_rank.remote(
            created_rank, config.lease_s, config.lease_grace_s, config.device_key, devices
        )
        return Taken(standby.handle, info, holder)

    def _weed(self) -> None:
        """Part with those that are ready and do not answer now: dead or frozen, they are no use to a rank."""
        with self._lock:
            asked = {s.handle.heartbeat.remote(0): s for s in self._standbys if s.prepared is None}
        if not asked:
            return
        ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S, fetch_local=False)
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        with self._lock:
            silent = [standby for reference, standby in asked.items() if reference not in answered]
            for standby in [s for s in silent if s in self._standbys]:
                self._standbys.remove(standby)
                self._discard(standby)
                self._lost(standby, f"it does not answer within {_ANSWER_S:g} s", time.monotonic())

    def _discard(self, standby: Standby) -> None:
        """End one that nobody wants. ``ray.kill`` alone leaves a frozen process; an agent's SIGKILL ends it."""
        if (process := standby.process or process_of(standby.handle)) is not None:
            self._kill(process)
        ray.kill(standby.handle, no_restart=True)

    def _pick(self, node_id: str) -> Standby | None:
        with self._lock:
            here = [s for s in self._standbys if s.node_id == node_id and s.prepared is None]
            if here:
                dead, _ = ray.wait([standby.alive for standby in here], num_returns=len(here), timeout=0)
                here = [standby for standby in here if standby.alive not in dead]
            if not here:
                return None
            chosen = min(here, key=lambda standby: standby.since)
            self._standbys.remove(chosen)
            return chosen

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S) and not self._off:
            before = self.counts()
            try:
                self._look()
                if self.counts() != before:
                    self._changed()
            except Exception:
                logger.exception("warm standbys: a look failed; the next one is in %g s", _LONGEST_PAUSE_S)
                self._not_before = time.monotonic() + _LONGEST_PAUSE_S
        if self._off:
            self.rest()

    def _look(self) -> None:
        """Bury the dead, note who is ready, and make one more if one is missing and none is in the making."""
        now = time.monotonic()
        with self._lock:
            if not self._serving or self._stopping.is_set():
                return
            if self._standbys:
                dead, _ = ray.wait([s.alive for s in self._standbys], num_returns=len(self._standbys), timeout=0)
                for standby in [s for s in self._standbys if s.alive in dead]:
                    self._standbys.remove(standby)
                    self._lost(standby, "its process ended", now)
            for standby in [s for s in self._standbys if s.prepared is not None]:
                self._note_prepared(standby, now)
            for one in surplus([standby.node_id for standby in self._standbys], self._wanted):
                self._discard(self._standbys.pop(one))
            present = Counter(standby.node_id for standby in self._standbys)
            if now < self._not_before or any(standby.prepared is not None for standby in self._standbys):
                return
            lacking = [node for node, number in self._wanted.items() if present[node] < number]
            if lacking and not self._off:
                self._standbys.append(self._make(min(lacking, key=lambda node: present[node]), now))

    def _make(self, node_id: str, now: float) -> Standby:
        options = {"num_cpus": 0, "num_gpus": 0, **self._config.ray_remote_args}
        remote = worker_class(self._config).options(**options, scheduling_strategy=on_node(node_id))
        handle = remote.remote(UNRANKED)
        prepared = handle.prepare.remote(
            self._variables,
            cloudpickle.dumps(self._config.worker),
            self._config.device_key,
            self._config.devices_per_worker,
            self._rank.imported.remote() if self._rank is not None else (),
        )
        return Standby(node_id, handle, handle.sentinel.remote(), prepared, now)

    def _note_prepared(self, standby: Standby, now: float) -> None:
        done, _ = ray.wait([standby.prepared], timeout=0)
        if not done:
            if now - standby.since > self._config.loading_timeout_s:
                self._standbys.remove(standby)
                self._discard(standby)
                self._lost(standby, f"its imports took longer than {self._config.loading_timeout_s:g} s", now)
            return
        try:
            seconds, standby.process = ray.get(standby.prepared, timeout=_END_S)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # the rank that was asked for its imports has died under the question
                self._standbys.remove(standby)
                self._discard(standby)
                self._lost(standby, type(error.cause).__name__, now)
                return
            # The next one would meet it again, and so would an ordinary start, which reports it in full.
            cause = " ".join(str(error.cause or error).split())[:300]
            logger.warning("no warm standbys: the worker's class cannot be imported ahead: %s", cause)
            self._off = cause
            for one in self._standbys:
                self._discard(one)
            self._standbys.clear()
        except RayError as error:
            self._standbys.remove(standby)
            self._lost(standby, type(error).__name__, now)
        else:
            standby.prepared, self._deaths = None, 0
            logger.info("a warm standby is ready on node %s, after imports of %.1f s", standby.node_id[:8], seconds)

    def _lost(self, standby: Standby, why: str, now: float) -> None:
        self._deaths += 1
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (self._deaths - 1))
        self._not_before = now + pause_s
        logger.warning(
            "a warm standby on node %s is lost (%s); the next one is made in %.0f s", standby.node_id[:8], why, pause_s
        )


def wanted_standbys(config: ExecutorConfig, nodes: Sequence[str]) -> dict[str, int]:
    """Node id -> how many standbys it should have: as set, or as many as it has ranks."""
    if config.warm_standbys == EVERY_RANK:
        return dict(Counter(nodes))
    return dict.fromkeys(nodes, int(config.warm_standbys))


def surplus(nodes: Sequence[str], wanted: Mapping[str, int]) -> list[int]:
    """Which standbys, given by their nodes, are too many: their places, last first, so that each can be removed."""
    kept: Counter[str] = Counter()
    found = []
    for place, node_id in enumerate(nodes):
        kept[node_id] += 1
        if kept[node_id] > wanted.get(node_id, 0):
            found.append(place)
    return found[::-1]
