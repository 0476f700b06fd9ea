"""What cannot work is refused before anything is started, by a typed error that names the setting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from probe_executor import probe_config
from probe_worker import ProbeWorker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from resilient_executor import ConfigError, ExecutorConfig, PlacementError, ResilientExecutor, StartupError, WorkerSpec
from resilient_executor.chaos.soak import Soak
from resilient_executor.chaos.targets import ChaosError

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture
def bundles(ray_cluster: str) -> Iterator[PlacementGroup]:
    group = placement_group([{"CPU": 1}, {"GPU": 1}, {"CPU": 1}])
    assert group.wait(20)
    yield group
    remove_placement_group(group)


def refused(error: type[Exception], words: str, **settings: Any) -> None:
    """Construction fails with ``error``, whose message holds all of ``words``."""
    with pytest.raises(error) as raised:
        ResilientExecutor(probe_config(**settings))
    missing = [word for word in words.split() if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transport": "carrier-pigeon"}, "transport 'carrier-pigeon' 'nccl' 'shm'"),
        ({"transport": "nccl", "pipeline_parallel_size": 2}, "transport 'nccl' device_key 'CPU' 'shm'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size at least 1"),
        ({"pipeline_parallel_size": -1}, "pipeline_parallel_size at least 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size whole number"),
        ({"bundle_indices": (0, 0), "tensor_parallel_size": 2}, "bundle_indices twice"),
        ({"bundle_indices": (0,), "tensor_parallel_size": 2}, "bundle_indices tensor_parallel_size 2"),
        ({"bundle_indices": (0, 2), "tensor_parallel_size": 2}, "bundle_indices 2 bundles"),
        ({"bundle_indices": (-1,)}, "bundle_indices whole numbers"),
        ({"devices_per_worker": 1.5}, "devices_per_worker whole"),
        ({"devices_per_worker": 0}, "devices_per_worker positive"),
        ({"device_key": ""}, "device_key"),
        ({"placement_strategy": "PILE"}, "placement_strategy 'PILE' 'SPREAD'"),
        ({"heartbeat_timeout_s": 1.0, "heartbeat_interval_s": 0.5}, "heartbeat_timeout_s heartbeat_interval_s"),
        ({"backoff_initial_s": 2.0, "backoff_max_s": 1.0}, "backoff_max_s backoff_initial_s"),
        ({"max_restarts": -1}, "max_restarts at least 0"),
        ({"max_inflight_steps": 0}, "max_inflight_steps at least 1"),
        ({"max_inflight_steps": 101}, "max_inflight_steps at most 100"),
        ({"name": "two words"}, "name letters"),
        ({"ray_remote_args": {"num_cpus": 3}}, "ray_remote_args num_cpus"),
        ({"env_extra": {"A": 1}}, "env_extra 'A'"),
        ({"env_extra": {"A=B": "1"}}, "env_extra 'A=B'"),
        ({"env_prefixes": ("",)}, "env_prefixes empty"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_out_of_range(settings: dict[str, Any], words: str) -> None:
    refused(ConfigError, words, **settings)


@pytest.mark.parametrize("name", sorted(f for f in ExecutorConfig.__dataclass_fields__ if f.endswith("_s")), ids=str)
@pytest.mark.parametrize("value", [-1, 0, float("inf"), float("nan"), "5", None])
def test_a_time_that_is_none(name: str, value: Any) -> None:
    refused(ConfigError, f"{name} positive", **{name: value})


class TestThisCluster:
    def test_too_small(self) -> None:
        refused(
            PlacementError,
            "1000 CPU 32 tensor_parallel_size pipeline_parallel_size",
            tensor_parallel_size=10,
            pipeline_parallel_size=100,
        )
        refused(
            PlacementError,
            "26 GPU 12 devices_per_worker",
            tensor_parallel_size=13,
            device_key="GPU",
            devices_per_worker=2,
        )

    def test_without_the_device(self) -> None:
        refused(PlacementError, "1 QPU 0 device_key", device_key="QPU")

    def test_an_accelerator_that_ray_only_pretends_has_no_nccl(self) -> None:
        """Nobody can know before it is tried; then the first cause is named, in one line."""
        with pytest.raises(StartupError, match="nccl") as raised:
            ResilientExecutor(
                probe_config(device_key="GPU", transport="nccl", pipeline_parallel_size=2, start_attempts=1)
            )
        assert "\n" not in str(raised.value)

    def test_a_placement_group_without_room(self, bundles: PlacementGroup) -> None:
        refused(ConfigError, "placement group 2 bundles 3 CPU", placement_group=bundles, tensor_parallel_size=3)
        refused(ConfigError, "bundles [1] CPU [0, 2]", placement_group=bundles, bundle_indices=(1,))
        refused(ConfigError, "bundle_indices bundle 3", placement_group=bundles, bundle_indices=(3,))

    def test_a_placement_group_that_was_removed(self, bundles: PlacementGroup) -> None:
        remove_placement_group(bundles)
        refused(ConfigError, "placement group removed", placement_group=bundles)


class TestEnvironment:
    SPEC = WorkerSpec(ProbeWorker)

    def test_an_unknown_variable(self) -> None:
        with pytest.raises(ConfigError, match="RESILIENT_EXECUTOR_HARTBEAT_INTERVAL_S is not a setting"):
            ExecutorConfig.from_env(self.SPEC, {"RESILIENT_EXECUTOR_HARTBEAT_INTERVAL_S": "1"})

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("TENSOR_PARALLEL_SIZE", "two"),
            ("STEP_TIMEOUT_S", "5s"),
            ("USES_SAMPLER", "perhaps"),
            ("BUNDLE_INDICES", "0;1"),
            ("TRANSPORT", "pigeon"),
            ("START_TIMEOUT_S", "-5"),
            ("MAX_INFLIGHT_STEPS", "2.5"),
        ],
    )
    def test_a_value_that_cannot_be_read(self, name: str, text: str) -> None:
        with pytest.raises(ConfigError, match=re.compile(name, re.IGNORECASE)):
            ExecutorConfig.from_env(self.SPEC, {f"RESILIENT_EXECUTOR_{name}": text})

    def test_what_can_be_read(self) -> None:
        config = ExecutorConfig.from_env(
            self.SPEC,
            {
                "RESILIENT_EXECUTOR_TENSOR_PARALLEL_SIZE": "2",
                "RESILIENT_EXECUTOR_BUNDLE_INDICES": "3, 1",
                "RESILIENT_EXECUTOR_USES_SAMPLER": "no",
                "RESILIENT_EXECUTOR_STEP_TIMEOUT_S": "2.5",
                "RESILIENT_EXECUTOR_NAME": "from-env",
                "HOME": "/",
            },
            name="from-argument",
            bundle_indices=(1, 0),
        )
        assert (config.tensor_parallel_size, config.uses_sampler, config.step_timeout_s) == (2, False, 2.5)
        assert (config.name, config.bundle_indices) == ("from-argument", (1, 0))


class TestOtherProcesses:
    """What concerns the process as a whole is tried in one of its own."""

    @staticmethod
    def run(code: str, environ: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def test_an_address_where_nobody_answers(self) -> None:
        code = (
            "import time, resilient_executor as r\n"
            "class W: pass\n"
            "began = time.monotonic()\n"
            "try:\n"
            "    r.ResilientExecutor(r.ExecutorConfig(worker=r.WorkerSpec(W), address='127.0.0.1:9'))\n"
            "except r.PlacementError as error:\n"
            "    print(error)\n"
            "    print('took', time.monotonic() - began)\n"
        )
        done = self.run(code, {}, timeout_s=60)
        assert done.returncode == 0, done.stderr
        assert "no Ray cluster answers at '127.0.0.1:9'" in done.stdout
        assert float(done.stdout.split("took")[1]) < 45

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("__version__ = '2.9.3'", "Ray 2.9.3 is too old"),
            ("__version__ = '99.0.0'", "has no compiled graphs"),
            (None, "Ray is not installed"),
        ],
        ids=["old", "without compiled graphs", "missing"],
    )
    def test_a_ray_that_will_not_do(self, tmp_path: Path, source: str | None, words: str) -> None:
        """Told with the command that repairs it, at the first use and not by a broken import somewhere inside."""
        if source is None:
            blocker = "import sys\nsys.modules['ray'] = None\n"
        else:
            blocker = ""
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray" / "__init__.py").write_text(source)
        code = (
            f"{blocker}import resilient_executor\n"
            "from resilient_executor import ConfigError, ExecutorConfig, WorkerSpec, DependencyError\n"
            "try:\n"
            "    resilient_executor.ResilientExecutor(ExecutorConfig(worker=WorkerSpec('module:Class')))\n"
            "except DependencyError as error:\n"
            "    print(error)\n"
        )
        done = self.run(code, {"PYTHONPATH": str(tmp_path)}, timeout_s=30)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert "pip install 'ray[cgraph]>=" in done.stdout


def test_another_address_than_the_one_this_process_is_connected_to(ray_cluster: str) -> None:
    """It would be served by a cluster that it did not ask for."""
    refused(ConfigError, "address 127.0.0.1:9", address="127.0.0.1:9")
    assert ray.is_initialized()


def test_a_soak_needs_a_process_without_ray(ray_cluster: str, tmp_path: Path) -> None:
    """It judges what its whole process leaves; in another's cluster it found nobody to strike, for three minutes."""
    with pytest.raises(ChaosError, match=r"ray\.shutdown"):
        Soak(engine="reference", seed=1, minutes=0.1, faults=1, history=tmp_path / "history.jsonl")
