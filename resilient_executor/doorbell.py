"""Waiting without a spin: whoever reads a channel of the graph sleeps until its writer rings.

A reader of Ray's compiled graph spins for as long as the graph exists. Here it looks, and if there is nothing, sleeps
in ``poll`` on a datagram socket of its own. Whoever writes for it rings afterwards. The reader empties the socket,
looks once more, and only then sleeps; writers ring *after* they have written. So no wake-up is lost; a ring too many
costs one look.

The socket has an abstract address (Linux): it is no file, and it ends with its process, however that ends. Nobody waits
for the one who is rung: a full queue means that a ring is waiting there already, a dead one has no address any more.
A sleep is bounded, too: by ``_LOOK_S``, after which the reader looks without having been rung.

Nobody can ring on another node. What comes from there comes over a connection (``wire.py``), and the reader's ``poll``
looks at that, too. Where Ray's own channels carry it, the reader looks at growing intervals instead.

To wake takes longer than a short step. So a reader whose last wait was short spins for a moment before it sleeps: in a
stream of short steps nobody sleeps, and where steps are long, or stop, a spin has been paid for once.

This stands on private parts of Ray's reader and writer (``ray_guard.py`` is the other such place). Where they have
changed, :func:`install` says so and the graph spins as Ray has it; ``tests/integration/test_parking.py`` fails then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import ray
from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.common import SynchronousReader, SynchronousWriter
from ray.experimental.channel.shared_memory_channel import CompositeChannel

from resilient_executor.config import ExecutorConfig
from resilient_executor.wire_channel import WireChannel

logger = logging.getLogger(__name__)

#: A sleeping worker looks without a ring after this, in seconds: a ring that got lost costs that much, not a stall.
_LOOK_S: Final = 0.5
#: The same for the driver, which sleeps only while a step is on its way. What ends its epoch closes its channels, and
#: not every way to do that passes by a bell.
_DRIVER_LOOK_S: Final = 0.02
#: Between two looks of a reader whose writer cannot ring, in seconds: the first, doubled up to the last.
_REMOTE_FIRST_S: Final = 0.0002
_REMOTE_LAST_S: Final = 0.002
#: Spins of this length hide the 0.1 ms that it takes to wake, where there are cores for it.
_SPIN_MS: Final = 2
#: The longest spin of a reader whose last wait was no longer than that, where each spin takes a core from a peer.
_SHORT_MS: Final = 1


@dataclass(frozen=True)
class BellPlan:
    """Where one process listens, and whom it rings.

    Attributes:
        address: of its own bell.
        rings: of those that read what it writes, on its own node.
        remote: whether somebody on another node writes for it.
        company: processes of the graph on this node, itself included.
        busy_wait_ms: how long it spins before it sleeps, always; None for what suits the cores and the last wait.
    """

    address: str
    rings: tuple[str, ...]
    remote: bool
    company: int
    busy_wait_ms: int | None


class Doorbell:
    """One process's own bell. Made and closed by its owner; rung from any process of the node."""

    #: A worker's: it has one epoch, one graph and one reader, which Ray makes.
    of_worker: ClassVar[Doorbell | None] = None

    def __init__(self, plan: BellPlan, look_s: float = _LOOK_S) -> None:
        """Listen at the plan's address.

        Raises:
            OSError: the address is taken.
        """
        self.plan = plan
        spin_ms, self._short_s = plan.busy_wait_ms, 0.0
        if spin_ms is None:
            roomy = usable_cores() > plan.company
            spin_ms, self._short_s = (_SPIN_MS, 0.0) if roomy else (0, _SHORT_MS / 1e3)
        self._spin_s, self.look_s = spin_ms / 1e3, look_s
        #: How long the last wait was, in seconds. Written by whoever reads, one thread at a time.
        self.waited_s = math.inf
        #: Whether the owner sleeps now, for whoever shows it; written as above.
        self.asleep = False
        self._rings = [_abstract(address) for address in plan.rings]
        self._own = _abstract(plan.address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(self._own)
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll_lock = threading.Lock()  # a poll object serves one thread at a time

    @property
    def spin_s(self) -> float:
        """How long to spin before the next sleep, in seconds."""
        return self._short_s if self.waited_s <= self._short_s else self._spin_s

    def ring(self) -> None:
        """Ring everybody who reads what the owner writes. Never waits, never raises."""
        for address in self._rings:
            self._send(address)

    def wake(self) -> None:
        """Wake the owner."""
        self._send(self._own)

    def _send(self, address: bytes) -> None:
        # OSError: it is gone (ECONNREFUSED), or it has been rung often enough (EAGAIN), or our own is closed.
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", address)

    def silence(self) -> None:
        """Take all rings that have come: who looks after this misses nothing that was written before them."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.recv(1)

    def sleep(self, seconds: float, wires: Sequence[int] = ()) -> None:
        """Sleep until it rings, or there is something to read at one of these descriptors; ``seconds`` at most."""
        with contextlib.suppress(OSError), self._poll_lock:
            self.asleep = True
            for wire in wires:
                self._poll.register(wire, select.POLLIN)
            self._poll.poll(max(0.0, seconds) * 1e3)
            for wire in wires:
                self._poll.unregister(wire)
        self.asleep = False

    def close(self) -> None:
        """Stop listening. Whoever sleeps is woken first. Twice is fine."""
        self.wake()
        self._socket.close()


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode()


def read_channels(reader: Any, bell: Doorbell, timeout: float | None) -> list[Any]:
    """What ``SynchronousReader._read_list`` does, asleep instead of spinning.

    Args:
        reader: Ray's reader.
        bell: of this process.
        timeout: seconds; None or -1 for no limit.

    Returns:
        one value for each channel; when one of them is a task's error, that error for each.

    Raises:
        RayChannelTimeoutError: not within ``timeout``.
        RayChannelError: a channel was closed.
    """
    reader._consume_leftover_channels_if_needed(timeout)
    direct: list[Any] | None = getattr(reader, "_resilient_executor_channels", None)
    channels: Sequence[Any] = direct or reader._input_channels
    results: list[Any] = [None] * len(channels)
    missing = list(range(len(channels)))
    began = time.monotonic()
    deadline = None if timeout is None or timeout == -1 else began + timeout
    # Ray counts in whole milliseconds, so less than one is no spin at all.
    slice_s, pause_s = bell.spin_s, _REMOTE_FIRST_S
    while True:
        spins = slice_s > 0.0
        if not spins:
            bell.silence()
        for index in list(missing):
            try:
                value = channels[index].read(slice_s)
            except RayChannelTimeoutError:
                slice_s = 0.0  # one spin is enough for all
                continue
            results[index] = value
            missing.remove(index)
            if isinstance(value, ray.exceptions.RayTaskError):
                # The others are read before the next step's values: see Ray's own reader.
                reader._leftover_channels = [channels[i] for i in missing]
                return [value] * len(channels)
        if not missing:
            bell.waited_s = time.monotonic() - began
            if direct is None:
                reader._resilient_executor_channels = [_direct(channel) for channel in channels]
            return results
        if spins:
            continue  # rings that came meanwhile are still there, and what they tell of may have been missed
        # Only those that are missing: others may hold the next step already, and would keep everybody awake.
        wires = [wire for index in missing if (wire := _descriptor(channels[index])) >= 0]
        if not bell.plan.remote or any(isinstance(channel, WireChannel) for channel in channels):
            longest_s = bell.look_s
        else:
            longest_s, pause_s = pause_s, min(2 * pause_s, _REMOTE_LAST_S)
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RayChannelTimeoutError(f"Cannot read all channels within {timeout} seconds")
            longest_s = min(longest_s, left_s)
        bell.sleep(longest_s, wires)


def _descriptor(channel: Any) -> int:
    """Where a message for this process comes in, for ``poll``; -1 where it comes through shared memory."""
    return channel.fileno() if isinstance(channel, WireChannel) else -1


def _direct(channel: Any) -> Any:
    """The part of a composite channel that this process reads: Ray looks that up, by its actor's id, at every read."""
    if type(channel) is not CompositeChannel:
        return channel
    return channel._channel_dict[channel._resolve_actor_id()]


def install() -> bool:
    """Let the readers of this process that have a bell sleep. Twice is fine.

    Returns:
        whether Ray's reader and writer are as we know them; otherwise nothing is changed.
    """
    if getattr(SynchronousReader, "_resilient_executor_doorbell", False):
        return True
    if not _known():
        logger.warning("Ray %s reads its channels in a way that is not known: idle graphs spin", ray.__version__)
        return False
    read_list, close, write = SynchronousReader._read_list, SynchronousReader.close, SynchronousWriter.write

    @functools.wraps(read_list)
    def patient_read_list(self: Any, timeout: float | None = None) -> list[Any]:
        own: Doorbell | None = getattr(self, "_resilient_executor_bell", None)
        bell = own or Doorbell.of_worker
        if bell is None:
            return read_list(self, timeout)  # type: ignore[no-any-return]  # Ray has no types
        return read_channels(self, bell, timeout)

    @functools.wraps(close)
    def waking_close(self: Any) -> None:
        close(self)
        own: Doorbell | None = getattr(self, "_resilient_executor_bell", None)
        bell = own or Doorbell.of_worker
        if bell is not None:
            bell.wake()
        if own is None:
            Doorbell.of_worker = None  # a graph of somebody else's may come next

    @functools.wraps(write)
    def ringing_write(self: Any, val: Any, timeout: float | None = None) -> None:
        write(self, val, timeout)
        if Doorbell.of_worker is not None:  # the driver has one for each graph, and rings it itself
            Doorbell.of_worker.ring()

    SynchronousReader._read_list = patient_read_list
    SynchronousWriter.write = ringing_write
    SynchronousReader.close = waking_close
    SynchronousReader._resilient_executor_doorbell = True
    return True


def _known() -> bool:
    """Whether Ray's reader and writer have the private parts that this file uses."""
    try:
        write = inspect.getsource(SynchronousWriter.write)
        route = inspect.getsource(CompositeChannel.read)
        read = inspect.getsource(SynchronousReader._read_list)
        leftover = inspect.getsource(SynchronousReader._consume_leftover_channels_if_needed)
    except (AttributeError, OSError, TypeError):
        return False
    return (
        "_input_channels" in read
        and "_leftover_channels" in read
        and "_leftover_channels" in leftover
        and "channel.write(" in write
        and "self._channel_dict[self._resolve_actor_id()].read(timeout)" in route
    )


def listen_in_worker(plan: BellPlan) -> Doorbell | None:
    """Give this worker process its bell; its graph is compiled next. Returns None where nothing can sleep."""
    if not install():
        return None
    Doorbell.of_worker = Doorbell(plan)
    return Doorbell.of_worker


def listen_in_driver(plan: BellPlan, reader: Any) -> Doorbell | None:
    """Give the driver's reader of one graph its bell. Returns None where nothing can sleep."""
    if not isinstance(reader, SynchronousReader) or not install():
        return None
    bell = Doorbell(plan, _DRIVER_LOOK_S)
    reader._resilient_executor_bell = bell
    return bell


def usable_cores() -> float:
    """How many cores this process may use: its affinity, and its control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return cores


def plan(config: ExecutorConfig, nodes: Sequence[str], driver_node_id: str) -> tuple[BellPlan, list[BellPlan | None]]:
    """Who rings whom in one epoch's graph.

    Args:
        config: of the executor.
        nodes: the node of each rank.
        driver_node_id: the driver's.

    Returns:
        the driver's plan, and one for each rank.
    """
    # Addresses are the node's, for whichever executors and epochs there are on it.
    token, size, driver = secrets.token_hex(8), config.tensor_parallel_size, -1
    where = {driver: driver_node_id, **dict(enumerate(nodes))}
    company = Counter(where.values())

    def address(rank: int) -> str:
        return f"resilient-executor-{token}-{'driver' if rank == driver else rank}"

    def one(rank: int, writers: Sequence[int], readers: Sequence[int]) -> BellPlan:
        here = where[rank]
        return BellPlan(
            address=address(rank),
            rings=tuple(address(reader) for reader in readers if where[reader] == here),
            remote=any(where[writer] != here for writer in writers),
            company=company[here],
            busy_wait_ms=config.busy_wait_ms,
        )

    # Rank i of a stage feeds rank i of the next; the driver feeds the whole first stage, and reads all of the last.
    workers: list[BellPlan | None] = [
        one(
            rank,
            writers=[rank - size if rank >= size else driver],
            readers=[rank + size if rank + size < len(nodes) else driver],
        )
        for rank in range(len(nodes))
    ]
    return one(driver, writers=range(len(nodes) - size, len(nodes)), readers=range(size)), workers
