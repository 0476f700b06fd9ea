"""Nodes where workers die again and again are avoided, as long as there is room elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_third_generation_goes_elsewhere_and_the_line_says_why() -> None:
    """Two nodes, and two deaths make one bad. When both are, there is no room elsewhere, and service goes on."""
    script = Path(__file__).with_name("avoidance_script.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"epoch (\d): node (\w+) with (\d) deaths", done.stdout)
    assert [int(epoch) for epoch, _, _ in rows] == [1, 2, 3, 4, 5]
    deaths = {node: 0 for _, node, _ in rows}
    for epoch, node, _ in rows:
        bad = {name for name, count in deaths.items() if count >= 2}
        assert node not in bad or len(bad) == 2, f"epoch {epoch} runs on a bad node"
        deaths[node] += 1
    assert len(deaths) == 2, "it never moved"
    assert re.search(
        r"rank 0 has died 2 times on node \S+ within 600 s; node \S+ has seen 2 deaths and is avoided", done.stderr
    )
