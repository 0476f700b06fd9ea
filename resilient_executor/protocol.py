"""What crosses a process border: envelopes of steps and calls, and the facts about a worker.

The step's envelope is bytes. Ray passes bytes through a channel without its own serializer (several microseconds for
anything else), and what is unpickled from bytes owns its memory: no result can keep a channel's buffer alive, so the
results need no detaching.

    step request   header (epoch, step id, kind, length of the trace context) + trace context + pickle of the input
    step reply     header (epoch, step id, rank, length of the trail) + trail + pickle of the output

The trail is what the ranks on the way have measured; it is empty unless the request carries a trace context.

Every message carries the epoch and the step id, and whoever receives it compares them before it believes the rest.
"""

from __future__ import annotations

import enum
import pickle
import struct
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import cloudpickle

from resilient_executor import measurements
from resilient_executor.errors import ResilientExecutorError
from resilient_executor.measurements import RankTiming

_REQUEST: Final = struct.Struct("<QQBH")
_REPLY: Final = struct.Struct("<QQIH")


class StepKind(enum.IntEnum):
    """What a worker does with a step request."""

    STEP = 0
    #: Goes through every channel and thread of the graph without touching the engine's worker: pays for first use
    #: (imports, registrations) before a request waits for it.
    WARM_UP = 1


class StepRequest(NamedTuple):
    """A decoded step request; ``payload`` is still pickled, so that a stage can hand it on as it came."""

    epoch: int
    step_id: int
    kind: int
    trace_context: bytes
    payload: memoryview


def dumps(value: Any) -> bytes:
    """Pickle ``value``, with cloudpickle only where pickle cannot: it is ten times slower.

    Closures and lambdas make pickle fail. Classes and functions of ``__main__`` do not: they are pickled by reference,
    and a worker, whose ``__main__`` is another, could not load them.
    """
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        data = b"__main__"
    return data if b"__main__" not in data else bytes(cloudpickle.dumps(value))


def request_body(value: Any, trace_context: bytes = b"") -> bytes:
    """What can be made of a step request before its place among the others is known.

    Args:
        value: the engine's input, a pair (scheduler output, grammar output).
        trace_context: W3C ``traceparent`` in ASCII, or empty; at most 65,535 bytes.
    """
    return trace_context + dumps(value)


def encode_request(epoch: int, step_id: int, kind: StepKind, context_length: int, body: bytes) -> bytes:
    """Build a step request.

    Args:
        epoch: the generation of workers that it is meant for.
        step_id: counted over the executor's life in the order of sending; never used twice.
        kind: what the workers do with it.
        context_length: of the trace context that the body begins with.
        body: see :func:`request_body`.
    """
    return _REQUEST.pack(epoch, step_id, kind, context_length) + body


def decode_request(data: bytes) -> StepRequest:
    """Take a step request apart without unpickling its payload."""
    epoch, step_id, kind, context_length = _REQUEST.unpack_from(data)
    start = _REQUEST.size + context_length
    return StepRequest(epoch, step_id, kind, data[_REQUEST.size : start], memoryview(data)[start:])


def encode_reply(epoch: int, step_id: int, rank: int, output: Any, trail: bytes = b"") -> bytes:
    """Build a step reply."""
    return _REPLY.pack(epoch, step_id, rank, len(trail)) + trail + dumps(output)


def reply_header(data: bytes) -> tuple[int, int, int]:
    """Epoch, step id and rank of a step reply."""
    epoch, step_id, rank, _ = _REPLY.unpack_from(data)
    return epoch, step_id, rank


def reply_trail(data: bytes) -> bytes:
    """What the ranks have measured on the way to this reply; see :mod:`measurements`."""
    return bytes(data[_REPLY.size : _REPLY.size + _REPLY.unpack_from(data)[3]])


def reply_output(data: bytes) -> Any:
    """The output in a step reply; it owns its memory. None from a rank whose output nobody wants."""
    return pickle.loads(memoryview(data)[_REPLY.size + _REPLY.unpack_from(data)[3] :])


@dataclass(frozen=True)
class RpcEnvelope:
    """What travels with one collective RPC to one worker.

    ``method`` is a name, or a cloudpickled callable that gets the engine's worker as its first argument.
    """

    epoch: int
    call_id: int
    method: str | bytes
    arguments: bytes
    trace_context: bytes = b""


