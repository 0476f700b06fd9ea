"""What taking a cluster down removes: what it has made, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient_executor.chaos import netns


def test_a_folder_that_is_not_the_cluster_s_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--prefix work`` had removed ``/tmp/work``, whoever's it was."""
    monkeypatch.setattr(netns, "_ip", lambda *_: "")
    monkeypatch.setattr(netns, "missing", lambda: "")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(netns, "_LONGEST_FOLDER", 1000)
    cluster = netns.NetnsCluster("work")
    for name in ("work", "chaos-work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    cluster.down()
    with pytest.raises(netns.ClusterError, match="somebody else's"):
        cluster.up(2)
    assert (tmp_path / "work" / "precious").exists()
    assert (tmp_path / "chaos-work" / "precious").exists()
    (tmp_path / "chaos-work" / netns._MARK).touch()
    cluster.down()
    assert not (tmp_path / "chaos-work").exists()
