"""Ray's classes of actors, one for each of ours.

``ray.remote`` makes another class with every call. Each is exported to the cluster's head, fetched by whoever gets a
handle, and kept in all three places for good: 0.15 to 0.3 MB with every rebuild, in the driver alone.
"""

from __future__ import annotations

import functools
from typing import Any

import ray


@functools.cache
def actor_class(cls: type, concurrency_groups: tuple[tuple[str, int], ...] = ()) -> Any:
    """The class of actors for ``cls``. Ray never restarts them: a restarted one would be a stranger with an old name.

    All else that Ray wants to know goes into ``.options()``.
    """
    groups = {"concurrency_groups": dict(concurrency_groups)} if concurrency_groups else {}
    return ray.remote(max_restarts=0, **groups)(cls)
