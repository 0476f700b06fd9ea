"""The reference engine, serving in a process of its own until its stdin is closed: what an SRE points the kit at.

Prints one line of JSON when it serves (address, pid), and one at the end (what became of the requests).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import ray

from resilient_executor import ExecutorConfig, ResilientExecutor, RpcPolicy, WorkerSpec
from resilient_executor.errors import ExecutorFailed
from resilient_executor.reference import WORKER, ReferenceEngine, SamplingParams

PROMPTS = ("It was a fine evening, and", "The house stood on", "My dear Emma,")


def wait_for_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


def main(name: str, settings: dict[str, Any]) -> None:
    over = threading.Event()
    threading.Thread(target=wait_for_end, args=(over,), daemon=True).start()
    chosen: dict[str, Any] = {"address": "local", "tensor_parallel_size": 1, "pipeline_parallel_size": 2, **settings}
    config = ExecutorConfig(
        worker=WorkerSpec(WORKER, {"collective_timeout_s": 20.0}),
        name=name,
        rpc_policies=dict.fromkeys(("determine_kv_capacity", "initialize_kv_cache"), RpcPolicy.JOURNAL),
        **chosen,
    )
    with ResilientExecutor(config) as executor:
        engine = ReferenceEngine(executor, poison_crashes=0)
        params = [SamplingParams(max_tokens=40, seed=n, temperature=0.9, ignore_eos=True) for n in range(3)]
        want = [one.token_ids for one in engine.generate(PROMPTS, params)]
        served = wrong = 0
        failed = ""
        print(json.dumps({"address": ray.get_runtime_context().gcs_address, "pid": os.getpid()}), flush=True)
        while not over.is_set():
            try:
                answers = engine.generate(PROMPTS, params)
            except ExecutorFailed as error:
                failed = str(error)
                over.wait(60)
                break
            for answer, tokens in zip(answers, want, strict=True):
                served += 1
                if isinstance(answer.error, ExecutorFailed):
                    failed = str(answer.error)
                elif answer.error is not None or answer.token_ids != tokens:
                    wrong += 1
            if failed:
                over.wait(60)
        print(json.dumps({"served": served, "wrong": wrong, "epoch": executor.epoch, "failed": failed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
