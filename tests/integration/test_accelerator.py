"""Between stages on one node whose tensors an accelerator's library carries: nobody oversleeps what comes with them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_a_reader_of_an_accelerator_s_channel_is_woken(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "cluster" / "accelerator.py"
    command = [sys.executable, str(script), "local", str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    slowest = re.search(r"slowest ([0-9.]+)", done.stdout)
    assert slowest is not None
    assert float(slowest[1]) < 0.3, "a reader that nothing wakes looks after half a second"
