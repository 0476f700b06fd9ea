"""What a worker and a standby do about imports: the garbage collector keeps out, and standbys follow a rank."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilient_executor.protocol import WorkerSpec
from resilient_executor.worker_support import imported, preload, preload_quietly, settle, to_stay


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def cycle_weight() -> list[Any]:
    """Something that only a collection can find."""
    loop: list[Any] = []
    loop.append(loop)
    return loop


def test_no_collection_runs_meanwhile_and_none_looks_afterwards() -> None:
    before = gc.get_freeze_count()
    with to_stay():
        assert not gc.isenabled()
        kept = [cycle_weight() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_an_error_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ImportError), to_stay():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with to_stay():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_is_gone_before_the_rest_is_frozen() -> None:
    gc.collect()
    gc.freeze()
    before = gc.get_freeze_count()
    for _ in range(10_000):
        cycle_weight()
    settle()
    assert gc.get_freeze_count() < before + 5_000


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Modules that nobody has imported yet; each notes its import."""
    names = ["preloaded_engine", "preloaded_late", "preloaded_broken"]
    note = "import sys\nsys.preloaded = [*getattr(sys, 'preloaded', []), __name__]\n"
    worker = "class Worker:\n    @staticmethod\n    def preload(**_):\n        sys.preloaded.append('preload')\n"
    for name, more in zip(names, (worker, "", "raise RuntimeError('not here')\n"), strict=True):
        (tmp_path / f"{name}.py").write_text(note + more)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "preloaded", [], raising=False)
    yield names
    for name in names:
        sys.modules.pop(name, None)


def test_a_standby_imports_the_class_then_what_a_rank_has_then_asks_the_class(modules: list[str]) -> None:
    ranks = ["json", "preloaded_broken", "no_such_module_anywhere", "preloaded_engine", "preloaded_late"]
    preload(WorkerSpec("preloaded_engine:Worker", {"size": 1}), ranks)
    assert sys.preloaded == ["preloaded_engine", "preloaded_broken", "preloaded_late", "preload"]  # type: ignore[attr-defined]
    assert {"preloaded_engine", "preloaded_late"} <= set(imported())


def test_what_was_not_imported_by_name_is_not_told() -> None:
    assert "json" in imported()
    assert "__main__" not in imported()


def test_an_error_of_the_class_reaches_the_caller_of_the_quiet_way(modules: list[str]) -> None:
    import cloudpickle

    with pytest.raises(RuntimeError, match="not here"):
        preload_quietly(cloudpickle.dumps(WorkerSpec("preloaded_broken:Worker")), ())
