"""Take the picture of the endpoint's page in docs/img: a real executor, a real death, a real browser.

Usage: .venv/bin/python scripts/make_endpoint_picture.py [CHROMIUM]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import ray

from resilient_executor import ExecutorConfig, ExecutorState, ResilientExecutor, WorkerSpec
from resilient_executor.reference import WORKER, ReferenceEngine, SamplingParams
from resilient_executor.reference.bench import JOURNALLED

PICTURE = Path(__file__).parents[1] / "docs" / "img" / "endpoint.png"


def serve(engine: ReferenceEngine, stopping: threading.Event) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    while not stopping.is_set():
        engine.generate(["My dear Emma,", "It was a fine evening, and"], params)


def cost_of_supervision(executor: ResilientExecutor, seconds: float) -> str:
    """Processor time of the supervisor and the agent while nothing is served."""
    assert executor._supervision is not None
    handles = executor._supervision.actor_processes()
    pids = [ray._private.state.actors(handle._actor_id.hex())["Pid"] for handle in handles]
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    time.sleep(seconds)
    used = [sum(psutil.Process(pid).cpu_times()[:2]) - b for pid, b in zip(pids, before, strict=True)]
    return ", ".join(f"{100 * u / seconds:.2f} %" for u in used)


def main(chromium: str) -> None:
    config = ExecutorConfig(
        worker=WorkerSpec(WORKER),
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        rpc_policies=JOURNALLED,
        address="local",
        name="demo",
        status_port=0,
    )
    with ResilientExecutor(config) as executor:
        stopping = threading.Event()
        thread = threading.Thread(target=serve, args=(ReferenceEngine(executor), stopping), daemon=True)
        thread.start()
        time.sleep(5.0)
        os.kill(executor.workers[2].process.pid, signal.SIGKILL)
        while executor.epoch < 2 or executor.state is not ExecutorState.HEALTHY:
            time.sleep(0.1)
        time.sleep(5.0)
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    f"--user-data-dir={profile}", "--window-size=1200,560", "--virtual-time-budget=4000",
                    f"--screenshot={PICTURE}", f"{executor.status_url}/",
                ],
                check=True, timeout=120, capture_output=True,
            )  # fmt: skip
        stopping.set()
        thread.join(60)
        print(PICTURE, "- supervisor, agent at rest:", cost_of_supervision(executor, 20.0))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "chromium")
