"""What the worker actor needs around its engine's worker: errors that name who raised them, imports, serialisation."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource

from resilient_executor import wire_channel
from resilient_executor.protocol import WorkerException, WorkerSpec
from resilient_executor.telemetry import propagation

if TYPE_CHECKING:
    from resilient_executor.worker import WorkerActor

logger = logging.getLogger("resilient_executor.worker")

#: Added to a standby's niceness while it imports.
_QUIETLY: Final = 10


class logged:
    """Turns an exception of the engine's worker into one log line here and a WorkerException for the caller.

    What runs in it belongs to the trace of its caller; entering gives the time, in nanoseconds since the Unix epoch.
    """

    def __init__(self, actor: WorkerActor, operation: str, call_id: int, trace_context: bytes = b"") -> None:
        self._actor, self._operation, self._call_id = actor, operation, call_id
        self._trace_context, self._began = trace_context, 0

    def __enter__(self) -> int:
        self._token = propagation.attach(self._trace_context) if self._trace_context else None
        self._began = time.time_ns()
        return self._began

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if isinstance(error, Exception):
                times = (0, self._began, time.time_ns())
                raise capture(self._actor, error, self._operation, self._call_id, times) from None
        finally:
            if self._trace_context:
                propagation.detach(self._token)


def capture(
    actor: WorkerActor, error: Exception, operation: str, call_id: int, times: tuple[int, int, int]
) -> WorkerException:
    """Log the error where its traceback is, with rank, epoch and step or call, and wrap it for the caller."""
    logger.error(
        "rank %d, epoch %d: %s (id %d) raised %s; peers that wait for this rank in a collective may wait for ever",
        actor._rank, actor._epoch, operation, call_id, type(error).__name__, exc_info=error,
    )  # fmt: skip
    wrapped = WorkerException.capture(error, epoch=actor._epoch, call_id=call_id, rank=actor._rank, operation=operation)
    wrapped.times = times
    return wrapped


def serialized(value: Any) -> Any:
    """What the channel to the next stage would make of ``value``; it takes that as it is."""
    if wire_channel.writes():
        return wire_channel.Pickled.of(value)
    return ray._private.worker.global_worker.get_serialization_context().serialize(value)


def preload_quietly(pickled_spec: bytes, modules: Sequence[str]) -> None:
    """:func:`preload` at a low priority, in a thread that ends with it.

    An ordinary thread could not take its priority back without privileges.
    """
    failures: list[Exception] = []

    def imports() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.nice(0) + _QUIETLY))
            preload(pickle.loads(pickled_spec), modules)
        except Exception as error:  # noqa: BLE001 - the engine's own; raised again below
            failures.append(error)

    thread = threading.Thread(target=imports, name="resilient-executor-imports")
    thread.start()
    thread.join()  # bounded by whoever waits for the standby: it ends this process
    if failures:
        raise failures[0]


def preload(spec: WorkerSpec, modules: Sequence[str] = ()) -> None:
    """Import a worker's class, what a rank at work has imported, and what the class itself knows to be needed.

    Args:
        spec: the class; its ``preload``, if it has one, comes last.
        modules: see :func:`imported`. One that cannot be imported here is left to whoever needs it.
    """
    with to_stay():
        cls = resolve(spec.cls)
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        further = getattr(cls, "preload", None)
        if further is not None:
            further(**spec.kwargs)


def imported() -> tuple[str, ...]:
    """The names of this process's modules, in the order in which their imports began.

    Engines import much as late as they load a model or run a first step; a standby does it ahead.
    """
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)  # none: not made by an import
        if spec is not None and spec.name == name:
            found.append(name)
    return tuple(found)


@contextlib.contextmanager
def to_stay() -> Iterator[None]:
    """For what makes many objects that stay as long as the process, such as imports: spare them the garbage collector.

    An engine's imports make a million objects. A full collection looks at every one; engines ask for several when they
    load a model, and each took 0.3 s with vLLM.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def settle() -> None:
    """What is there now stays: no collection in the middle of a step is to look at it."""
    gc.collect()
    gc.freeze()


def resolve(cls: str | type) -> type:
    """Import ``"package.module:ClassName"``."""
    if not isinstance(cls, str):
        return cls
    module, _, name = cls.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # a class, by contract


def show_devices(device_key: str, ids: Sequence[str] | None) -> None:
    """Have this process see the devices with these ids, as Ray does for an actor that claims them; None: all.

    A process that Ray has given no device sees none; engines look at them while they are imported.
    """
    if device_key == "CPU":
        return
    manager = get_accelerator_manager_for_resource(device_key)
    if manager is None:
        return
    if ids is None:
        os.environ.pop(manager.get_visible_accelerator_ids_env_var(), None)
    else:
        manager.set_current_process_visible_accelerator_ids(list(ids))


def count_threads(device_key: str, amount: float) -> None:
    """Set ``OMP_NUM_THREADS`` as Ray does for an actor that claims so many CPUs; a standby claims none, and has 1.

    With another number of threads sums are added up in another order, and tokens may differ. A number that the process
    was started with stays, as with Ray.
    """
    if device_key != "CPU" or any(e.startswith(b"OMP_NUM_THREADS=") for e in _environment_at_start()):
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, math.floor(amount)))


def _environment_at_start() -> list[bytes]:
    return Path("/proc/self/environ").read_bytes().split(b"\0")
