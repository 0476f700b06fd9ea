"""One collective RPC as it is noted on its way, and the spans that are made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from resilient_executor.telemetry import names
from resilient_executor.telemetry.spans import Draft, Ids, Value

SYSTEM: Final = "ray"


@dataclass(frozen=True)
class RankAnswer:
    """What came of a call on one rank. Times are 0 where the rank has not told them."""

    began_ns: int = 0
    ended_ns: int = 0
    outcome: str = "ok"
    error: str = ""


@dataclass
class Attempt:
    """One try of a call, on the workers of one epoch."""

    epoch: int
    began_ns: int
    ended_ns: int = 0
    call_id: int = -1
    error: str = ""
    answers: dict[int, RankAnswer] = field(default_factory=dict)


class CallTrace:
    """What is noted of one collective RPC. Belongs to the thread that makes the call."""

    def __init__(
        self, name: str, policy: str, ids: Ids, parent: SpanContext | None, sink: Callable[[CallTrace], None]
    ) -> None:
        self.name = name
        self.policy = policy
        self.ids = ids
        self.parent = parent
        self.header = ids.traceparent()
        self.began_ns = time.time_ns()
        self.ended_ns = 0
        self.error = ""
        self.attempts: list[Attempt] = []
        self._sink = sink

    def attempt(self, epoch: int, call_id: int) -> None:
        """It is sent to the workers of ``epoch``."""
        self.attempts.append(Attempt(epoch, time.time_ns(), call_id=call_id))

    def answered(self, answers: Mapping[int, RankAnswer], error: str = "") -> None:
        """The attempt is over; ``error`` says how it failed."""
        if self.attempts:
            last = self.attempts[-1]
            last.ended_ns, last.error, last.answers = time.time_ns(), error, dict(answers)

    def ended(self, error: BaseException | None) -> None:
        """The call is over."""
        self.ended_ns = time.time_ns()
        self.error = type(error).__name__ if error is not None else ""
        self._sink(self)


def draft_call(call: CallTrace, executor: str, identities: Callable[[int], dict[int, dict[str, Value]]]) -> list[Draft]:
    """The call's span, one for each rank, and one for each attempt that was repeated.

    An error that a repetition has made good is on the attempt and not on the call.
    """
    method = names.RPC_PREFIX + call.name
    common: dict[str, Value] = {names.EXECUTOR: executor, names.RPC_SYSTEM: SYSTEM, names.RPC_METHOD: method}
    client = Draft(method, call.ids, call.parent, call.began_ns, call.ended_ns, SpanKind.CLIENT, error=call.error)
    client.attributes = common | {names.POLICY: call.policy, names.ATTEMPTS: len(call.attempts)}
    drafts = [client]
    for attempt in call.attempts:
        parent = client
        if attempt is not call.attempts[-1]:
            parent = client.child(names.ATTEMPT_SPAN, attempt.began_ns, attempt.ended_ns or call.ended_ns)
            parent.attributes = {names.EXECUTOR: executor, names.EPOCH: attempt.epoch, names.RPC_METHOD: method,
                                 names.CALL: attempt.call_id}  # fmt: skip
            parent.error = attempt.error or "lost"
            drafts.append(parent)
        else:
            client.attributes |= {names.EPOCH: attempt.epoch, names.CALL: attempt.call_id}
        known = identities(attempt.epoch)
        for rank, answer in attempt.answers.items():
            start_ns = max(answer.began_ns, attempt.began_ns)
            end_ns = min(answer.ended_ns or attempt.ended_ns, parent.end_ns)
            server = parent.child(method, min(start_ns, end_ns), end_ns)
            server.kind, server.error = SpanKind.SERVER, answer.error
            server.attributes = common | known.get(rank, {})
            server.attributes |= {names.EPOCH: attempt.epoch, names.RANK: rank, names.OUTCOME: answer.outcome,
                                  names.CALL: attempt.call_id}  # fmt: skip
            drafts.append(server)
    return drafts
