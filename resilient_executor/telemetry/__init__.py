"""Traces, metrics and log fields of the executor, by OpenTelemetry. ``docs/observability.md`` says what there is.

    names.py        every span, attribute and metric
    setup.py        which provider
    recorder.py     what the executor calls, and the background thread
    steps.py, calls.py, operations.py    what is noted of steps, RPCs, incidents
    assembler.py, spans.py, metrics.py   what is made of it
    propagation.py, logs.py              in workers, too

Off, nothing of the SDK is imported, and a step pays for two comparisons with None.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from resilient_executor.telemetry import logs
from resilient_executor.telemetry.logs import LogContext

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig
    from resilient_executor.telemetry.recorder import Telemetry

__all__ = ["SCOPE", "LogContext", "ending", "start", "starting", "version"]

#: The instrumentation scope of all spans and metrics.
SCOPE: Final = "resilient_executor"
#: What a shutdown grants a slow backend for the last spans.
LAST_SPANS_S: Final = 3.0


def version() -> str:
    """The package's version, for the scope."""
    try:
        return importlib.metadata.version("resilient-executor")
    except importlib.metadata.PackageNotFoundError:  # a checkout on sys.path
        return "0"


def start(config: ExecutorConfig) -> Telemetry | None:
    """Telemetry for one executor, or None where none is configured; see :mod:`setup`."""
    from resilient_executor.telemetry.setup import open_pipes

    logs.install()
    pipes = open_pipes()
    if pipes is None:
        return None
    from resilient_executor.telemetry.recorder import Telemetry

    return Telemetry(pipes, config)


def starting(telemetry: Telemetry | None, epoch: Callable[[], int]) -> AbstractContextManager[None]:
    """A span around the start, where there is telemetry; ``epoch`` is asked at its end."""
    return telemetry.operation("executor.start", epoch) if telemetry is not None else nullcontext()


@contextmanager
def ending(telemetry: Telemetry | None, epoch: Callable[[], int]) -> Iterator[None]:
    """A span around the shutdown; then the last spans are handed over, in bounded time."""
    if telemetry is None:
        yield
        return
    try:
        with telemetry.operation("executor.shutdown", epoch):
            yield
    finally:
        telemetry.close(LAST_SPANS_S)
