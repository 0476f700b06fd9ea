"""Probes for the Chaos Toolkit: in an experiment, ``"module": "resilient_executor.chaos.probes"``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from resilient_executor.chaos import actions
from resilient_executor.chaos.control import await_steady, steady
from resilient_executor.chaos.targets import DEFAULT_NAMESPACE, ChaosError, connect, look

__all__ = [
    "epoch", "fails_within", "is_steady", "not_rebuilt_for", "rebuilt_within", "state", "survives_within",
]  # fmt: skip


def is_steady(
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the executor is healthy and every worker answers now."""
    connect(address, namespace)
    try:
        steady(look(name, namespace))
    except ChaosError:
        return False
    return True


def survives_within(
    seconds: float = 60.0,
    after_epoch: int = 0,
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the executor is steady again within so many seconds, in a later epoch than ``after_epoch``."""
    connect(address, namespace)
    try:
        await_steady(lambda: look(name, namespace), seconds, after_epoch)
    except ChaosError:
        return False
    return True


def rebuilt_within(
    seconds: float = 60.0,
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the workers that the last fault of this run has hit are replaced, and serve, within so many seconds."""
    return survives_within(seconds, actions.last_epoch(name, namespace), name, namespace, address)


def not_rebuilt_for(
    seconds: float = 5.0,
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> bool:
    """Whether so many seconds after now the same workers serve that the last fault of this run has met."""
    connect(address, namespace)
    time.sleep(seconds)
    return epoch(name, namespace, address) == actions.last_epoch(name, namespace)


def fails_within(
    seconds: float = 60.0,
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the executor says within so many seconds that it has failed, instead of trying for ever."""
    connect(address, namespace)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if state(name, namespace, address) == "FAILED":
            return True
        time.sleep(0.2)
    return False


def state(
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> str:
    """What the executor says of itself: ``HEALTHY``, ``RECOVERING``, ..."""
    connect(address, namespace)
    return look(name, namespace).state


def epoch(
    name: str = "executor",
    namespace: str = DEFAULT_NAMESPACE,
    address: str = "auto",
    configuration: Mapping[str, Any] | None = None,
) -> int:
    """The generation of workers that is watched now."""
    connect(address, namespace)
    return look(name, namespace).epoch
