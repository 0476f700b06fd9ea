"""Nodes that cannot be told apart by their address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_two_nodes_with_one_address_are_refused() -> None:
    """Each node needs an address of its own; ``ray.cluster_utils`` gives all of its nodes the same one."""
    script = Path(__file__).with_name("topology_script.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    raised, left = done.stdout.splitlines()
    assert re.match(r"raised after \d+\.\d s: every node needs exactly one address of its own", raised)
    assert "ray start --node-ip-address" in raised
    assert left == "left: {}"
