from __future__ import annotations

from pathlib import Path

from resilient_executor.vllm.shared_memory import unlink


def test_only_groups_that_the_rank_has_joined_lose_their_names(tmp_path: Path) -> None:
    mine = ["4242-tp:0-[0-1]-cpushm_0", "4242-tp:0-[0-1]-cpushm_1", "4242-pp:0-[1-3]-cpushm_0"]
    others = [
        "4242-tp:0-[2-3]-cpushm_0",
        "4242-tp:0-[10-11]-cpushm_0",
        "4243-tp:0-[0-1]-cpushm_0",
        "sem.obj1-2",
        "4242",
    ]
    for name in mine + others:
        (tmp_path / name).touch()
    assert unlink("4242", 1, tmp_path) == sorted(mine)
    assert unlink("4242", 1, tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == set(others)
    assert unlink("", 1, tmp_path) == []
