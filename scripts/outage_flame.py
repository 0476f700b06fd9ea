"""A flame graph of one death and rebuild: driver, supervisor, agent, and the workers that are made.

py-spy (``pip install py-spy``) samples this process and all below it while a worker is killed and the engine serves on.

    python scripts/outage_flame.py build/outage-cold.svg
    python scripts/outage_flame.py --standbys build/outage-warm.svg
    .venv-vllm/bin/python scripts/outage_flame.py --engine vllm build/outage-vllm.svg
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resilient_executor import ResilientExecutor, WorkerSpec
from resilient_executor.reference.bench_outage import _await_standbys

#: For py-spy to attach and to write, in seconds.
_ATTACH_S, _WRITE_S = 3.0, 60.0
_RATE = 200


@contextmanager
def reference(standbys: bool) -> Iterator[tuple[ResilientExecutor, Callable[[], object]]]:
    """The reference engine, PP=2 x TP=2, and a way to have it generate for a while."""
    from resilient_executor.reference import WORKER
    from resilient_executor.reference.bench import config_for
    from resilient_executor.reference.engine import ReferenceEngine
    from resilient_executor.reference.request import SamplingParams

    with ResilientExecutor(config_for(WorkerSpec(WORKER), warm_standbys="every_rank" if standbys else 0)) as executor:
        engine = ReferenceEngine(executor)

        def generate() -> None:
            engine.add_request("It was a fine evening, and", SamplingParams(max_tokens=150, ignore_eos=True))
            for _ in engine.stream():
                pass

        yield executor, generate


@contextmanager
def vllm(standbys: bool) -> Iterator[tuple[ResilientExecutor, Callable[[], object]]]:
    """vLLM, TP=2."""
    from resilient_executor.vllm import bench

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **bench._MACHINE}
    llm: Any = bench._engine("ours", "tp2", warm_standbys="every_rank" if standbys else 0)
    core = llm.llm_engine.engine_core.engine_core.model_executor.core
    try:
        yield core, lambda: bench._generate(llm)
    finally:
        core.shutdown()


def main() -> None:
    """Serve, sample, kill, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="the picture to write")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--standbys", action="store_true", help="with a warm standby for each rank")
    options = parser.parse_args()
    if (spy := shutil.which("py-spy", path=f"{os.environ.get('PATH', '')}:{Path(sys.executable).parent}")) is None:
        parser.error("py-spy is not there: pip install py-spy, or put it on PATH")
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    with {"reference": reference, "vllm": vllm}[options.engine](options.standbys) as (executor, generate):
        generate()
        if options.standbys:
            _await_standbys(executor, len(executor.workers))
        command = [spy, "record", "--pid", str(os.getpid()), "--subprocesses", "--nonblocking", "--rate", str(_RATE)]
        recorder = subprocess.Popen([*command, "--output", str(options.svg)], stdout=subprocess.DEVNULL)
        try:
            time.sleep(_ATTACH_S)
            victim = executor.workers[-1].process.pid
            threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
            generate()
        finally:
            recorder.send_signal(signal.SIGINT)
            recorder.wait(_WRITE_S)
        incident = executor.incidents[-1]
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in incident.phases.items())
        print(f"{incident.headline()}\nphases, s: {phases}\nwritten to {options.svg}")


if __name__ == "__main__":
    main()
