"""Ctrl-C and its kin: raised in the main thread, except where an exception would leave half of something behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP of the main thread while the context is entered.

    Each of them raises KeyboardInterrupt until :meth:`close`. Whatever is called may swallow an exception (a
    destructor does, and a retry may), so what has come is raised again by the next :meth:`check`. After ``close`` they
    are ignored: nobody who presses Ctrl-C twice keeps the shutdown from ending what was started.

    Args:
        say: gets a line that tells what becomes of a signal; called in the handler, so it must not wait.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._deferred = self._closed = False
        self._come: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def come(self) -> int:
        """The signal that has come last; SIGINT when somebody else has raised the interrupt."""
        return signal.SIGINT if self._come is None else self._come

    def claim(self) -> None:
        """Take the signals back from a library that has installed handlers of its own (Ray does, for SIGTERM)."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise at the end of this block what comes in it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    def close(self) -> None:
        """Raise nothing any more: what was started is being ended."""
        self._closed = True

    def check(self) -> None:
        """Raise what has come.

        Raises:
            KeyboardInterrupt: it is time to go.
        """
        if self._come is not None and not self._closed:
            raise KeyboardInterrupt

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._closed:
            self._say("shutting down already")
            return
        self._come = signum
        if self._deferred:
            self._say("interrupted: shutting down as soon as this has started")
            return
        self._say("interrupted: shutting down")
        raise KeyboardInterrupt