class StaleEpoch(ResilientExecutorError):
    """A worker got a message of another epoch than its own, and did nothing with it."""


class WorkerException(ResilientExecutorError):
    """Carries an exception of the engine's worker across the process border. Callers never see it; they see its cause.

    Everything in it is bytes or plain data, so it can always be pickled, whatever the original was.
    """

    def __init__(
        self, epoch: int, call_id: int, rank: int, operation: str, pickled: bytes | None, summary: str, trace: str
    ) -> None:
        super().__init__(epoch, call_id, rank, operation, pickled, summary, trace)
        self.epoch = epoch
        self.call_id = call_id
        self.rank = rank
        self.operation = operation
        self.pickled = pickled
        self.summary = summary
        self.trace = trace
        #: When the rank had ended what it did before, began this, and raised; (0, 0, 0) where nobody has measured it.
        self.times = (0, 0, 0)

    @classmethod
    def capture(cls, error: BaseException, *, epoch: int, call_id: int, rank: int, operation: str) -> WorkerException:
        """Wrap ``error`` where it was caught, with its traceback as text."""
        trace = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        pickled: bytes | None
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)  # some exceptions pickle, and then cannot be built again
        except Exception:  # noqa: BLE001 - anything at all may be wrong with a foreign exception
            pickled = None
        return cls(epoch, call_id, rank, operation, pickled, summary, trace)

    def original(self) -> Exception:
        """The worker's own exception with a note; a :class:`RemoteError` where it could not be pickled."""
        error: Exception | None = None
        if self.pickled is not None:
            try:
                loaded = pickle.loads(self.pickled)
                error = loaded if isinstance(loaded, Exception) else None
            except Exception:  # noqa: BLE001 - its class may not exist on this side
                error = None
        if error is None:
            error = RemoteError(self.summary)
        _add_note(
            error,
            f"raised by rank {self.rank} in {self.operation} (epoch {self.epoch}, id {self.call_id}); "
            f"the worker's traceback:\n{self.trace}",
        )
        if self.times[1]:
            measurements.attach(error, RankTiming(self.rank, *self.times, raised=True))
        return error


def _add_note(error: Exception, note: str) -> None:
    """``error.add_note``, which Python 3.10 does not have; there the note is kept and not printed."""
    error.__dict__.setdefault("__notes__", []).append(note)


class RemoteError(ResilientExecutorError):
    """Stands for a worker's exception that could not be carried here as it was; the notes hold its traceback."""


@dataclass(frozen=True)
class RankAssignment:
    """Who a worker is within its epoch. Built anew for every epoch.

    Attributes:
        rank: 0 .. world_size-1; rank = pp_rank * tp_size + tp_rank.
        local_rank: index among the workers of the same node, in rank order.
        is_output_rank: whether the executor returns this rank's output.
        wants_output: whether the executor wants any output from this rank at all (the output rank, or every rank of
            the last stage when an aggregator is set).
        distributed_init_method: ``tcp://host:port`` for ``torch.distributed``; another port for every epoch.
        device_ids: the ids of all devices of this group on this node, sorted as numbers; empty on CPU.
        node_id: Ray's node id, hexadecimal.
    """

    rank: int
    world_size: int
    local_rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    epoch: int
    is_output_rank: bool
    wants_output: bool
    distributed_init_method: str
    device_ids: tuple[str, ...] = ()
    node_id: str = ""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that can be told from a later one with the same pid.

    ``start_ticks`` is field 22 of ``/proc/PID/stat``: clock ticks since boot.
    """

    pid: int
    start_ticks: int
    node_id: str


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself right after its actor started.

    Attributes:
        created_rank: the index of its bundle in the order of creation.
        device_ids: accelerator ids that Ray assigned, as strings; empty on CPU.
        actor_id: Ray's actor id, hexadecimal.
    """

    created_rank: int
    process: ProcessIdentity
    node_ip: str
    device_ids: tuple[str, ...]
    actor_id: str


class Phase(str, enum.Enum):
    """What a worker is busy with."""

    STARTING = "starting"
    LOADING = "loading"
    COMPILING = "compiling"
    SERVING = "serving"
    STOPPING = "stopping"


