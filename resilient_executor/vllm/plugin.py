"""The ``vllm.general_plugins`` entry point: makes a dotted path as good as the class.

vLLM looks the executor's abilities up before it imports what a dotted path names: pipeline parallelism is refused, and
what depends on ``use_ray`` is off. vLLM loads its plugins first; this one has the path replaced by the class. Without
it (``VLLM_PLUGINS`` leaves it out) the class itself still works everywhere, and the path with one pipeline stage.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from typing import Any


def register() -> None:
    """Called by vLLM in every process, more than once; does something only where engine arguments are read."""
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None or hasattr(arguments.EngineArgs, "_resilient_executor"):
        return
    create = arguments.EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.distributed_executor_backend = resolve(self.distributed_executor_backend)
        config = create(self, *args, **kwargs)
        if getattr(self.distributed_executor_backend, "__module__", "").startswith("resilient_executor."):
            _let_the_engine_clean_up()
        return config

    arguments.EngineArgs.create_engine_config = create_engine_config
    arguments.EngineArgs._resilient_executor = True


def resolve(backend: Any) -> Any:
    """The class that a dotted path names, if it is this package's executor or a subclass; else ``backend`` as it is."""
    if not isinstance(backend, str) or "." not in backend:
        return backend
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from resilient_executor.vllm.executor import ResilientVllmExecutor

    try:
        found = resolve_obj_by_qualname(backend)
    except (ImportError, AttributeError):
        return backend  # vLLM reports it
    return found if isinstance(found, type) and issubclass(found, ResilientVllmExecutor) else backend


#: What the engine's process may take to end its workers and its Ray after it was told to end.
_CLEAN_UP_S = 8.0


def _let_the_engine_clean_up() -> None:
    """Give the engine's process a moment between SIGTERM and SIGKILL, as vLLM does for ROCm, and pass its failure on.

    Without a ``shutdown_timeout`` vLLM's server sends both at once, and what lies in shared memory stays there. The
    wait ends with the process, after about two seconds. And when the engine has failed, vLLM's server ends in good
    order, with exit code 0, and whoever restarts what has failed would not restart it. An engine that fails says so
    before it cleans up, so it may be alive when the server ends it, or have ended.
    """
    from vllm.v1.engine import utils

    if hasattr(utils.shutdown, "_resilient_executor"):
        return
    shutdown = utils.shutdown
    failed: list[bool] = []
    alive: list[bool] = []
    said_so: list[bool] = []

    @functools.wraps(shutdown)
    def shutdown_in_time(procs: Any, timeout: float | None = None) -> None:
        # Before anybody has told it to end. One that has ended well was told by the terminal's Ctrl-C.
        failed.extend(True for process in procs if process.exitcode)
        alive.extend(True for process in procs if process.exitcode is None)
        shutdown(procs, timeout=timeout or _CLEAN_UP_S)

    def exit_as_it_did() -> None:
        if failed or (alive and said_so):  # the server has closed everything; what is left is to say so
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    shutdown_in_time._resilient_executor = True  # type: ignore[attr-defined]
    utils.shutdown = shutdown_in_time
    if "vllm.entrypoints.cli.serve" in sys.modules:  # elsewhere the exit code is not ours to choose
        atexit.register(exit_as_it_did)
        _note_death_notices(said_so)


def _note_death_notices(said_so: list[bool]) -> None:
    """See, when the server lets its engine go, whether the engine has said that it is dead."""
    from vllm.v1.engine.core_client import BackgroundResources

    let_go = BackgroundResources.__call__

    @functools.wraps(let_go)
    def let_go_and_note(self: Any) -> None:
        if self.engine_dead:
            said_so.append(True)
        let_go(self)

    BackgroundResources.__call__ = let_go_and_note
