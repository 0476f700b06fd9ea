"""Ray's classes of actors, one for each of ours.

``ray.remote`` makes another class with every call. Each is exported to the cluster's head, fetched by whoever gets a
handle, and kept in all three places for good: 0.15 to 0.3 MB with every rebuild, in the driver alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import ray


@functools.cache
def actor_class(cls: type, concurrency_groups: tuple[tuple[str, int], ...] = ()) -> Any:
    """The class of actors for ``cls``. Ray never restarts them: a restarted one would be a stranger with an old name.

    All else that Ray wants to know goes into ``.options()``.
    """
    groups = {"concurrency_groups": dict(concurrency_groups)} if concurrency_groups else {}
    return ray.remote(max_restarts=0, **groups)(cls)


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """Have this thread's ``bind`` not keep its actors for good.

    ``bind`` looks for nodes of the graph in the actor, too, by pickling it; and Ray keeps for the life of the process
    whatever is pickled outside a message, as it cannot see where that goes. Each worker of each epoch stayed referenced
    in the driver, with a call of the cluster's head that waits for its end: 0.1 MB a rebuild. Here it goes nowhere.
    """
    context = ray._private.worker.global_worker.get_serialization_context()
    if not hasattr(context, "set_in_band_serialization") or context.is_in_band_serialization():
        yield  # another Ray: then it pins them
        return
    context.set_in_band_serialization()
    try:
        yield
    finally:
        context.set_out_of_band_serialization()
        context.get_and_clear_contained_object_refs()
