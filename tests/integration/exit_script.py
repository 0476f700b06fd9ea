"""A user's script, run by test_process_exit.py in a process of its own; says on standard output how far it has come.

Usage: exit_script.py MODE FOLDER [ADDRESS]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from resilient_executor import ExecutorConfig, ResilientExecutor, StepLost, WorkerSpec

FOLDER = Path(sys.argv[2])


class ScriptWorker:
    """Lives in ``__main__``, as in a short script."""

    def __init__(self, assignment: Any, folder: str, start_s: float) -> None:
        self.rank = assignment.rank
        (Path(folder) / f"constructed.{assignment.epoch}.{self.rank}").touch()
        time.sleep(60.0 if (Path(folder) / "slow").exists() else start_s)

    def init_device(self) -> None:
        pass

    def load_model(self) -> None:
        pass

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        if scheduler_output == "sleep":
            time.sleep(60)
        return scheduler_output

    def sleep(self) -> None:
        time.sleep(600)


def say(word: str) -> None:
    print(word, flush=True)


def start(start_s: float = 0.0) -> ResilientExecutor:
    say("starting")
    executor = ResilientExecutor(
        ExecutorConfig(
            worker=WorkerSpec(ScriptWorker, {"folder": str(FOLDER), "start_s": start_s}),
            tensor_parallel_size=2,
            uses_sampler=False,
            address=sys.argv[3] if len(sys.argv) > 3 else "local",
            name=f"script-{os.getpid()}",
            backoff_initial_s=0.01,
            backoff_max_s=0.01,
            warm_standbys=1 if "standbys" in sys.argv[1] else 0,
        )
    )
    assert executor.execute_model("step") == "step"
    from ray._private.worker import _global_node

    raylets = _global_node.all_processes.get("raylet", [])
    say(f"serving {raylets[0].process.pid if raylets else 0}")
    return executor


def main(mode: str) -> None:
    """Do what ``mode`` says; with " with standbys" behind it, once a standby is ready."""
    if mode == "start":
        start(start_s=60.0)
    executor = start()
    while "standbys" in mode and not executor.standbys["ready"]:
        time.sleep(0.05)
    say("ready")
    mode = mode.removesuffix(" with standbys")
    if mode == "proper":
        executor.shutdown()
    elif mode == "forget":
        executor.execute_model("unread", non_block=True)
    elif mode == "forget in flight":
        executor.execute_model("sleep", non_block=True)
        executor.collective_rpc("sleep", non_block=True)
    elif mode == "error":
        raise RuntimeError("the script's own")
    elif mode == "serve":
        while True:
            executor.execute_model("step")
    elif mode == "rebuild":
        (FOLDER / "slow").touch()
        os.kill(executor.workers[1].process.pid, signal.SIGKILL)
        while True:
            try:
                executor.execute_model("step")
            except StepLost:
                say("rebuilding")


if __name__ == "__main__":
    main(sys.argv[1])
