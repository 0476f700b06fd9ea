from __future__ import annotations

from pathlib import Path

import pytest

from resilient_executor.vllm.checkpoint import CheckpointChanged, check, files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("nobody loads this")
    return tmp_path


def test_the_same_files_are_the_same(folder: Path) -> None:
    before = files(str(folder))
    assert set(before) == {"model.safetensors", "config.json"}
    (folder / "README.md").write_text("changed")
    check({"node": before}, "node", files(str(folder)))


def test_other_weights_of_the_same_size_are_noticed(folder: Path) -> None:
    before = files(str(folder))
    (folder / "model.safetensors").write_bytes(b"87654321")
    with pytest.raises(CheckpointChanged, match=r"model\.safetensors"):
        check({"node": before}, "node", files(str(folder)))


def test_a_new_node_has_its_own_times(folder: Path) -> None:
    before = {name: (size, 1) for name, (size, _) in files(str(folder)).items()}
    check({"node": before}, "another", files(str(folder)))
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointChanged):
        check({"node": before}, "another", files(str(folder)))


def test_a_missing_file_is_noticed(folder: Path) -> None:
    before = files(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointChanged, match=r"config\.json"):
        check({"node": before}, "node", files(str(folder)))


def test_a_hubs_name_is_no_folder() -> None:
    assert files("somebody/some-model") == {}
    check({"node": {}}, "node", {})
