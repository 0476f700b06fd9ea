"""Ray's reader of a graph's channels, asleep where Ray's own spins.

Where all channels are wires (``wire_channel.py``), the kernel says where there is something to read. Where they are
Ray's own, whoever writes rings (``doorbell.py``): the reader empties its bell, looks, and only then sleeps; writers
ring *after* they have written. So no wake-up is lost; a ring too many costs one look.

This stands on private parts of Ray's reader and writer (``ray_guard.py`` and ``wire_channel.py`` are the other such
places). Where they have changed, :func:`install` says so and the graph spins as Ray has it;
``tests/integration/test_parking.py`` fails then.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.common import SynchronousReader, SynchronousWriter
from ray.experimental.channel.shared_memory_channel import CompositeChannel
from ray.experimental.channel.torch_tensor_accelerator_channel import TorchTensorAcceleratorChannel

from resilient_executor.doorbell import LOOK_S, BellPlan, Doorbell
from resilient_executor.wire import limit
from resilient_executor.wire_channel import WireChannel, read_whole_messages

logger = logging.getLogger(__name__)

#: For the driver, which sleeps only while a step is on its way. What ends its epoch closes its channels, and not every
#: way to do that passes by a bell.
_DRIVER_LOOK_S: Final = 0.02
#: Between two looks of a reader whose writer cannot ring, in seconds: the first, doubled up to the last.
_REMOTE_FIRST_S: Final = 0.0002
_REMOTE_LAST_S: Final = 0.002


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
    wires: list[WireChannel] | None = getattr(reader, "_resilient_executor_wires", None)
    if direct is None:
        found = [wire for channel in reader._input_channels if (wire := _wire(channel)) is not None]
        if len(found) == len(reader._input_channels):
            wires = reader._resilient_executor_wires = found
            direct = reader._resilient_executor_channels = [_direct(channel) for channel in reader._input_channels]
    if wires is not None and direct is not None:
        return _read_wires(reader, direct, wires, bell, timeout)
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
        if not bell.plan.remote:
            longest_s = bell.look_s
        else:
            longest_s, pause_s = pause_s, min(2 * pause_s, _REMOTE_LAST_S)
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RayChannelTimeoutError(f"Cannot read all channels within {timeout} seconds")
            longest_s = min(longest_s, left_s)
        bell.sleep(longest_s)


def _read_wires(
    reader: Any, channels: Sequence[Any], wires: Sequence[WireChannel], bell: Doorbell, timeout: float | None
) -> list[Any]:
    """:func:`read_channels` where a wire of each says whether there is something to read."""
    results: list[Any] = [None] * len(wires)
    began, deadline = time.monotonic(), limit(timeout)
    spin_until = began + bell.spin_s
    # Only those that are missing: others may hold the next step already, and would keep everybody awake.
    missing: dict[int, int] = {}
    try:
        for index, wire in enumerate(wires):
            missing[descriptor := wire.fileno()] = index
            bell.watch(descriptor)
        while missing:
            now = time.monotonic()
            if now >= deadline:
                raise RayChannelTimeoutError(f"Cannot read all channels within {timeout} seconds")
            if now < spin_until:
                os.sched_yield()  # a peer may need the core to write what is waited for here
                ready = bell.sleep(0.0)
            else:
                ready = bell.sleep(min(LOOK_S, deadline - now))
            if not ready and now >= spin_until:
                for wire in wires:
                    wire.fileno()  # raises for one that was closed: its number may be somebody else's by now
            for descriptor, _ in ready:
                index = missing.get(descriptor, -1)
                if index < 0:
                    bell.silence()
                    continue
                try:
                    value = channels[index].read(0.0)
                except RayChannelTimeoutError:
                    continue  # half of a message
                results[index] = value
                del missing[descriptor]
                bell.unwatch(descriptor)
                if isinstance(value, ray.exceptions.RayTaskError):
                    # The others are read before the next step's values: see Ray's own reader.
                    reader._leftover_channels = [channels[i] for i in missing.values()]
                    return [value] * len(wires)
    finally:
        for descriptor in missing:
            bell.unwatch(descriptor)
    bell.waited_s = time.monotonic() - began
    return results


def _direct(channel: Any) -> Any:
    """The part of a composite channel that this process reads: Ray looks that up, by its actor's id, at every read."""
    if type(channel) is not CompositeChannel:
        return channel
    return channel._channel_dict[channel._resolve_actor_id()]


def _wire(channel: Any) -> WireChannel | None:
    """The wire that a channel's value comes by, or comes by first, if it comes by one."""
    if isinstance(channel, TorchTensorAcceleratorChannel) and getattr(channel, "_local_channel", None) is None:
        channel = getattr(channel._gpu_data_channel, "_meta_channel", None)
    part = _direct(channel)
    return part if isinstance(part, WireChannel) else None


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

    read_whole_messages()
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
