"""Keeps one C++ check of Ray from aborting our process.

A channel's reader registers with the local object store. When the channel's writer has died, the store has dropped the
buffer, and Ray's core answers the registration with a fatal CHECK ("Experimental mutable object must be in the local
object store to register as reader or writer"): the whole process is gone, the engine included. Two paths lead there:
the first read of a channel, and ``close()``, which Ray's own monitor thread calls the moment an actor dies, possibly
between the lines of a compilation. Registering early (see ``graph.py``) makes the window small; this guard closes it,
by asking the store before registering and raising ``RayChannelError`` instead.

Remove it when Ray returns a status there. ``tests/integration/test_ray_guard.py`` fails without it.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import ray
from ray.exceptions import RayChannelError
from ray.experimental.channel.shared_memory_channel import Channel

logger = logging.getLogger(__name__)


class WriterGone(RayChannelError):  # type: ignore[misc]  # Ray's exceptions are untyped
    """The channel's buffer has left the object store with its writer."""


def _silence_monitor() -> None:
    """Log what Ray's monitor thread of a graph raises, instead of having Python print it.

    The thread takes the graph down when an actor dies. It does not expect that in the middle of a compilation, when
    parts of the graph do not exist yet. Whatever it raises, the executor sees the death itself.
    """
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.thread is not None and args.thread.name == "CompiledGraphMonitorThread":
            logger.debug("monitor of a compiled graph: %s: %s", args.exc_type.__name__, args.exc_value)
            return
        previous(args)

    threading.excepthook = hook


def install() -> None:
    """Guard every shared-memory channel of this process. Twice is fine."""
    if getattr(Channel, "_resilient_executor_guard", False):
        return
    register, close = Channel.ensure_registered_as_reader, Channel.close

    @functools.wraps(register)
    def guarded_register(self: Any) -> None:
        if self._reader_registered:
            return
        store = ray._private.worker.global_worker.core_worker
        for node_id, info in self._node_id_to_reader_ref_info.items():
            if self.is_local_node(node_id) and not store.object_exists(info.reader_ref):
                raise WriterGone("the channel's writer has died: its buffer is gone")
        register(self)

    @functools.wraps(close)
    def guarded_close(self: Any) -> None:
        try:
            close(self)
        except WriterGone:  # then nobody of this process can be waiting in it; mark the rest closed
            store = ray._private.worker.global_worker.core_worker
            for info in self._node_id_to_reader_ref_info.values():
                store.experimental_channel_set_error(info.reader_ref)

    _silence_monitor()
    Channel.ensure_registered_as_reader = guarded_register
    Channel.close = guarded_close
    Channel._resilient_executor_guard = True
