"""Noticing that this process was asked to end, while the engine's thread waits for workers.

vLLM's engine process takes note of SIGTERM and SIGINT, and looks at the note between two steps. A start or a rebuild is
no place where it looks, and may last minutes. So the handlers are wrapped: in a start the request ends the start, in a
rebuild it ends the waiting, and vLLM's loop goes on to where it looks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """Wraps the handlers of this process. Make and close it in the main thread; elsewhere it does nothing."""

    def __init__(self) -> None:
        #: The process was asked to end.
        self.requested = False
        #: While this is set, the request raises ``SystemExit`` where the main thread is.
        self.starting = True
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._wrap(number)

    def _wrap(self, number: int) -> None:
        previous = signal.getsignal(number)
        if callable(previous):
            self._previous[number] = previous
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        self._previous[number](number, frame)
        if first and self.starting:
            raise SystemExit(128 + number)

    def reassert(self) -> None:
        """Put our handlers back in place. Ray takes SIGTERM: its Python side exits at once, its core prints a stack
        trace, for what is an orderly end.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = self._handle if number in self._previous else signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """What is in hand is the end itself, and must not be cut short by a second request for it.

        vLLM's engine puts the default handlers back before it ends its executor. With Ctrl-C both it and its server
        get a SIGINT, and the server then sends a SIGTERM: half-way through the end of Ray and its workers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        present = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in present.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def close(self) -> None:
        """Put the previous handlers back where ours still are."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous.clear()
