"""Real vLLM engines and servers on the reference checkpoint. Nothing is mocked; workers are killed for good."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

#: Keeps vLLM on a small machine: no thread binding, nothing from the network, no usage reports.
SMALL = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_DEDUP_LOGS": "0",
}
os.environ.update(SMALL)
# Workers and engines import this folder's modules by name.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own are not ours to forbid
