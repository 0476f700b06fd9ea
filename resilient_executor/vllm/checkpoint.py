"""Notices that a model's files were replaced while its engine runs. Pure but for the file system.

New workers load what is on the disk. If that is no longer what the engine started with, they would go on with other
weights in the middle of a sentence, and nobody would see why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from resilient_executor.errors import ResilientExecutorError

_SUFFIXES: Final = frozenset({".bin", ".gguf", ".pt", ".pth", ".safetensors"})
_NAMES: Final = frozenset({"config.json", "model.safetensors.index.json"})

#: Name -> (size, time of the last change in ns).
Files = dict[str, tuple[int, int]]


class CheckpointChanged(ResilientExecutorError):
    """The model on the disk is not the one that the engine was started with."""


def files(model: str) -> Files:
    """The weights and configuration in a local folder; nothing for a name of a hub, whose cache never changes."""
    folder = Path(model)
    if not folder.is_dir():
        return {}
    wanted = [path for path in folder.iterdir() if path.suffix in _SUFFIXES or path.name in _NAMES]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(wanted)}


def check(known: dict[str, Files], node_id: str, now: Files) -> None:
    """Compare a node's files with those that the first workers have loaded.

    Args:
        known: node id -> files, of the first workers.
        node_id: the node of a new worker. One that had no worker before has its own copy, with times of its own.
        now: the files there now.

    Raises:
        CheckpointChanged: a file is another one, is gone, or is new.
    """
    if node_id in known:
        before, after = known[node_id], now
    else:
        before = {name: (size, 0) for name, (size, _) in next(iter(known.values()), {}).items()}
        after = {name: (size, 0) for name, (size, _) in now.items()}
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        raise CheckpointChanged(
            f"the model's files {changed} on node {node_id[:8]} are not those that the engine was started with; new "
            "workers must not go on with other weights. Put the files back, or restart the engine"
        )