#: In how many steps a worker remembers to have raised; more than that are never in flight at once.
FAILURES_KEPT: Final = 128


@dataclass(frozen=True)
class Progress:
    """A worker's answer to a heartbeat: where it is in its work.

    Attributes:
        step_in_hand: the step being computed, or -1 between steps.
        step_age_s: seconds since that step began; 0.0 between steps.
        last_step: the step that it finished last, or -1.
        failed_steps: the last steps in which the engine's worker raised, oldest first.
        rpc_in_hand: the name of the collective RPC that it runs, or "".
        phase_age_s: seconds since the phase began.
        steps_done: steps that it has finished in this epoch, or raised in; warm-ups do not count.
        slowest_step_s: the slowest of those that it has finished since the supervisor's heartbeat before this one.
        asleep: it sleeps until it is rung, see ``doorbell.py``.
    """

    rank: int
    epoch: int
    phase: Phase
    step_in_hand: int
    step_age_s: float
    last_step: int
    failed_steps: tuple[int, ...]
    rpc_in_hand: str
    phase_age_s: float = 0.0
    steps_done: int = 0
    slowest_step_s: float = 0.0
    asleep: bool = False


@dataclass(frozen=True)
class Vitals:
    """What a node's kernel says of a living process.

    Attributes:
        state: of its first thread, as in ``/proc/PID/stat``: ``T`` is stopped, ``D`` is stuck in the kernel.
        cpu_ticks: clock ticks of processor time that it has used.
        runnable: whether one of its threads runs or waits for a processor.
    """

    state: str
    cpu_ticks: int
    runnable: bool

    def describe(self) -> str:
        """In words."""
        known = {"T": "is stopped", "t": "is being traced", "D": "is stuck in the kernel"}
        return known.get(self.state) or ("runs" if self.runnable else "sleeps")


#: Exit code of a worker that has ended itself because nobody renewed its lease.
LEASE_EXIT_CODE: Final = 79


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended, as far as its node's kernel tells.

    Attributes:
        pid: its process id on its node.
        exit_code: the exit code, or None when it was a signal or is not known.
        signal: the signal's number, or None.
        at: wall-clock time when the agent saw it, seconds since the Unix epoch.
    """

    pid: int
    exit_code: int | None
    signal: int | None
    at: float
    note: str = ""

    @property
    def is_blind(self) -> bool:
        """Whether all that is known is that it has ended."""
        return self.exit_code is None and self.signal is None


@runtime_checkable
class Worker(Protocol):
    """What an engine brings: the code that runs in each worker's process.

    The executor builds it with ``cls(assignment, **kwargs)`` and calls ``init_device``, then ``load_model``. Any other
    method can be called through ``collective_rpc``. Optional: ``bind_thread()``, called once in the thread in which the
    graph will call ``execute_stage`` (a place to select the device), and ``shutdown()``.
    """

    def init_device(self) -> None:
        """Select the device and join the process group."""

    def load_model(self) -> None:
        """Load this rank's weights."""

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        """Run this rank's part of one step.

        Args:
            scheduler_output: what the engine passed to ``execute_model``.
            grammar_output: what the engine passed to ``sample_tokens``, or None.
            intermediate: what the same TP rank of the previous stage returned; None on the first stage. Over shared
                memory its arrays and tensors are read-only views of the channel's buffer, and valid for this step only:
                copy what must outlive it.

        Returns:
            On the last stage the output (or None on ranks whose output nobody wants); otherwise what the next stage
            needs, for instance a dict of tensors.
        """


@dataclass(frozen=True)
class WorkerSpec:
    """Which worker to build, and with what.

    Attributes:
        cls: the class, or ``"package.module:ClassName"`` (imported in the worker's process only).
        kwargs: keyword arguments for every rank.
        kwargs_by_rank: rank -> keyword arguments that add to and override ``kwargs``.
    """

    cls: str | type
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kwargs_by_rank: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def kwargs_of(self, rank: int) -> dict[str, Any]:
        """The keyword arguments of one rank."""
        return {**self.kwargs, **self.kwargs_by_rank.get(rank, {})}
