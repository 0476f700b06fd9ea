"""Actions for the Chaos Toolkit: in an experiment, ``"module": "resilient_executor.chaos.actions"``.

Every one takes ``name``, ``namespace`` and ``address`` of the executor; nobody else is hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilient_executor.chaos.control import Controller
from resilient_executor.chaos.faults import Fault, Target, Timing
from resilient_executor.chaos.targets import DEFAULT_NAMESPACE, Refused, connect, look

__all__ = ["fault", "heal"]

_controllers: dict[tuple[str, str], Controller] = {}
_epochs: dict[tuple[str, str], int] = {}


def fault(
    kind: str,
    target: str = "any",
    count: int = 1,
    phase: str = "",
    duration_s: float = 0.0,
    seed: int = 0,
    protect: list[int] | None = None,
    exit_code: int = 3,
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Carry out one fault.

    Args:
        kind: see :class:`resilient_executor.chaos.faults.Kind`.
        target: ``rank:1``, ``stage:0``, ``node:10.0.0.3`` or ``any``.
        count: how many at once.
        phase: only when a rebuild is in this phase.
        duration_s: how long it lasts; 0 for ever.
        seed: decides what is left to chance.
        protect: ranks that are never hit.
        exit_code: for ``exit``.
        name: the executor's.
        namespace: its Ray namespace.
        address: of its Ray cluster.
        configuration: the experiment's; not used.

    Returns:
        what was hit, and when.

    Raises:
        Refused: nobody was there to be hit, or the executor does not allow it.
    """
    whom = Target.parse(target, count=count, protect=tuple(protect or ()))
    wanted = Fault(kind, whom, Timing(phase=phase), seed, duration_s, exit_code)  # type: ignore[arg-type]  # made a Kind
    strike = _controller(name, namespace, address).strike(wanted)
    if strike is None:
        raise Refused(f"{wanted.describe()}: nobody was there to be hit")
    _epochs[name, namespace] = strike.epoch
    return {"at": strike.at, "fault": wanted.to_json(), "epoch": strike.epoch, "victims": list(strike.victims)}


def heal(
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> list[int]:
    """Let everything go on that an action of this run has stopped; the pids that were still there. For rollbacks."""
    return _controller(name, namespace, address).heal()


def _controller(name: str, namespace: str, address: str) -> Controller:
    connect(address, namespace)
    key = (name, namespace)
    if key not in _controllers:
        _controllers[key] = Controller(lambda: look(name, namespace))
    return _controllers[key]


def last_epoch(name: str, namespace: str) -> int:
    """The generation of workers that the last fault of this run has met; 0 when there was none."""
    return _epochs.get((name, namespace), 0)


def close_all() -> None:
    """Heal what is left, and leave no actor behind; the control of this package calls it."""
    while _controllers:
        _controllers.popitem()[1].close()
