"""A control for the Chaos Toolkit: says what is expected, and heals what an experiment has stopped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from resilient_executor.chaos import actions

__all__ = ["after_experiment_control", "before_experiment_control"]

logger = logging.getLogger("chaostoolkit")


def before_experiment_control(context: Mapping[str, Any], **_: Any) -> None:
    """Say what the experiment expects."""
    logger.info("Expected: %s", expectation(context))


def after_experiment_control(context: Mapping[str, Any], state: Mapping[str, Any], **_: Any) -> None:
    """Let everything go on, and say how it went against what was expected."""
    actions.close_all()
    met = state.get("status") == "completed" and not state.get("deviated")
    logger.info("Expected: %s. %s", expectation(context), "So it was" if met else "It was not so")


def expectation(experiment: Mapping[str, Any]) -> str:
    """``survives``, or ``fails within N s``; from the experiment's extension ``resilient-executor``."""
    for extension in experiment.get("extensions", ()):
        if extension.get("name") == "resilient-executor":
            return str(extension["expects"])
    return "not stated"
