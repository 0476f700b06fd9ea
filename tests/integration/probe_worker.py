"""An engine worker that does what it is told, and tells what was done to it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resilient_executor.protocol import RankAssignment


class ProbeError(Exception):
    """An application's own exception, with arguments of its own."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"{self.text} (rank {self.rank})"


class TangledError(Exception):
    """Pickles, and cannot be built again: the classical mistake of exceptions with several arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    """Cannot be pickled at all."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class ProbeWorker:
    """Takes steps as commands.

    A step's input that is a dict may hold ``do``: rank -> a list of actions, see :meth:`_act`; ``blob``: bytes that
    each stage hands on; and anything else, which comes back. Any other input is only echoed.

    Args:
        assignment: who this worker is.
        fail_once: a path. The constructor raises for the first rank that finds nothing there, and makes it.
        fail_while: a path. The constructor raises while something is there.
        start_s: how long the constructor takes.
        slow_while: a path. The constructor takes a minute while something is there.
        farewell: a path where ``shutdown`` leaves a file with the rank as its suffix.
        mark: a path where the constructor leaves a file as soon as it begins.
        extra: kept for :meth:`who`.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        *,
        fail_once: str = "",
        fail_while: str = "",
        start_s: float = 0.0,
        slow_while: str = "",
        farewell: str = "",
        mark: str = "",
        extra: Any = None,
    ) -> None:
        self.assignment = assignment
        self.extra = extra
        self.farewell = farewell
        self.history = ["init_worker"]
        self.steps: deque[Any] = deque(maxlen=20)
        self.at_start = dict(os.environ)
        if mark:
            Path(f"{mark}.{os.getpid()}").touch()
        time.sleep(60.0 if slow_while and Path(slow_while).exists() else start_s)
        if fail_while and Path(fail_while).exists():
            raise ProbeError(assignment.rank, "the constructor was told to fail")
        if fail_once:
            try:
                Path(fail_once).touch(exist_ok=False)
            except FileExistsError:
                return
            raise ProbeError(assignment.rank, "the constructor fails the first time")

    def init_device(self) -> None:
        self.history.append("init_device")

    def load_model(self) -> None:
        self.history.append("load_model")

    def bind_thread(self) -> None:
        self.history.append("bind_thread")

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        me = self.assignment
        command = scheduler_output if isinstance(scheduler_output, dict) else {}
        self.steps.append(command.get("id", scheduler_output if isinstance(scheduler_output, int) else None))
        trail = [] if intermediate is None else intermediate["trail"]
        result = {
            "traces": [] if intermediate is None else intermediate["traces"],
            "trail": [*trail, (me.pp_rank, me.tp_rank, me.rank)],
            "blob": command.get("blob") if intermediate is None else intermediate["blob"],
        }
        if me.pp_rank == me.pp_size - 1:
            result |= {"scheduler": scheduler_output, "grammar": grammar_output, "epoch": me.epoch}
        for name, *arguments in command.get("do", {}).get(me.rank, ()):
            result = self._act(name, arguments, result)
        return result

    def _act(self, name: str, arguments: Sequence[Any], result: Any) -> Any:
        if name == "sleep":
            time.sleep(arguments[0])
        elif name == "exit":
            os._exit(arguments[0])
        elif name == "raise":
            raise ProbeError(self.assignment.rank, arguments[0])
        elif name == "raise locked":
            raise LockedError(arguments[0])
        elif name == "numpy":
            count, value = arguments
            return {**result, "array": np.full(count, value, dtype=np.int64)}
        elif name == "bytes":
            return {**result, "bytes": bytes([arguments[1]]) * arguments[0]}
        elif name == "trace":
            from opentelemetry import trace

            trace_id = trace.get_current_span().get_span_context().trace_id
            return {**result, "traces": [*result["traces"], f"{trace_id:032x}"]}
        elif name == "unpicklable":
            return {**result, "lock": threading.Lock()}
        elif name == "touch":
            Path(arguments[0]).touch()
        else:
            raise ValueError(f"no such action: {name}")
        return result

    def shutdown(self) -> None:
        if self.farewell:
            Path(f"{self.farewell}.{self.assignment.rank}").touch()

    # -- called by collective RPC -----------------------------------------------------------------------------------

    def who(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "assignment": self.assignment, "extra": self.extra, "cwd": os.getcwd()}

    def past(self) -> tuple[list[str], list[Any]]:
        return self.history, list(self.steps)

    def environment(self, names: Sequence[str]) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """The variables as the constructor saw them, and as they are now."""
        return {n: self.at_start.get(n) for n in names}, {n: os.environ.get(n) for n in names}

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.assignment.rank, args, kwargs

    def nap(self, seconds_by_rank: dict[int, float]) -> int:
        time.sleep(seconds_by_rank.get(self.assignment.rank, 0.0))
        return self.assignment.rank

    def fail(self, kind: str, ranks: Sequence[int]) -> int:
        rank = self.assignment.rank
        if rank in ranks:
            if kind == "probe":
                raise ProbeError(rank, "told to fail")
            if kind == "locked":
                raise LockedError("holds a lock")
            if kind == "tangled":
                raise TangledError("one", "two")
            if kind == "interrupt":
                raise KeyboardInterrupt
            if kind == "exit":
                raise SystemExit(3)
        return rank

    def unpicklable(self) -> Any:
        return threading.Lock()

    def die(self, rank: int, code: int) -> None:
        if rank == self.assignment.rank:
            os._exit(code)
