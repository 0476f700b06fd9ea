from __future__ import annotations

from dataclasses import dataclass

import pytest

from resilient_executor.journal import RpcPolicy
from resilient_executor.vllm.control_plane import VOLATILE, treatment


@dataclass
class Adapter:
    lora_int_id: int


@pytest.mark.parametrize(
    "method",
    [
        "set_kv_cache_layout",
        "determine_available_memory",
        "update_max_model_len",
        "initialize_from_config",
        "compile_or_warm_up_model",
    ],
)
def test_the_calls_of_the_start_are_replayed(method: str) -> None:
    found = treatment(method, ("anything",), {})
    assert found is not None
    assert (found.policy, found.key) == (RpcPolicy.JOURNAL, method)


@pytest.mark.parametrize("method", ["get_kv_cache_spec", "list_loras", "take_draft_token_ids", "reset_encoder_cache"])
def test_reads_are_repeated_and_forgotten(method: str) -> None:
    found = treatment(method, (), {})
    assert found is not None
    assert (found.policy, found.key) == (RpcPolicy.READ, None)


def test_an_adapter_is_there_again_until_it_is_removed() -> None:
    added, pinned = treatment("add_lora", (Adapter(3),), {}), treatment("pin_lora", (3,), {})
    removed = treatment("remove_lora", (3,), {})
    assert added is not None
    assert pinned is not None
    assert removed is not None
    assert added.policy is pinned.policy is RpcPolicy.JOURNAL
    assert set(removed.undoes) == {added.key, pinned.key}
    assert treatment("add_lora", (), {"lora_request": Adapter(4)}) != added


def test_a_sleeper_sleeps_until_it_is_awake() -> None:
    asleep, half = treatment("sleep", (), {"level": 1}), treatment("wake_up", (), {"tags": ["weights"]})
    awake = treatment("wake_up", (), {"tags": None})
    assert asleep is not None
    assert half is not None
    assert awake is not None
    assert asleep.policy is half.policy is RpcPolicy.JOURNAL
    assert awake.undoes == ("asleep:*",)


def test_what_nobody_knows_is_not_repeated() -> None:
    assert treatment("my_own_method", (), {}) is None
    assert not any(treatment(method, (), {}) for method in VOLATILE)
