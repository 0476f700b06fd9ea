"""What would not survive a death of workers is refused before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_executor.errors import ConfigError

if TYPE_CHECKING:
    from resilient_executor.vllm.settings import VllmSettings


def refuse_what_cannot_survive(config: Any, settings: VllmSettings) -> None:
    """Check vLLM's configuration.

    Raises:
        ConfigError: names the feature, and why it is refused.
    """
    if getattr(config, "ec_transfer_config", None) is not None:
        raise ConfigError(
            "EC connectors are not supported: what an encoder instance holds in its workers cannot be computed again "
            "from the requests that the decoder's engine knows. Remove ec_transfer_config"
        )
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if multimodal is not None and getattr(multimodal, "mm_processor_cache_type", "lru") == "shm":
        raise ConfigError(
            "mm_processor_cache_type='shm' keeps multimodal inputs where new workers cannot count on finding them. Use "
            "--mm-processor-cache-type lru"
        )
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        raise ConfigError(
            "data parallel MoE models are not supported: their engines step in lockstep, and one that is rebuilt would "
            "stop all others in a collective. Use tensor or expert parallelism in one engine"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        raise ConfigError("elastic expert parallelism changes the workers of a running engine and is not supported")
    if getattr(parallel, "enable_fault_tolerance", False):
        raise ConfigError(
            "enable_fault_tolerance drops steps and aborts requests when a worker fails; this executor keeps requests. "
            "Leave it off"
        )
    if parallel.nnodes > 1 and not parallel.use_ray:
        raise ConfigError("nnodes belongs to vLLM's multiprocessing backend; Ray knows the nodes of its cluster")
