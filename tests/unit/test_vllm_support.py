from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilient_executor.errors import ConfigError
from resilient_executor.vllm.settings import VllmSettings
from resilient_executor.vllm.support import refuse_what_cannot_survive


def config(**changes: Any) -> Any:
    """A configuration of vLLM, as far as it is looked at; ``a__b=c`` sets ``config.a.b``."""
    parallel = SimpleNamespace(data_parallel_size=1, enable_elastic_ep=False, nnodes=1, use_ray=True)
    model = SimpleNamespace(is_moe=False, multimodal_config=SimpleNamespace(mm_processor_cache_type="lru"))
    whole = SimpleNamespace(parallel_config=parallel, model_config=model, ec_transfer_config=None)
    for path, value in changes.items():
        *way, last = path.split("__")
        place: Any = whole
        for name in way:
            place = getattr(place, name)
        setattr(place, last, value)
    return whole


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"ec_transfer_config": object()}, "ec_transfer_config"),
        ({"parallel_config__data_parallel_size": 2, "model_config__is_moe": True}, "data parallel MoE"),
        ({"parallel_config__enable_elastic_ep": True}, "elastic"),
        ({"parallel_config__nnodes": 2, "parallel_config__use_ray": False}, "nnodes"),
        ({"model_config__multimodal_config__mm_processor_cache_type": "shm"}, "mm-processor-cache-type lru"),
    ],
)
def test_what_would_not_survive_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        refuse_what_cannot_survive(config(**changes), VllmSettings())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_config__multimodal_config": None},
        {"model_config__is_moe": True},
        {"parallel_config__data_parallel_size": 2},
    ],
)
def test_the_rest_is_let_through(changes: dict[str, Any]) -> None:
    refuse_what_cannot_survive(config(**changes), VllmSettings())
