"""What becomes of vLLM's control-plane calls when the workers die. Pure.

A collective RPC either changes nothing in the workers (it is repeated if it was lost in flight), or it changes their
state (it is replayed on all later workers as well), or nobody knows (the caller gets ``RpcLost`` and decides). vLLM has
no such declaration, so the table is here. A user's own methods are declared with the setting ``rpc_policies``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from resilient_executor.journal import RpcPolicy


@dataclass(frozen=True)
class Treatment:
    """How one call is treated.

    Attributes:
        policy: what becomes of it when its epoch dies.
        key: with ``JOURNAL``, a later call with the same key replaces this one.
        undoes: keys of journalled calls that this one undoes; a prefix when it ends in ``*``.
    """

    policy: RpcPolicy
    key: str | None = None
    undoes: tuple[str, ...] = ()


#: Called once at start-up, in this order; whoever replaces a worker needs the same calls with the same arguments.
_START_UP: Final = (
    "set_kv_cache_layout",
    "determine_available_memory",
    "update_max_model_len",
    "initialize_from_config",
    "compile_or_warm_up_model",
)
#: They change what workers do afterwards; the last one counts.
_LAST_ONE_COUNTS: Final = ("update_config", "reload_weights", "reset_weights", "load_model")
#: They read, or they leave a worker as a new one is anyway (empty caches), or a second run does no harm.
_REPEATABLE: Final = (
    "check_health",
    "compute_weight_checksums",
    "execute_dummy_batch",
    "get_compilation_match_table",
    "get_encoder_timing_stats",
    "get_kv_cache_spec",
    "get_kv_connector_handshake_metadata",
    "get_model_inspection",
    "get_simple_cpu_offload_num_cpu_blocks",
    "get_supported_kv_cache_layouts",
    "get_supported_tasks",
    "list_loras",
    "profile",
    "release_late_interaction_query_cache",
    "reset_encoder_cache",
    "reset_mm_cache",
    "save_sharded_state",
    "save_tensorized_model",
    "supports_draft_weight_updates",
    "synchronize_device",
    "take_draft_token_ids",
)
#: Weights that a trainer pushes into the workers: nothing of it can be replayed without the trainer.
VOLATILE: Final = frozenset(
    {
        "finish_weight_update",
        "init_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)


def treatment(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Treatment | None:
    """How vLLM's own method is treated; None for one that is not known here."""
    if method in _START_UP:
        return Treatment(RpcPolicy.JOURNAL, key=method)
    if method in _REPEATABLE:
        return Treatment(RpcPolicy.READ)
    if method in _LAST_ONE_COUNTS:
        return Treatment(RpcPolicy.JOURNAL, key=method)
    if method in ("add_lora", "pin_lora", "remove_lora"):
        return _lora(method, args, kwargs)
    if method in ("sleep", "wake_up", "discard"):
        return _sleep(method, args, kwargs)
    return None


def _lora(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Treatment | None:
    argument = args[0] if args else next(iter(kwargs.values()), None)
    lora_id = getattr(argument, "lora_int_id", argument)
    if not isinstance(lora_id, int):
        return None
    if method == "add_lora":
        return Treatment(RpcPolicy.JOURNAL, key=f"lora:{lora_id}")
    if method == "pin_lora":
        return Treatment(RpcPolicy.JOURNAL, key=f"pinned lora:{lora_id}")
    return Treatment(RpcPolicy.READ, undoes=(f"lora:{lora_id}", f"pinned lora:{lora_id}"))


def _sleep(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Treatment:
    """A replaced worker of a sleeping engine must sleep, too; one of an engine that is awake must not."""
    if method != "wake_up":
        return Treatment(RpcPolicy.JOURNAL, key=f"asleep:{method}", undoes=("asleep:wake*",))
    tags = args[0] if args else kwargs.get("tags")
    if tags:
        return Treatment(RpcPolicy.JOURNAL, key=f"asleep:wake {sorted(tags)}")
    return Treatment(RpcPolicy.READ, undoes=("asleep:*",))
