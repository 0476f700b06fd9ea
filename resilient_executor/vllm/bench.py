"""Measures this executor against vLLM's own, and what a kill costs: ``make bench-vllm``.

Throughput is measured in turns: see :mod:`resilient_executor.vllm.bench_throughput`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from resilient_executor.vllm.bench_throughput import Contestant, compare, serve

_MACHINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_MARK: Final = "RESULT "
_MODULE: Final = "resilient_executor.vllm.bench"
_REQUESTS: Final = 16
_TOKENS: Final = 96
#: Topology -> its engines whose outages are measured, in this order.
_OUTAGES: Final = {"tp2": ("cold", "warm", "warm", "cold"), "pp2": ("cold",)}
_CHECKPOINT: Final = str(Path(__file__).parents[1] / "reference" / "checkpoint")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--pairs", type=int, default=20, help="measurements of each engine for each topology")
    parser.add_argument("--kills", type=int, default=3, help="deaths for the outage, in each engine that is measured")
    parser.add_argument("--topologies", default="tp1,tp2,pp2")
    parser.add_argument("--only", choices=("throughput", "outages"), help="one part only")
    parser.add_argument("--child", choices=("throughput", "outage"), help=argparse.SUPPRESS)
    parser.add_argument("--executor", default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--topology", default="tp1", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "throughput":
        llm = _engine(options.executor, options.topology)
        serve(lambda tokens: _generate(llm, tokens), _REQUESTS, _TOKENS)
    elif options.child == "outage":
        _report(_outage(options.topology, options.kills, options.warm))
    else:
        results = _measure(options)
        text = json.dumps(results, indent=2)
        print(text)
        if options.json is not None:
            options.json.write_text(text + "\n")


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"unit": "tokens/s, s", "requests": _REQUESTS, "tokens_per_request": _TOKENS}
    topologies = options.topologies.split(",")
    for topology in topologies if options.only != "outages" else ():
        compared = _measure_throughput(topology, options.pairs)
        print(f"{topology}: {compared}", file=sys.stderr, flush=True)
        results |= compared
    for topology, kinds in _OUTAGES.items():
        if topology in topologies and options.only != "throughput":
            results |= _measure_outages(topology, kinds, options.kills)
    return results


def _measure_throughput(topology: str, pairs: int) -> dict[str, Any]:
    """Both executors, in turns."""
    env = {**os.environ, **_MACHINE}
    contestants = {}
    try:
        for executor in ("stock", "ours"):
            command = _command("throughput", executor, topology)
            contestants[executor] = Contestant(command, env, spins=executor == "stock")
        return compare(contestants["stock"], contestants["ours"], pairs, topology)
    finally:
        for contestant in contestants.values():
            contestant.close()


def _measure_outages(topology: str, kinds: Sequence[str], kills: int) -> dict[str, Any]:
    """Outages of one topology, cold and warm in turns."""
    found: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, Any] = {}
    for kind in kinds:
        more = ("--warm",) if kind == "warm" else ()
        measured, error = _child("outage", "ours", topology, f"--kills={kills}", *more)
        print(f"{topology} outages, {kind}: {measured} {error}", file=sys.stderr, flush=True)
        if error:
            results[f"outage_error_{topology}_{kind}"] = error
        found.setdefault(kind, []).extend(measured or [])
    for kind, outages in found.items():
        if outages:
            results[f"outage_{topology}_{kind}"] = _summary(outages)
    if all(found.get(kind) for kind in ("cold", "warm")):
        cold, warm = (results[f"outage_{topology}_{kind}"] for kind in ("cold", "warm"))
        results |= {
            "outage_p50_s": cold["outage_p50_s"],
            "outage_machinery_p50_s": cold["machinery_p50_s"],
            "outage_warm_p50_s": warm["outage_p50_s"],
            "outage_warm_over_cold": round(warm["outage_p50_s"] / cold["outage_p50_s"], 3),
            "requests_longer_by_p50_s": cold["requests_longer_by_p50_s"],
            "requests_longer_by_warm_p50_s": warm["requests_longer_by_p50_s"],
        }
    return results


def _summary(outages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of what :func:`_outage` has measured."""
    summary: dict[str, Any] = {
        f"{name}_p50_s": round(statistics.median(one[name] for one in outages), 2)
        for name in ("outage", "machinery", "import_vllm", "requests_longer_by")
    }
    names = list(dict.fromkeys(name for one in outages for name in one["phases"]))
    return {
        "kills": len(outages),
        "outage_max_s": round(max(one["outage"] for one in outages), 2),
        **summary,
        "phases_p50_s": {
            name: round(statistics.median(one["phases"].get(name, 0.0) for one in outages), 3) for name in names
        },
    }


def _command(kind: str, executor: str, topology: str, *more: str) -> list[str]:
    return [sys.executable, "-m", _MODULE, "--child", kind, "--executor", executor, "--topology", topology, *more]


def _child(kind: str, executor: str, topology: str, *more: str) -> tuple[Any, str]:
    """Run one engine in a process of its own; returns its result, or why there is none."""
    command = _command(kind, executor, topology, *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **_MACHINE})
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK)), ""
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return None, (errors or ["no result"])[-1][:200]


def _report(result: Any) -> None:
    print(_MARK + json.dumps(result), flush=True)


def _engine(executor: str, topology: str, **settings: Any) -> Any:
    from vllm import LLM

    kind, size = topology[:2], int(topology[2:])
    arguments: dict[str, Any] = {
        "model": _CHECKPOINT,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 27,
        "max_model_len": 512,
        "max_num_seqs": _REQUESTS,
        "tensor_parallel_size" if kind == "tp" else "pipeline_parallel_size": size,
    }
    if executor == "ours":
        arguments["distributed_executor_backend"] = "resilient_executor.vllm.ResilientVllmExecutor"
        arguments["additional_config"] = {
            "resilient_executor": {"address": "local", "max_restarts": 1000, "backoff_initial_s": 0.01, **settings}
        }
    else:
        arguments["distributed_executor_backend"] = "mp"
    return LLM(**arguments)


def _generate(llm: Any, tokens: int = _TOKENS) -> float:
    from vllm import SamplingParams

    prompts = [f"It was a fine evening, and number {number}" for number in range(_REQUESTS)]
    began = time.monotonic()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.monotonic() - began


def _outage(topology: str, kills: int, warm: bool) -> list[dict[str, Any]]:
    """Kill a worker in the middle of a generation, again and again; from the death to the next service, by phase."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = _engine("ours", topology, warm_standbys="every_rank" if warm else 0)
    core = llm.llm_engine.engine_core.engine_core.model_executor.core
    _generate(llm)
    undisturbed = min(_generate(llm) for _ in range(2))
    found = []
    for kill in range(kills):
        while warm and core.standbys != {"ready": len(core.workers), "preparing": 0}:
            time.sleep(0.1)
        victim = core.workers[kill % len(core.workers)].process.pid

        def strike(*_: Any, pid: int = victim) -> None:
            os.kill(pid, signal.SIGKILL)

        signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, undisturbed / 2)
        longer = _generate(llm) - undisturbed
        incident = core.incidents[-1]
        # A standby has imported vLLM before.
        imports = 0.0 if warm else max(core.collective_rpc("get_import_seconds"))
        found.append(
            {
                "outage": incident.duration_s,
                "import_vllm": imports,
                "machinery": (incident.duration_s or 0.0) - imports - incident.phases["load"],
                "requests_longer_by": longer,
                "standbys": incident.standbys,
                "phases": incident.phases,
            }
        )
    core.shutdown()
    return found


if __name__ == "__main__":
    main()
