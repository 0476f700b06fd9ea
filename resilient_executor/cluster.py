"""The Ray cluster under the executor: joined, or embedded in this process; checked before use, and quiet."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from resilient_executor import processes, semaphores
from resilient_executor.errors import ConfigError, DependencyError, PlacementError

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig

logger = logging.getLogger(__name__)

MIN_RAY: Final = "2.43.0"
#: What an embedded cluster's object store may hold. A graph needs buffers x channels x channel_buffer_bytes of it.
EMBEDDED_STORE_BYTES: Final = 512 << 20
#: For a cluster's head to accept a connection, in seconds.
_KNOCK_S: Final = 5.0
#: For an embedded cluster's raylet and its children to end, in seconds.
_LAST_WORDS_S: Final = 1.0


def check_dependencies(*, needs_nccl: bool = False) -> None:
    """Check Ray and its compiled graph, before anything is started.

    Raises:
        DependencyError: one is missing or too old; the message holds the command that repairs it.
    """
    repair = f"Install it with: pip install 'ray[cgraph]>={MIN_RAY}'"
    if importlib.util.find_spec("ray") is None:
        raise DependencyError(f"Ray is not installed. {repair}")
    import ray

    if Version(ray.__version__) < Version(MIN_RAY):
        raise DependencyError(f"Ray {ray.__version__} is too old: compiled graphs need {MIN_RAY} or newer. {repair}")
    try:
        compiled_graph = importlib.util.find_spec("ray.experimental.compiled_dag_ref")
    except ModuleNotFoundError:
        compiled_graph = None
    if compiled_graph is None:
        raise DependencyError(f"this Ray has no compiled graphs. {repair}")
    if needs_nccl and importlib.util.find_spec("cupy") is None:
        raise DependencyError(
            f"transport 'nccl' needs cupy, which ray[cgraph] brings. {repair}. Or set transport='shm'"
        )


def connect(config: ExecutorConfig) -> bool:
    """Join a cluster or start an embedded one; see ``ExecutorConfig.address``.

    Returns:
        whether the connection was made here, so that shutdown must end it.

    Raises:
        PlacementError: no cluster can be reached at the address.
        ConfigError: this process is connected to another cluster.
    """
    import ray

    _quieten()
    if ray.is_initialized():
        _check_same(config.address, ray.get_runtime_context().gcs_address)
        return False
    common: dict[str, Any] = {"namespace": "resilient-executor", "log_to_driver": False, "logging_level": logging.ERROR}
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        try:
            _knock(address)
            ray.init(address=address, **common)
        except (OSError, ValueError, RuntimeError) as error:
            raise PlacementError(
                f"no Ray cluster answers at {address!r} ({error}). Start one with 'ray start --head', or set "
                "address='local' for an embedded one"
            ) from error
        return True
    # Room for two generations of workers: CPUs are only a count in Ray, and a rebuild then finds fresh bundles before
    # the old ones are given back (0.01 s), instead of waiting for Ray to try the placement again (0.7 to 1 s).
    needed = 2 * math.ceil(config.devices_per_worker * config.world_size) if config.device_key == "CPU" else 1
    resources: dict[str, Any] = {"num_cpus": max(os.cpu_count() or 1, needed)}
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=EMBEDDED_STORE_BYTES,
            _system_config=_even_handed(),
            **resources,
            **common,
        )
    except BaseException:  # Ctrl-C among them: some of its processes run already
        ray.shutdown()
        raise
    return True


def _even_handed() -> dict[str, Any]:
    """Ray's settings for workers that are as important as their driver, unless the user has set it.

    Ray starts workers with a niceness of 15. The driver, which spins while it waits for them, would take the processor
    away from them where there are fewer cores than processes: vLLM with TP=2 on two cores ran at 40 % of its speed.
    """
    return {} if "RAY_worker_niceness" in os.environ else {"worker_niceness": 0}


def _check_same(wanted: str | None, present: str) -> None:
    """Refuse to serve from another cluster than the one asked for. Only ports can tell: a host has many names."""
    _, colon, port = (wanted or "").rpartition(":")
    if colon and port.isdecimal() and port != present.rpartition(":")[2]:
        raise ConfigError(
            f"address is {wanted!r}, but this process is already connected to the Ray cluster at {present}. "
            "Disconnect first (ray.shutdown), or leave address out to use that one"
        )


def _knock(address: str) -> None:
    """See whether anybody listens at ``host:port``: Ray itself goes on trying for minutes.

    Raises:
        OSError: nobody does.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def disconnect() -> None:
    """End the connection that :func:`connect` made; an embedded cluster ends with it."""
    import ray
    from ray._private import worker

    node = worker._global_node  # the embedded cluster; None where one was joined
    started = node.all_processes.get("raylet", []) if node is not None else []
    pids = [info.process.pid for info in started]
    raylets = [processes.ProcessHandle(processes.identify(pid, "")) for pid in pids if processes.start_ticks(pid)]
    children = [child for pid in pids for child in processes.children(pid)]
    ray.shutdown()
    # Whoever a raylet has started meanwhile; once it is gone, its pid may be anybody's.
    children += [child for one in raylets if not one.wait(0.0) for child in processes.children(one.identity.pid)]
    # A raylet that is killed leaves its agents behind: they find out, want to tell the head, and stay for a minute. For
    # an owner that is killed itself, see supervisor/estate.py.
    deadline = time.monotonic() + _LAST_WORDS_S
    for member in [*raylets, *children]:
        with member:
            if not member.wait(deadline - time.monotonic()):
                member.kill()
                member.wait(_LAST_WORDS_S)
    # Last, when nobody is left who could make one.
    for pid in pids:
        semaphores.remove_all(pid)


class _OneLineOfOurs(logging.Filter):
    """Drops what Ray's compiled graph logs about dead actors; the executor reports each death once, with its cause."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.ERROR


def _quieten() -> None:
    """Turn Ray's own reports of dying workers down: the graph's stack traces and the raylet's paragraph."""
    from ray._private import worker

    noisy = logging.getLogger("ray.dag.compiled_dag_node")
    if not any(isinstance(present, _OneLineOfOurs) for present in noisy.filters):
        noisy.addFilter(_OneLineOfOurs())
    if getattr(worker.print_to_stdstream, "_resilient_executor", False):
        return
    original = worker.print_to_stdstream

    def print_to_stdstream(data: dict[str, Any], ignore_prefix: bool) -> None:
        lines = data.get("lines") or [""]
        if data.get("pid") == "raylet" and str(lines[0]).startswith("A worker died or was killed"):
            logger.debug("raylet: %s", lines[0])
            return
        original(data, ignore_prefix)

    print_to_stdstream._resilient_executor = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_to_stdstream
