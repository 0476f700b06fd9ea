"""Engines of other kinds: small caches, adapters, pooling, connectors, speculation. Each dies under its requests."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHECKPOINT, PROMPTS, core_of, dying, offline, tokens, workers
from safetensors.torch import save_file
from test_features import LONG, greedy, same_with_deaths

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_preemption_under_a_small_cache_without_prefix_caching() -> None:
    """Requests are preempted by vLLM and by deaths, alone and together."""
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS]
    with offline(
        pipeline_parallel_size=2, enable_prefix_caching=False, block_size=32, num_gpu_blocks_override=18
    ) as llm:
        same_with_deaths(llm, greedy(max_tokens=60), prompts=prompts, moments=(10, 40, 90))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 18


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two LoRA adapters of random numbers, large enough to change what is said."""
    config = json.loads((Path(CHECKPOINT) / "config.json").read_text())
    hidden, heads, kv_heads, size = (
        config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"],
    )  # fmt: skip
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"lora{seed}")
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for name, width in (("q_proj", heads * size), ("v_proj", kv_heads * size)):
                base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{base}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.1
                weights[f"{base}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.1
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            json.dumps(
                {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
            )
        )
        folders.append(str(folder))
    return folders


@pytest.mark.long
def test_adapters_added_at_run_time(adapters: list[str]) -> None:
    from vllm.lora.request import LoRARequest

    requests = [LoRARequest(f"adapter{n}", n, path) for n, path in enumerate(adapters, 1)]
    with offline(pipeline_parallel_size=2, enable_lora=True, max_lora_rank=8, max_loras=2) as llm:
        plain = tokens(llm.generate(list(PROMPTS), greedy(), use_tqdm=False))
        # None beside them would be computed with one of them: vLLM 0.32 on CPUs does that under any executor.
        mixed = [requests[0], requests[1], requests[0], requests[1]]
        undisturbed = tokens(llm.generate(list(PROMPTS), greedy(), lora_request=mixed, use_tqdm=False))
        assert all(with_adapter != without for with_adapter, without in zip(undisturbed, plain, strict=True))
        with dying(llm, 4, 15):
            assert tokens(llm.generate(list(PROMPTS), greedy(), lora_request=mixed, use_tqdm=False)) == undisturbed

        engine = llm.llm_engine
        assert engine.add_lora(requests[0])
        assert engine.pin_lora(1)
        assert engine.add_lora(requests[1])
        os.kill(workers()[0], signal.SIGKILL)
        assert engine.list_loras() == {1, 2}, "added adapters are there again on new workers"
        assert engine.remove_lora(2)
        os.kill(workers()[1], signal.SIGKILL)
        assert engine.list_loras() == {1}, "a removed one is not"


@pytest.mark.long
def test_pooling_has_no_sampler() -> None:
    with offline(runner="pooling", convert="embed", pipeline_parallel_size=2, max_num_batched_tokens=64) as llm:
        prompts = [f"{LONG} {number}" for number in range(2)] + list(PROMPTS)

        def embed() -> torch.Tensor:
            return torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)])

        undisturbed = embed()
        with dying(llm, 1, 3):
            survived = embed()
        assert torch.allclose(undisturbed, survived, atol=1e-5)
        assert len(core_of(llm).incidents) == 2


@pytest.fixture
def storage(tmp_path: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }


@pytest.mark.long
def test_kv_connector(storage: dict[str, Any]) -> None:
    """vLLM's own example: KV on disk outlives the workers, everything else of the connector starts over."""
    from vllm.config import KVTransferConfig

    prompts = [f"{LONG} {number}" for number in range(2)]
    with offline(
        pipeline_parallel_size=2,
        block_size=32,
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(**storage),
    ) as llm:
        undisturbed = tokens(llm.generate(prompts, greedy(), use_tqdm=False))
        assert list(Path(storage["kv_connector_extra_config"]["shared_storage_path"]).iterdir()), "nothing was stored"
        assert tokens(llm.generate(prompts, greedy(), use_tqdm=False)) == undisturbed
        with dying(llm, 8, 16):
            assert tokens(llm.generate(prompts, greedy(), use_tqdm=False)) == undisturbed


@pytest.mark.long
def test_speculative_decoding() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with offline(tensor_parallel_size=2, speculative_config=speculation) as llm:
        same_with_deaths(llm, greedy(max_tokens=50), moments=(4, 12))
