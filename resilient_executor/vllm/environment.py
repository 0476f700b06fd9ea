"""What the adapter takes from its surroundings: platform, vLLM's variables, logging."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.platforms import current_platform

from resilient_executor.errors import ConfigError
from resilient_executor.vllm import settings

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def from_platform(parallel: ParallelConfig) -> dict[str, Any]:
    """Settings of the executor that follow from the platform, vLLM's options and vLLM's variables.

    Raises:
        ConfigError: a variable cannot be read.
    """
    shared_memory_only = current_platform.is_tpu() or current_platform.is_xpu()
    # vLLM's own Ray executors refuse a platform without a Ray resource; a CPU worker takes CPUs.
    device_key = getattr(current_platform, "ray_device_key", "") or "CPU"
    registered = {*vllm.envs.environment_variables, *getattr(current_platform, "additional_env_vars", ())}
    return {
        "device_key": device_key,
        "placement_group": parallel.placement_group,
        **settings.graph_settings(os.environ, shared_memory_only=shared_memory_only),
        **settings.carried_environment(os.environ, registered, _kept_back()),
        "ray_remote_args": settings.remote_args(
            parallel.ray_runtime_env,
            nsight=parallel.ray_workers_use_nsight,
            noset_variables=getattr(current_platform, "ray_noset_device_env_vars", ()),
        ),
    }


def _kept_back() -> set[str]:
    """Variables that the user has excluded, in vLLM's own file for that."""
    path = Path(vllm.envs.VLLM_CONFIG_ROOT) / "ray_non_carry_over_env_vars.json"
    try:
        return set(json.loads(path.read_text()))
    except FileNotFoundError:
        return set()
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON list of names: {error}") from None


def show_our_log() -> None:
    """Send our log lines where vLLM sends its own, unless the user has set up ours."""
    ours, vllms = logging.getLogger("resilient_executor"), logging.getLogger("vllm")
    if ours.handlers or not vllms.handlers:
        return
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllms.level)
    ours.propagate = vllms.propagate


def end_quickly() -> None:
    """Spare an engine process the last garbage collection, which takes seconds with all of vLLM in memory."""
    if multiprocessing.parent_process() is not None:
        atexit.register(gc.freeze)


def hide_scheduler_warning() -> None:
    """Drop vLLM's warning about a custom scheduler class where that is ours in front of vLLM's own."""
    logger = logging.getLogger("vllm.config.scheduler")
    if not any(isinstance(present, _NotAboutOurs) for present in logger.filters):
        logger.addFilter(_NotAboutOurs())


class _NotAboutOurs(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.args and "resilient_executor.vllm" in str(record.args))
