"""The instruments. All are fed by the background thread; nothing here is on the path of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from opentelemetry.metrics import CallbackOptions, Observation

from resilient_executor.measurements import RankTiming
from resilient_executor.telemetry import names
from resilient_executor.telemetry.spans import Value
from resilient_executor.telemetry.steps import StepTrace, compute_s, wait_s

_S: Final = 1e-9
_STATES: Final = ("STARTING", "HEALTHY", "SUSPECT", "RECOVERING", "FAILED", "STOPPED")
_SHORT: Final = {names.HEARTBEAT, names.STEP_DURATION, names.STEP_QUEUE, names.RPC_DURATION, names.RANK_COMPUTE,
                 names.RANK_WAIT, names.RANK_HAND_OVER}  # fmt: skip


class Metrics:
    """All instruments of one executor."""

    def __init__(self, provider: Any, scope: str, version: str, executor: str) -> None:
        meter = provider.get_meter(scope, version)
        self._own: dict[str, Value] = {names.EXECUTOR: executor}
        self._instruments: dict[str, Any] = {}
        self.state = "STARTING"
        self.epoch = 0
        self.silence: dict[int, float] = {}
        self.suspicion: dict[int, float] = {}
        for name, row in names.METRICS.items():
            if row.kind == "histogram":
                bounds = names.SECONDS_SHORT if name in _SHORT else names.SECONDS_LONG
                self._instruments[name] = meter.create_histogram(
                    name, row.unit, row.meaning, explicit_bucket_boundaries_advisory=bounds
                )
            elif row.kind == "counter":
                self._instruments[name] = meter.create_counter(name, row.unit, row.meaning)
        for name, observe in (
            (names.STATE_METRIC, self._observe_state),
            (names.EPOCH_METRIC, self._observe_epoch),
            (names.SILENCE, self._observe_silence),
            (names.SUSPICION, self._observe_suspicion),
        ):
            row = names.METRICS[name]
            meter.create_observable_gauge(name, [observe], row.unit, row.meaning)

    def _observe_state(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(int(one == self.state), self._own | {names.STATE: one}) for one in _STATES]

    def _observe_epoch(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self.epoch, self._own)]

    def _observe_silence(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(s, self._own | {names.RANK: rank}) for rank, s in dict(self.silence).items()]

    def _observe_suspicion(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(phi, self._own | {names.RANK: rank}) for rank, phi in dict(self.suspicion).items()]

    def record(self, name: str, seconds: float, **attributes: Value) -> None:
        """Add to a histogram; attributes are given by the names of their constants, in lower case."""
        self._instruments[name].record(seconds, self._attributes(attributes))

    def add(self, name: str, count: int = 1, **attributes: Value) -> None:
        """Add to a counter."""
        self._instruments[name].add(count, self._attributes(attributes))

    def _attributes(self, given: dict[str, Value]) -> dict[str, Value]:
        return self._own | {getattr(names, key.upper()): value for key, value in given.items() if value != ""}

    def step(self, trace: StepTrace, timings: dict[int, RankTiming], tp: int) -> None:
        """A step has ended."""
        self.record(names.STEP_DURATION, (trace.ended_ns - trace.called_ns) * _S, outcome=trace.outcome)
        if trace.sent_ns:
            self.record(names.STEP_QUEUE, (trace.sent_ns - trace.called_ns) * _S)
        for rank, timing in timings.items():
            where: dict[str, Value] = {"rank": rank, "stage": rank // tp}
            self.record(names.RANK_COMPUTE, compute_s(timing), **where)
            if timing.idle_since_ns:
                self.record(names.RANK_WAIT, wait_s(timing), **where)
            if not timing.raised:
                taken_ns = timings[rank + tp].began_ns if rank + tp in timings else trace.ended_ns
                self.record(names.RANK_HAND_OVER, max(0, taken_ns - timing.ended_ns) * _S, **where)
