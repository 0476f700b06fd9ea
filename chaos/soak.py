"""Soak: an engine serves while faults of all kinds hit it, for minutes; then the history is judged.

python -m resilient_executor.chaos.soak --minutes 10 --seed 7
"""

from __future__ import annotations

import _thread
import argparse
import faulthandler
import json
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray

from resilient_executor import Event, ExecutorState
from resilient_executor.chaos import arenas, holdings
from resilient_executor.chaos.checker import Verdict, check
from resilient_executor.chaos.control import Controller, Strike
from resilient_executor.chaos.faults import MIXTURE, Fault, Kind, Target, Timing, draw
from resilient_executor.chaos.recorder import Recorder, read
from resilient_executor.chaos.targets import ChaosError, Member, Roster, look

logger = logging.getLogger(__name__)

#: Requests that are served at the same time.
_LIVE: Final = 6
#: Most that one fault may keep the engine from serving before the soak gives it up, in seconds.
_OUTAGE_S: Final = 180.0
#: Between two health checks, and for one of them.
_HEALTH_S: Final = 0.7
_HEALTH_LIMIT_S: Final = 3.0


class Hunter(threading.Thread):
    """Strikes, one fault after the other, each when the engine has been serving again for a moment."""

    def __init__(
        self, arena: arenas.Arena, recorder: Recorder, rng: random.Random, faults: int, kinds: Mapping[Kind, int]
    ) -> None:
        super().__init__(name="chaos-hunter", daemon=True)
        self._arena, self._recorder, self._rng = arena, recorder, rng
        self._faults, self._kinds = faults, kinds
        self.stopping = threading.Event()
        self.trouble = ""
        self.done: list[Strike] = []
        self.tokens = 0  #: tokens that reached the client; written by the serving thread
        self._phase = ""
        self._changed = threading.Condition()
        arena.executor.add_listener(self._on_event)
        name = arena.executor._config.name
        self._control = Controller(lambda: look(name))
        self._local = Controller(self._own_roster)

    def run(self) -> None:
        """Strike until there were enough faults, or somebody stops it."""
        try:
            while len(self.done) < self._faults and not self.stopping.is_set():
                self._one(draw(self._rng, self._kinds))
        except Exception as error:
            logger.exception("the hunter failed")
            self.trouble = f"the hunter failed: {type(error).__name__}: {error}"
        finally:
            self._control.close()
            self._local.close()

    def _one(self, fault: Fault) -> None:
        if not self._await_service():
            return
        if self.stopping.wait(self._rng.uniform(0.0, 0.6)):
            return
        if fault.timing.phase:
            provoking = replace(fault, target=Target(), timing=Timing())
            self._strike(self._control, provoking)
            with self._changed:
                if not self._changed.wait_for(lambda: self._phase == fault.timing.phase, timeout=30.0):
                    return
        strike = self._strike(self._local if fault.timing.phase else self._control, fault)
        if strike is None:
            return
        self._await_effect(strike)

    def _strike(self, control: Controller, fault: Fault) -> Strike | None:
        try:
            strike = control.strike(fault, len(self.done), give_up=self.stopping.is_set)
        except ChaosError as error:
            logger.warning("%s was not done: %s", fault.describe(), error)
            return None
        if strike is not None:
            self.done.append(strike)
            self._recorder.on_strike(strike)
        return strike

    def _await_effect(self, strike: Strike) -> None:
        """Until its incident is there, where it must have one; else for as long as it lasts."""
        fault, executor = strike.fault, self._arena.executor
        if fault.kind is Kind.RAISE_IN_RPC:
            self._call()
        if fault.felt:
            deadline = time.monotonic() + fault.traits.detect_s
            while time.monotonic() < deadline and not self.stopping.wait(0.02):
                if any(incident.detected_at >= strike.at - 0.5 for incident in executor.incidents):
                    return
        else:
            self.stopping.wait(min(fault.duration_s, 10.0) + 0.5)

    def _call(self) -> None:
        """Two collective RPCs: the first one meets the fault, the second one must not."""
        for _ in range(2):
            error = ""
            try:
                self._arena.executor.collective_rpc(self._arena.harmless, timeout=20.0)
            except Exception as raised:  # noqa: BLE001 - that it fails is the point; how, is recorded
                error = f"{type(raised).__name__}: {raised}"[:200]
            self._recorder.note("rpc", error=error)

    def _await_service(self) -> bool:
        """Wait until the engine serves and tokens come."""
        deadline, came = time.monotonic() + _OUTAGE_S, self.tokens
        while not self.stopping.wait(0.02):
            healthy = self._arena.executor.state is ExecutorState.HEALTHY
            if not healthy:
                came = self.tokens
            elif self.tokens >= came + 5:
                return True
            if time.monotonic() > deadline or self._arena.executor.state is ExecutorState.FAILED:
                self.trouble = f"not serving again after {_OUTAGE_S:g} s; state {self._arena.executor.state.value}"
                faulthandler.dump_traceback()
                _thread.interrupt_main()  # it may be stuck in a step
                return False
        return False

    def _on_event(self, event: Event) -> None:
        if event.kind in ("phase_begun", "phase"):
            with self._changed:
                self._phase = event.phase if event.kind == "phase_begun" else ""
                self._changed.notify_all()

    def _own_roster(self) -> Roster:
        """As this process knows it: in a rebuild that is more than the supervisor does."""
        executor = self._arena.executor
        tp = executor._config.tensor_parallel_size
        infos = executor.workers
        members = tuple(Member(rank, rank // tp, info.process, info.node_ip) for rank, info in enumerate(infos))
        state = executor.state.value
        return Roster(executor._config.name, "", executor.epoch, state, self._phase, members)


class Pulse(threading.Thread):
    """Asks for health again and again, and notes the answers."""

    def __init__(self, arena: arenas.Arena, recorder: Recorder) -> None:
        super().__init__(name="chaos-health", daemon=True)
        self._arena, self._recorder = arena, recorder
        self.stopping = threading.Event()

    def run(self) -> None:
        """Until it is stopped."""
        while not self.stopping.wait(_HEALTH_S):
            began, why = time.time(), ""
            try:
                self._arena.executor.check_health(_HEALTH_LIMIT_S)
            except Exception as error:  # noqa: BLE001 - the answer is the point
                why = f"{type(error).__name__}: {error}"[:200]
            if not self.stopping.is_set():
                self._recorder.note("health", began=began, ok=not why, why=why)


class Soak:
    """One run. ``run`` serves in the calling thread until the faults are done, the time is over, or Ctrl-C.

    Raises:
        ChaosError: this process is connected to Ray already: its semaphores, ports and processes are another's.
    """

    def __init__(
        self,
        *,
        engine: str,
        seed: int,
        minutes: float,
        faults: int,
        history: Path,
        kinds: Mapping[Kind, int] = MIXTURE,
        command: str = "",
    ) -> None:
        if ray.is_initialized():
            raise ChaosError("a soak starts its own Ray; this process is connected to one: call ray.shutdown() first")
        self._engine, self._seed, self._minutes, self._faults = engine, seed, minutes, faults
        self._kinds = kinds
        self._recorder = Recorder(history)
        self._recorder.note("run", seed=seed, engine=engine, command=command, minutes=minutes, faults=faults)
        self._rng = random.Random(seed)
        self._hunter: Hunter | None = None
        self._requests = 0
        self.interrupted = False

    def run(self) -> Verdict:
        """Serve, strike, shut down, judge."""
        note, began_ns = self._recorder.note, time.time_ns()
        note("holdings", when="before", things=holdings.things(), rss_mb=holdings.rss_mb(), epoch=0)
        arena = arenas.make(self._engine)
        try:
            self._remember_raylet(began_ns)
            oracle = self._oracle(arena)
            note("state", state=arena.executor.state.value, epoch=arena.executor.epoch, phase="")
            arena.executor.add_listener(self._recorder.on_event)
            self._disturb(arena, oracle)
        finally:
            arena.close()
        deadline = time.monotonic() + 10.0
        before = {kind: set(names) for kind, names in read(self._recorder.path)[1]["things"].items()}
        while any(set(names) - before[kind] for kind, names in holdings.things().items()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        left = holdings.things()
        left["shared memory"] = [holdings.told_in_full(name) for name in left["shared memory"]]
        note("holdings", when="after", things=left, rss_mb=holdings.rss_mb(), epoch=arena.executor.epoch)
        self._recorder.close()
        verdict = check(read(self._recorder.path))
        if self._hunter is not None and self._hunter.trouble:
            verdict.problems.insert(0, self._hunter.trouble)
        return verdict

    def _remember_raylet(self, since_ns: int) -> None:
        from ray._private import worker

        node = worker._global_node
        for raylet in node.all_processes.get("raylet", []) if node is not None else []:
            holdings.remember_raylet(raylet.process.pid, since_ns)

    def _oracle(self, arena: arenas.Arena) -> dict[int, list[int]]:
        """What an undisturbed run gives: each workload twice, in two different mixtures, and both must be equal."""
        found: dict[int, list[int]] = {}
        for turn, order in enumerate((arenas.WORKLOADS, arenas.WORKLOADS[::-1])):
            tokens: dict[str, list[int]] = {}
            waiting, live = list(order), 0
            while waiting or live:
                while waiting and live < _LIVE:
                    workload = waiting.pop(0)
                    arena.add(f"oracle-{turn}-{workload}", workload)
                    tokens[f"oracle-{turn}-{workload}"] = []
                    live += 1
                for out in arena.step():
                    if out.token is not None:
                        tokens[out.request_id].append(out.token)
                    live -= bool(out.finish)
            for workload in order:
                answer = tokens[f"oracle-{turn}-{workload}"]
                if found.setdefault(workload, answer) != answer:
                    raise ChaosError(f"the engine does not repeat itself: workload {workload} differs undisturbed")
        for workload, answer in found.items():
            self._recorder.note("oracle", workload=workload, tokens=answer, finish="length")
        return found

    def _disturb(self, arena: arenas.Arena, oracle: dict[int, list[int]]) -> None:
        hunter = self._hunter = Hunter(arena, self._recorder, self._rng, self._faults, self._kinds)
        pulse = Pulse(arena, self._recorder)
        hunter.start()
        pulse.start()
        try:
            self._serve(arena, hunter, list(oracle), time.monotonic() + 60 * self._minutes)
        except KeyboardInterrupt:
            self.interrupted = True
            print("interrupted: letting everything go on, and finishing what is under way (Ctrl-C again to leave)")
            hunter.stopping.set()
            hunter.join(30)
            self._serve(arena, hunter, list(oracle), 0.0)
        finally:
            hunter.stopping.set()
            pulse.stopping.set()
            hunter.join(30)
            pulse.join(_HEALTH_LIMIT_S + 5)

    def _serve(self, arena: arenas.Arena, hunter: Hunter, workloads: list[int], deadline: float) -> None:
        """Keep requests going until the hunter is done or the time is over; then to the end of those under way."""
        note, rng = self._recorder.note, random.Random(self._seed + 1)
        order = list(workloads)
        live, lost, told = self._live, arena.lost_steps, 0.0
        idle_until = 0.0
        while True:
            now = time.monotonic()
            if now > deadline or hunter.trouble:
                hunter.stopping.set()
            over = hunter.stopping.is_set() or not hunter.is_alive()
            unserved = order if self._requests < len(workloads) else []
            if over and not live and not unserved:
                break
            while now >= idle_until and len(live) < _LIVE and (not over or unserved):
                workload = order.pop(0) if order else rng.choice(workloads)
                unserved = order
                request_id = f"r{self._requests}"
                self._requests += 1
                note("request", id=request_id, workload=workload)
                live.add(request_id)
                arena.add(request_id, workload)
            if not live:
                time.sleep(0.02)
            elif rng.random() < 0.0005 and not over:
                idle_until = now + rng.uniform(0.0, 2.0)
            for out in arena.step() if live else ():
                if out.token is not None:
                    note("token", id=out.request_id, index=out.index, token=out.token)
                    hunter.tokens += 1
                if out.finish:
                    note("end", id=out.request_id, finish=out.finish, error=out.error)
                    live.discard(out.request_id)
            if arena.lost_steps != lost:
                note("retry", lost_steps=arena.lost_steps - lost)
                lost = arena.lost_steps
            if now > told + 10:
                told = now
                self._progress(arena, hunter)

    @property
    def _live(self) -> set[str]:
        if not hasattr(self, "_live_requests"):
            self._live_requests: set[str] = set()
        return self._live_requests

    def _progress(self, arena: arenas.Arena, hunter: Hunter) -> None:
        rss = holdings.rss_mb()
        self._recorder.note("holdings", when="during", things={}, rss_mb=round(rss, 1), epoch=arena.executor.epoch)
        last = hunter.done[-1].fault.describe() if hunter.done else "none yet"
        print(
            f"{time.strftime('%H:%M:%S')} {len(hunter.done)} of {self._faults} faults, epoch {arena.executor.epoch}, "
            f"{arena.executor.state.value}, {hunter.tokens} tokens, {rss:.0f} MB; last: {last}",
            flush=True,
        )


def summary(verdict: Verdict, **others: Any) -> dict[str, Any]:
    """What ``build/soak.json`` holds."""
    data = verdict.to_json()
    kinds = Counter(report["text"].split(" ")[0] for report in data["reports"])
    order = ("faults", "survived", "tokens_lost", "tokens_repeated", "tokens_changed", "requests_failed", "leaks")
    first = {key: data[key] for key in order}
    return {**first, **others, "kinds": dict(kinds), **{key: data[key] for key in data if key not in first}}


def main(arguments: list[str] | None = None) -> int:
    """Run a soak; 0 when the history is clean, else 1."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="at most so long")
    parser.add_argument("--faults", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"))
    parser.add_argument("--history", type=Path, default=None)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    # Of its own: the next soak must not take the evidence of the last one away.
    history = options.history or options.json.with_name(f"{options.json.stem}-{options.engine}-{seed}.jsonl")
    wanted = [Kind(kind) for kind in options.kinds.split(",") if kind]
    kinds = {kind: MIXTURE.get(kind, 1) for kind in wanted} or dict(MIXTURE)
    if options.engine == "vllm" and not wanted:  # an exception in a step is the end of vLLM's engine
        kinds = {kind: weight for kind, weight in kinds.items() if kind not in (Kind.RAISE, Kind.RAISE_UNPICKLABLE)}
    command = f"make soak MINUTES={options.minutes:g} FAULTS={options.faults} ENGINE={options.engine} SEED={seed}"
    print(command, flush=True)
    soak = Soak(
        engine=options.engine, seed=seed, minutes=options.minutes, faults=options.faults, history=history,
        kinds=kinds, command=command,
    )  # fmt: skip
    began = time.time()
    verdict = soak.run()
    data = summary(
        verdict, seed=seed, engine=options.engine, command=command, minutes=round((time.time() - began) / 60, 2),
        interrupted=soak.interrupted,
    )  # fmt: skip
    options.json.write_text(json.dumps(data, indent=1) + "\n")
    brief = {key: data[key] for key in list(data)[:7]}
    print(json.dumps(brief), f"-> {options.json}, history {history}")
    for problem in verdict.problems[:30]:
        print(f"  PROBLEM {problem}")
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main())
