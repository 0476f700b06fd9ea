"""The chaos kit on the reference engine, four workers: other faults on each run; the seed is printed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from resilient_executor.chaos.faults import MIXTURE
from resilient_executor.chaos.soak import Soak, summary

SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 30)))
FAULTS = int(os.environ.get("FAULTS", "8"))


@pytest.mark.chaos
@pytest.mark.timeout(180 + 20 * FAULTS)
def test_mixed_faults_lose_nothing(tmp_path: Path) -> None:
    print(f"SEED={SEED} FAULTS={FAULTS}")
    history = Path(os.environ.get("HISTORY", tmp_path / "history.jsonl"))
    soak = Soak(engine="reference", seed=SEED, minutes=3.0, faults=FAULTS, history=history, kinds=MIXTURE)
    verdict = soak.run()
    numbers = summary(verdict)
    print(numbers["kinds"])
    assert verdict.problems == [], f"seed {SEED}"
    assert verdict.faults
    assert verdict.survived == len(verdict.faults)
