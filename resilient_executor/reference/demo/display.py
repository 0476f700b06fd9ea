"""Shows a demo while it runs: its account as lines, and on a terminal a live picture of the run below them.

One thread prints and draws. Nobody else touches the terminal, so neither the executor's listener nor the client ever
waits for it.
"""

from __future__ import annotations

import logging
import os
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from resilient_executor.reference.demo.picture import SPARK_WINDOW_S, draw
from resilient_executor.reference.demo.story import Line, Story

if TYPE_CHECKING:
    from resilient_executor.protocol import WorkerInfo

#: Pictures a second: smooth enough, and a few percent of one core.
_RATE: Final = 8.0
#: What the last picture may take, in seconds: a terminal that nobody reads must not hold the demo's end.
_LAST_FRAME_S: Final = 5.0
#: Smaller terminals get lines only: columns, rows.
_SMALLEST: Final = (80, 20)
#: Width of tables where the output is no terminal, in columns.
_FILE_WIDTH: Final = 110
#: Of an error that was logged, this much is shown.
_MAX_ERROR: Final = 200
_MARKS: Final = {
    "kill": ("✗", "bold red"),
    "alarm": ("!", "yellow"),
    "good": ("✓", "green"),
    "bad": ("✗", "bold red"),
    "log": ("·", "dim"),
    "": (" ", ""),
}


def make_console(*, plain: bool) -> Console:
    """The console of standard output. Model text may hold what its encoding has not."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    on_terminal = sys.stdout.isatty()
    return Console(
        highlight=False,
        no_color=True if plain else None,
        force_terminal=None if on_terminal else False,
        width=None if on_terminal else _FILE_WIDTH,
    )


def can_draw(console: Console, *, plain: bool) -> bool:
    """Whether the live picture has somewhere to go: a terminal that is large and clever enough, and somebody there."""
    return (
        not plain
        and not os.environ.get("CI")
        and sys.stdout.isatty()
        and console.is_terminal
        and not console.is_dumb_terminal
        and console.width >= _SMALLEST[0]
        and console.height >= _SMALLEST[1]
    )


class Display:
    """Prints the story's lines, and draws it where ``live``. A context manager; at its end all lines are out.

    Attributes:
        broken: the output cannot be written to any more (its reader has gone).
    """

    def __init__(
        self, console: Console, story: Story, workers: Callable[[], Sequence[WorkerInfo]], *, live: bool
    ) -> None:
        self.broken = False
        self._console = console
        self._story = story
        self._workers = workers
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-display", daemon=True)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_LAST_FRAME_S)

    def _run(self) -> None:
        try:
            if self._live is not None:
                _echo_control_characters(False)
                self._live.start()
            ended = False
            while not ended:
                ended = self._ended.wait(1 / _RATE)
                self._refresh()
        except (OSError, SystemExit):  # rich makes the second of a broken pipe
            self.broken = True
        finally:
            if self._live is not None:
                self._live.stop()
                _echo_control_characters(True)

    def _refresh(self) -> None:
        for line in self._story.take_lines():
            print_line(self._console, line, self._story.began)
        if self._live is not None:
            snapshot = self._story.snapshot(SPARK_WINDOW_S)
            picture = draw(snapshot, self._workers(), self._console.width, self._console.height)
            self._live.update(picture, refresh=True)


def _echo_control_characters(on: bool) -> None:
    """Whether the terminal shows ``^C`` for Ctrl-C, which would push the picture out of its place."""
    if not sys.stdin.isatty():
        return
    settings = termios.tcgetattr(sys.stdin)
    settings[3] = settings[3] | termios.ECHOCTL if on else settings[3] & ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)


def print_line(console: Console, line: Line, began: float) -> None:
    """Print one line of the account, with its time since the beginning."""
    mark, style = _MARKS[line.mark]
    text = Text.assemble((f"{line.at - began:6.1f} s ", "dim"), (mark, style), " ", (line.text, style))
    console.print(text, soft_wrap=not console.is_terminal)


class _Account(logging.Handler):
    """Takes log records into the account."""

    def __init__(self, story: Story) -> None:
        super().__init__(logging.WARNING)
        self._story = story

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().splitlines() or [""]
        if lines[0].startswith("incident "):  # the story tells of incidents itself
            return
        error = record.exc_info[1] if record.exc_info else None
        why = f": {type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR] if error is not None else ""
        self._story.say(lines[0] + why, "log" if record.levelno < logging.ERROR else "bad")


@contextmanager
def logs_in(story: Story) -> Iterator[None]:
    """Have this package's log records in the account, and nowhere else: they would tear the picture apart."""
    logger, handler = logging.getLogger("resilient_executor"), _Account(story)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
