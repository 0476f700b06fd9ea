"""Every error that this package raises on purpose.

An engine needs to tell four things apart, and each has a type of its own:

* the caller did something wrong: :class:`ConfigError`, :class:`StateError` and their kin, raised before anything is
  started or changed;
* a step or call was lost with the epoch it ran in, and can be repeated: :class:`StepLost`, :class:`RpcLost`;
* the executor is not healthy right now: :class:`ExecutorUnhealthy` and :class:`ExecutorRecovering`;
* it is over: :class:`StartupError`, :class:`ExecutorFailed`.

An exception that the engine's own worker code raised is none of these: it reaches the caller as it is, with a note that
names rank, step and epoch, and the worker's traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_executor.supervisor.incidents import Incident


class ResilientExecutorError(Exception):
    """Base of every error of this package. All of them can be pickled: engines carry them across processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild without ``__init__``, whose arguments differ from class to class."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[ResilientExecutorError], args: tuple[Any, ...], state: dict[str, Any]) -> ResilientExecutorError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ResilientExecutorError, ValueError):
    """A setting is wrong. The message names the setting and what to do; nothing has been started."""


class DependencyError(ResilientExecutorError, ImportError):
    """A package is missing or too old. The message holds the command that repairs it."""


class PlacementError(ResilientExecutorError):
    """The cluster cannot (or not in time) provide the bundles that the workers need."""


class TopologyError(ResilientExecutorError):
    """The workers that came up cannot form the group: addresses, nodes or devices do not fit together."""


class StateError(ResilientExecutorError, RuntimeError):
    """A call came out of order, for instance ``sample_tokens`` without ``execute_model``. Nothing was changed."""


class ExecutorStopped(StateError):
    """The executor has been shut down; it takes no further calls."""


class StartupError(ResilientExecutorError):
    """The executor could not be started. ``__cause__`` is the first cause; everything started was removed again."""


class WorkerStartError(ResilientExecutorError):
    """A worker failed while it was started or rebuilt: its constructor, device or model raised, or its process died.

    Attributes:
        rank: the rank that failed, or None when it is not known yet.
        phase: the phase of the start that failed, for instance ``load``.
    """

    def __init__(self, message: str, *, rank: int | None = None, phase: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class StepLost(ResilientExecutorError):
    """The epoch died under this step. The workers of the next epoch know nothing of it: the engine must recompute.

    Attributes:
        epoch: the epoch that the step ran in.
        step_id: the step, counted from 0 over the executor's whole life, as they are sent; -1 when it never was.
        incident: what happened, as far as it is known; None when the news has not arrived yet.
    """

    def __init__(self, epoch: int, step_id: int, incident: Incident | None = None) -> None:
        why = f": {incident.headline()}" if incident is not None else ""
        what = f"step {step_id} was lost with" if step_id >= 0 else "a step was not sent, being planned for"
        super().__init__(f"{what} epoch {epoch}{why}")
        self.epoch = epoch
        self.step_id = step_id
        self.incident = incident


class RpcLost(ResilientExecutorError):
    """A collective RPC was in flight when its epoch died, and it is not declared safe to repeat.

    Declare it with ``policy=RpcPolicy.READ`` or ``RpcPolicy.JOURNAL`` to have it repeated after the rebuild.
    """

    def __init__(self, method: str, epoch: int, incident: Incident | None = None) -> None:
        why = f": {incident.headline()}" if incident is not None else ""
        super().__init__(
            f"collective RPC {method!r} was in flight when epoch {epoch} ended{why}. It may or may not have run on "
            "some ranks. Pass policy=RpcPolicy.READ or RpcPolicy.JOURNAL if it is safe to repeat"
        )
        self.method = method
        self.epoch = epoch
        self.incident = incident


class RpcTimeout(ResilientExecutorError, TimeoutError):
    """A collective RPC did not answer within its timeout; the workers live and may still be running it.

    A worker that goes on holding Python's lock in it, for longer than a step may take, is then taken for stuck.
    """

    def __init__(self, method: str, timeout_s: float, ranks: tuple[int, ...]) -> None:
        super().__init__(
            f"collective RPC {method!r} got no answer from ranks {list(ranks)} within {timeout_s:g} s. "
            "Pass a longer timeout, or raise rpc_timeout_s"
        )
        self.method = method
        self.timeout_s = timeout_s
        self.ranks = ranks


class ExecutorUnhealthy(ResilientExecutorError):
    """``check_health`` could not get a live answer from every worker within its deadline.

    Attributes:
        ranks: the ranks that are dead or silent; empty when the supervisor itself cannot be reached.
        incident: the incident that explains it, when there is one.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), incident: Incident | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.incident = incident


class ExecutorRecovering(ExecutorUnhealthy):
    """Unhealthy, and being rebuilt right now: requests wait and will go on."""


class RecoveryTimeout(ResilientExecutorError, TimeoutError):
    """The rebuild did not end within ``recovery_timeout_s``. It goes on; the call may be repeated."""


class ExecutorFailed(ResilientExecutorError):
    """The restart budget is spent, or the fault is permanent. Nothing will be rebuilt any more.

    Attributes:
        incident: the last incident, with its first cause.
    """

    def __init__(self, message: str, incident: Incident | None = None) -> None:
        super().__init__(message)
        self.incident = incident


def brief(error: BaseException) -> str:
    """An error in one line of at most 300 characters: Ray's run over pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
