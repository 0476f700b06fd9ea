"""The innocent are never convicted: long steps, a held lock, a slow load, busy cores, a stopped supervisor (F4, F5).

By default everything is short, and so are the limits. ``SERVE_S=600`` serves for so many seconds with the default
limits, steps of 15 s and a load of 60 s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from resilient_executor import ExecutorConfig, ExecutorState, ResilientExecutor, WorkerSpec
from resilient_executor.reference import ReferenceEngine, SamplingParams
from resilient_executor.reference.bench import JOURNALLED

SERVE_S = float(os.environ.get("SERVE_S", "0"))
LONG = SERVE_S > 0
#: Seconds; each is longer than the limit that would convict it if it were taken for something else.
LOAD_S, STEP_S, PAUSE_S = (60.0, 15.0, 8.0) if LONG else (5.0, 5.0, 8.0)
LIMITS: dict[str, Any] = {} if LONG else {"heartbeat_timeout_s": 3.0, "step_deadline_min_s": 4.0}


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Every core has something else to do, at a higher priority than Ray gives to its workers (15).

    At an ordinary one (0) workers get a thirtieth of a core, and two minutes for their imports.
    """
    busy = "import os; os.nice(10)\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(os.cpu_count() or 1)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


def supervisor_pid(executor: ResilientExecutor) -> int:
    assert executor._supervision is not None
    pid = ray._private.state.actors(executor._supervision.actor_processes()[0]._actor_id.hex())["Pid"]
    assert isinstance(pid, int)
    return pid


def stop_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # it has been replaced meanwhile, which is as good


@pytest.mark.timeout(300 + 2 * SERVE_S)
@pytest.mark.usefixtures("busy_machine")
def test_nothing_happens_while_everything_is_slow(ray_cluster: str) -> None:
    config = ExecutorConfig(
        worker=WorkerSpec("stuck_worker:StuckWorker", {"load_s": LOAD_S}),
        tensor_parallel_size=2,
        rpc_policies=JOURNALLED,
        name="innocent",
        **LIMITS,
    )
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with ResilientExecutor(config) as executor:
        assert executor.start_phases["load"] > LOAD_S
        engine = ReferenceEngine(executor)
        executor.collective_rpc("slow_down", args=(STEP_S, 0.0))  # from the first step on: nothing short is learnt
        expected = engine.generate(["My dear Emma,"], params)[0].token_ids
        began, pauser = time.monotonic(), threading.Thread(target=lambda: None)
        while True:
            for sleep_s, hold_s in ((STEP_S, 0.0), (0.0, STEP_S)):
                executor.collective_rpc("slow_down", args=(sleep_s, hold_s))
                if not pauser.is_alive():
                    pauser = threading.Thread(target=stop_for_a_while, args=(supervisor_pid(executor),))
                    pauser.start()
                assert engine.generate(["My dear Emma,"], params)[0].token_ids == expected
            if time.monotonic() - began >= SERVE_S:
                break
        pauser.join()
        assert (executor.epoch, executor.state, executor.incidents) == (1, ExecutorState.HEALTHY, ())
