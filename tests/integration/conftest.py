"""One embedded Ray for all tests of this folder, with fake devices; executors that are shut down, and leave nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest
import ray
from probe_executor import ExecutorFactory

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[str]:
    """The address of an embedded Ray of this process, with fake accelerators, that executors join."""
    with pytest.MonkeyPatch.context() as patch:
        # Workers import probe_worker by name; Ray hands them only the driver's script folder and working directory.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")])))
        context = ray.init(
            address="local",
            num_cpus=32,
            num_gpus=12,
            resources={"NPU": 4, "XPU": 4},
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=512 << 20,
            namespace="integration",
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture
def leak_check(ray_cluster: str) -> Iterator[None]:
    """The test leaves what it found. Not for a module whose executors are rebuilt from one test to the next."""
    with leaks.nothing_left():
        yield


@pytest.fixture
def make_executor(leak_check: None) -> Iterator[ExecutorFactory]:
    """A factory of executors that are gone after the test."""
    factory = ExecutorFactory()
    yield factory
    factory.shut_down()
