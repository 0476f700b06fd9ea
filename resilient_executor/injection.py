"""Faults inside a worker, on purpose: only in executors whose ``allow_chaos`` is on.

Such an executor starts :class:`ChaosWorkerActor` in the place of ``WorkerActor``. Until somebody arms it, a step runs
through exactly the same code; an armed one has its engine's worker wrapped, and the wrapper takes itself away again.
"""

from __future__ import annotations

import enum
import logging
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray

from resilient_executor.heart import Beat
from resilient_executor.protocol import Progress
from resilient_executor.worker import WorkerActor

logger = logging.getLogger(__name__)

_MEGABYTE: Final = 1 << 20
#: What a single injection may take before it dies of it: the machine is somebody else's, too.
_MOST_MEGABYTES: Final = 2048
_LONGEST_S: Final = 3600.0


class Harm(str, enum.Enum):
    """What happens to the worker."""

    ABORT = "abort"  #: ``os.abort``, as a failed check in C++ does
    EXIT = "exit"  #: ends with an exit code
    OUT_OF_MEMORY = "oom"  #: takes memory, then is killed as the kernel kills: SIGKILL, no word
    HANG = "hang"  #: waits for ever in Python
    SPIN = "spin"  #: spins in C and holds the interpreter's lock
    SLOW = "slow"  #: each step takes so much longer
    RAISE = "raise"  #: an exception in a step
    RAISE_UNPICKLABLE = "raise_unpicklable"  #: the same, and it cannot be sent anywhere
    RAISE_IN_RPC = "raise_in_rpc"  #: an exception in the next collective RPC
    BREAK_GRAPH = "break_graph"  #: the graph's loop itself ends, not only the step
    LATE_HEARTBEATS = "late_heartbeats"  #: each answer comes so much later
    DROP_HEARTBEATS = "drop_heartbeats"  #: no answer at all for a while


@dataclass(frozen=True)
class Injection:
    """What to do in one worker.

    Attributes:
        harm: what happens.
        after_steps: in the step after so many more; heartbeats are disturbed at once.
        steps: for ``SLOW``, in how many steps.
        duration_s: how long: the delay of a slow step or late heartbeat, the silence of a dropped one; for ``SPIN`` and
            ``HANG`` the end, or 0 for never.
        exit_code: for ``EXIT``.
        megabytes: for ``OUT_OF_MEMORY``.
        mark: a text that exceptions carry, so that a history tells them from others.
    """

    harm: Harm
    after_steps: int = 0
    steps: int = 1
    duration_s: float = 0.0
    exit_code: int = 3
    megabytes: int = 256
    mark: str = "chaos"

    def __post_init__(self) -> None:
        """Check the bounds; ``ValueError`` otherwise."""
        object.__setattr__(self, "harm", Harm(self.harm))
        if not 0 <= self.megabytes <= _MOST_MEGABYTES:
            raise ValueError(f"megabytes must be 0 to {_MOST_MEGABYTES}, not {self.megabytes}")
        if not 0 <= self.duration_s <= _LONGEST_S:
            raise ValueError(f"duration_s must be 0 to {_LONGEST_S:g}, not {self.duration_s}")


class InjectedError(Exception):
    """Raised in a worker on purpose."""


class UnpicklableError(Exception):
    """Raised on purpose; holds a lock, which no pickle takes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class GraphBroken(BaseException):
    """No ``Exception``, so that neither the step nor the worker keeps it from the graph's loop."""


class ChaosWorkerActor(WorkerActor):
    """A worker that can be told to misbehave."""

    _late_s = 0.0
    _disturbed_until = 0.0

    @ray.method(concurrency_group="supervision")  # type: ignore[untyped-decorator]  # Ray has no types
    def inject(self, epoch: int, order: Mapping[str, Any]) -> int:
        """Arm one injection.

        Args:
            epoch: the generation that the caller aims at; another one is not hit.
            order: fields of an :class:`Injection`, as plain data.

        Returns:
            this process's pid.

        Raises:
            ValueError: it is no injection, or this worker is of another epoch.
        """
        injection = Injection(**order)
        if epoch != self._epoch or self._worker is None:
            raise ValueError(f"aimed at epoch {epoch}, but this worker is of {self._epoch}")
        logger.warning("rank %d, epoch %d: armed with %s", self._rank, self._epoch, injection)
        if injection.harm in (Harm.LATE_HEARTBEATS, Harm.DROP_HEARTBEATS):
            dropped = injection.harm is Harm.DROP_HEARTBEATS
            self._late_s = injection.duration_s
            self._disturbed_until = time.monotonic() + (injection.duration_s if dropped else 10 * injection.duration_s)
        else:
            self._worker = Disturbed(self, self._worker, injection)
        return os.getpid()

    def answer(self, beat: Beat) -> Progress:
        """As in ``WorkerActor``; late where that was ordered."""
        remaining = self._disturbed_until - time.monotonic()
        if remaining > 0:
            time.sleep(min(self._late_s, remaining))
        return super().answer(beat)


class Disturbed:
    """Stands before the engine's worker until its injection has happened."""

    def __init__(self, actor: ChaosWorkerActor, inner: Any, injection: Injection) -> None:
        self._actor, self._inner, self._injection = actor, inner, injection
        self._wait, self._left = injection.after_steps, injection.steps

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if self._injection.harm is not Harm.RAISE_IN_RPC or not callable(attribute) or name == "bind_thread":
            return attribute

        def fail(*args: Any, **kwargs: Any) -> Any:
            self._take_away()
            raise InjectedError(f"{self._injection.mark}: raised in {name} on purpose")

        return fail

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        """The engine's, and what was ordered before it."""
        if self._injection.harm is not Harm.RAISE_IN_RPC:
            self._wait -= 1
            if self._wait < 0:
                self._left -= 1
                if self._left <= 0:
                    self._take_away()
                happen(self._injection)
        return self._inner.execute_stage(scheduler_output, grammar_output, intermediate)

    def _take_away(self) -> None:
        if self._actor._worker is self:
            self._actor._worker = self._inner


def happen(injection: Injection) -> None:
    """Do the harm, here and now."""
    harm, mark = injection.harm, injection.mark
    if harm is Harm.ABORT:
        os.abort()
    elif harm is Harm.EXIT:
        os._exit(injection.exit_code)
    elif harm is Harm.OUT_OF_MEMORY:
        hoard = mmap.mmap(-1, max(1, injection.megabytes) * _MEGABYTE)
        for page in range(0, len(hoard), mmap.PAGESIZE):
            hoard[page] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    elif harm is Harm.HANG:
        threading.Event().wait(injection.duration_s or None)
    elif harm is Harm.SPIN:
        _spin(injection.duration_s)
    elif harm is Harm.SLOW:
        time.sleep(injection.duration_s)
    elif harm is Harm.RAISE:
        raise InjectedError(f"{mark}: raised in a step on purpose")
    elif harm is Harm.RAISE_UNPICKLABLE:
        raise UnpicklableError(f"{mark}: raised in a step on purpose, with a lock in it")
    elif harm is Harm.BREAK_GRAPH:
        raise GraphBroken(f"{mark}: the graph's loop ends on purpose")


def _spin(seconds: float) -> None:
    """Backtrack in C, with the interpreter's lock held; 0 seconds are for ever."""
    end, length = time.monotonic() + (seconds or _LONGEST_S), 22 if seconds else 60
    while time.monotonic() < end:
        re.match("(a+)+$", "a" * length + "b")
