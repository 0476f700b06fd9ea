"""Runs on the cluster's head: an executor with the reference engine, commanded over stdin, answering in JSON lines.

Commands: ``go N SEED`` (serve N tokens a request, say ``mark`` when a few tokens are out, then ``done`` with everything
that happened), ``where``, ``drain NODE_IP``, ``probe`` (which nodes still start a task), ``end``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

import ray

from resilient_executor import ResilientExecutor
from resilient_executor.config import ExecutorConfig
from resilient_executor.journal import RpcPolicy
from resilient_executor.placement import on_node
from resilient_executor.protocol import WorkerSpec
from resilient_executor.reference import ReferenceEngine, SamplingParams

PROMPTS = ["It is a truth universally acknowledged, that", "Anne", "The next morning, before breakfast was over,"]
_MARK = 6
#: DRAIN_NODE_REASON_PREEMPTION of Ray's protocol.
_PREEMPTION = 2


def say(kind: str, **facts: Any) -> None:
    print(json.dumps({"kind": kind, "at": time.time(), **facts}), flush=True)


def params(tokens: int, seed: int) -> list[SamplingParams]:
    warm = SamplingParams(max_tokens=tokens, temperature=0.9, seed=seed, ignore_eos=True)
    return [SamplingParams(max_tokens=tokens, ignore_eos=True), warm, warm]


def serve(executor: ResilientExecutor, engine: ReferenceEngine, tokens: int, seed: int) -> None:
    before = len(executor.incidents)
    ids = [engine.add_request(p, one) for p, one in zip(PROMPTS, params(tokens, seed), strict=True)]
    out: dict[str, list[int]] = {one: [] for one in ids}
    errors: dict[str, str] = {}
    last, gap, marked = time.monotonic(), 0.0, False
    while engine.has_unfinished_requests:
        events = engine.step()
        now = time.monotonic()
        if events:
            if marked:
                gap = max(gap, now - last)
            last = now
        for event in events:
            if event.token_id is not None:
                out[event.request_id].append(event.token_id)
            if event.error is not None:
                errors[event.request_id] = str(event.error)
        if not marked and min(len(t) for t in out.values()) >= _MARK:
            marked = True
            say("mark", nodes=[worker.node_ip for worker in executor.workers])
    incidents = executor.incidents[before:]
    say(
        "done",
        tokens=[out[one] for one in ids],
        errors=errors,
        outage_s=gap,
        epoch=executor.epoch,
        nodes=[worker.node_ip for worker in executor.workers],
        pids=[worker.process.pid for worker in executor.workers],
        state=executor.state.value,
        incidents=[
            {"at": i.detected_at, "line": i.headline(), "kind": i.cause.kind.value if i.cause else "",
             "phases": i.phases, "tried": i.epochs_tried, "text": [e.text for e in i.evidence]}
            for i in incidents
        ],
    )  # fmt: skip


def drain(address: str) -> None:
    [node] = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == address and n["Alive"]]
    client = ray._private.worker.global_worker.gcs_client
    accepted, why = client.drain_node(node, _PREEMPTION, "spot instance goes", int((time.time() + 120) * 1000))
    say("drained", accepted=accepted, why=why)


def probe() -> None:
    """Whether every node's raylet still does anything: those that Ray calls alive, and those that ran a task."""
    task = ray.remote(num_cpus=0)(ray.util.get_node_ip_address)
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    here = [task.options(scheduling_strategy=on_node(node)).remote() for node in alive]
    done, _ = ray.wait(here, num_returns=len(here), timeout=30)
    say("probed", alive=len(alive), nodes=sorted(ray.get(done)))


def main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("resilient_executor.sites").setLevel(logging.INFO)  # why a node was used, or was not
    settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    spec = WorkerSpec("resilient_executor.reference:ReferenceWorker", {"collective_timeout_s": 20.0})
    config = ExecutorConfig(
        worker=spec, address=sys.argv[1], pipeline_parallel_size=2, placement_strategy="SPREAD",
        rpc_policies=dict.fromkeys(("determine_kv_capacity", "initialize_kv_cache"), RpcPolicy.JOURNAL), **settings,
    )  # fmt: skip
    with ResilientExecutor(config) as executor:
        engine = ReferenceEngine(executor)
        executor.add_listener(lambda e: say("waits", text=executor._lifecycle.phase) if e.phase == "waiting" else None)
        say("ready", nodes=[worker.node_ip for worker in executor.workers], pid=os.getpid())
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "end":
                break
            if command == "drain":
                drain(rest[0])
            elif command == "probe":
                probe()
            elif command == "where":
                say("here", nodes=[worker.node_ip for worker in executor.workers])
            else:
                serve(executor, engine, int(rest[0]), int(rest[1]))
    say("ended")


if __name__ == "__main__":
    main()
