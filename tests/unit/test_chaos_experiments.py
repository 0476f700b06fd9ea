"""The ready experiments: what ``chaos validate`` says of each, and that the script makes just these."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from resilient_executor.chaos.faults import PHASES, Fault, Target, Timing

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "chaos" / "experiments").glob("*.json"))


def test_there_are_some() -> None:
    assert len(FILES) >= 14


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_experiment_is_valid(file: Path) -> None:
    experiment = pytest.importorskip("chaoslib.experiment", reason="needs the extra chaos")
    data = json.loads(file.read_text())
    experiment.ensure_experiment_is_valid(data)
    faults = [arguments_of(one) for one in data["method"] if one["provider"]["func"] == "fault"]
    assert faults
    for given in faults:
        target = Target.parse(given.get("target", "any"), count=given.get("count", 1))
        phase = given.get("phase", "")
        assert phase in ("", *PHASES)
        Fault(given["kind"], target, Timing(phase=phase), duration_s=given.get("duration_s", 0.0))


def test_a_fault_that_has_another_name_is_not_valid() -> None:
    """Otherwise the test above would prove nothing."""
    experiment = pytest.importorskip("chaoslib.experiment", reason="needs the extra chaos")
    data = json.loads(FILES[0].read_text())
    data["method"][0]["provider"]["func"] = "default"
    with pytest.raises(Exception, match="default"):
        experiment.ensure_experiment_is_valid(data)


def test_the_files_are_what_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_experiments", ROOT / "scripts" / "make_experiments.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    script.main()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {f.name: f.read_text() for f in FILES}


def arguments_of(activity: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = activity["provider"]["arguments"]
    return arguments
