"""What workers measure, and what engines say of their steps, for telemetry. Pure, and no part of any decision."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_TIMING: Final = struct.Struct("<IQQQ")
_RPC_REPLY: Final = struct.Struct("<QQ")
_ATTRIBUTE: Final = "_resilient_executor_timing"


class RankTiming(NamedTuple):
    """What a rank has measured in one step or call, in nanoseconds since the Unix epoch.

    ``idle_since_ns`` is when it ended the step before this one; 0 for its first.
    """

    rank: int
    idle_since_ns: int
    began_ns: int
    ended_ns: int
    raised: bool = False


def encode_timing(rank: int, idle_since_ns: int, began_ns: int, ended_ns: int) -> bytes:
    """One rank's entry in a trail."""
    return _TIMING.pack(rank, idle_since_ns, began_ns, ended_ns)


def decode_trail(trail: bytes) -> list[RankTiming]:
    """The entries of a trail, first stage first."""
    return [RankTiming(*entry) for entry in _TIMING.iter_unpack(trail)]


def encode_rpc_reply(began_ns: int, ended_ns: int, result: bytes) -> bytes:
    """Build the reply to a collective RPC, from the pickled result."""
    return _RPC_REPLY.pack(began_ns, ended_ns) + result


def rpc_reply_times(data: bytes) -> tuple[int, int]:
    """When a rank began and ended a call."""
    return _RPC_REPLY.unpack_from(data)


def rpc_reply_result(data: bytes) -> Any:
    """What the method has returned."""
    return pickle.loads(memoryview(data)[_RPC_REPLY.size :])


class StepFacts(NamedTuple):
    """What an engine says of a step for its span and metrics. Counts only: no prompt, output or token id.

    Attributes:
        tokens: tokens that it runs.
        requests: requests in its batch.
        trace_headers: of each request that has them, W3C headers (``traceparent``); the step's span links to them.
    """

    tokens: int
    requests: int
    trace_headers: Sequence[Mapping[str, str]] = ()


def attach(error: BaseException, timing: RankTiming) -> None:
    """Note on a worker's exception what the rank that raised it has measured."""
    error.__dict__[_ATTRIBUTE] = timing


def raised_timing(error: BaseException | None) -> RankTiming | None:
    """What the rank that raised has measured, where ``error`` is a worker's exception that was carried here."""
    timing = getattr(error, _ATTRIBUTE, None)
    return timing if isinstance(timing, RankTiming) else None
