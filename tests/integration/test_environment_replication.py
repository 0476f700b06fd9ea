"""The driver's environment in workers: the same rule for the first worker and for a replacement (F25)."""

from __future__ import annotations

import os
import signal

import pytest
from probe_executor import ExecutorFactory, await_epoch

from resilient_executor.config import DEFAULT_ENV_EXCLUDE

NAMES = [
    "OTEL_PROBE",
    "PROBE_NAMED",
    "PROBE_EXTRA",
    "PROBE_OTHER",
    "NCCL_PROBE",
    "HF_TOKEN",
    "LOCAL_RANK",
    "CUDA_VISIBLE_DEVICES",
]


def test_workers_and_their_replacements_get_the_same_variables(
    make_executor: ExecutorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_PROBE", "PROBE_NAMED", "PROBE_OTHER", "NCCL_PROBE", "LOCAL_RANK", "HF_TOKEN"):
        monkeypatch.setenv(name, f"driver's {name}")
    monkeypatch.setenv("PROBE_EXTRA", "the driver's, which loses")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    executor = make_executor(
        tensor_parallel_size=2,
        eager_graph=False,
        env_names=("PROBE_NAMED", "PROBE_MISSING", "LOCAL_RANK", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"),
        env_extra={"PROBE_EXTRA": "asked for"},
        env_exclude=(*DEFAULT_ENV_EXCLUDE, "NCCL_PROBE"),
    )
    expected = {
        "OTEL_PROBE": "driver's OTEL_PROBE",
        "PROBE_NAMED": "driver's PROBE_NAMED",
        "PROBE_EXTRA": "asked for",
        "PROBE_OTHER": None,
        "NCCL_PROBE": None,
        "HF_TOKEN": None,
        "LOCAL_RANK": None,
        "CUDA_VISIBLE_DEVICES": None,
    }
    first = executor.collective_rpc("environment", args=(NAMES,))
    assert first == [(expected, expected)] * 2, "the constructor must see them, too"

    monkeypatch.setenv("OTEL_PROBE", "changed since")
    monkeypatch.delenv("PROBE_NAMED")
    monkeypatch.setenv("PROBE_MISSING", "new")
    os.kill(executor.workers[1].process.pid, signal.SIGKILL)
    await_epoch(executor, 2)
    assert executor.collective_rpc("environment", args=(NAMES,)) == first
    assert executor.collective_rpc("environment", args=(["PROBE_MISSING"],)) == [({"PROBE_MISSING": None},) * 2] * 2
