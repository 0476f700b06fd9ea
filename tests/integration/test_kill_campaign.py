"""SIGKILLs at random and at chosen moments under the reference engine; the history of tokens is the judge (F30, F31).

``KILLS`` and ``SEED`` in the environment set how many and which; the default is short enough for CI. ``make campaign``
runs a hundred.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
import ray

from resilient_executor import Event, ExecutorConfig, ExecutorState, ResilientExecutor, WorkerSpec
from resilient_executor.reference import WORKER, ReferenceEngine, SamplingParams
from resilient_executor.reference.bench import JOURNALLED

KILLS = int(os.environ.get("KILLS", "6"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 30)))
#: When a kill may come: while serving (at random, or idle), or in a phase of the rebuild that it provokes.
MOMENTS = ("serving", "serving", "idle", "spawn", "rank", "initialise", "load", "replay", "compile", "warm_up")
PROMPTS = ("It was a fine evening, and", "The house stood on", "My dear Emma,", "She could not")

Tokens = dict[int, list[int]]


class Assassin:
    """Kills by plan: each entry is a moment and a number of victims, all drawn from one seed.

    A kill in a phase of the rebuild needs a rebuild, so a kill while serving goes before it.
    """

    def __init__(self, executor: ResilientExecutor, rng: random.Random, kills: int) -> None:
        self._executor = executor
        self._rng = rng
        self._wanted = kills
        self._moment = ""
        self._lock = threading.Lock()
        self.delivered: list[tuple[str, int]] = []
        self.supervisors = 0
        executor.add_listener(self.on_event)

    @property
    def done(self) -> bool:
        return len(self.delivered) >= self._wanted

    def strike(self, moment: str) -> None:
        """Kill one rank, one time in four two at once, and one time in four the supervisor with them."""
        if self._rng.random() < 0.25:
            self.kill_supervisor()
        workers = self._executor.workers
        for worker in self._rng.sample(workers, min(len(workers), self._rng.choice((1, 1, 1, 2)))):
            try:
                os.kill(worker.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.delivered.append((moment, worker.process.pid))

    def kill_supervisor(self) -> None:
        assert self._executor._supervision is not None
        for handle in self._executor._supervision.actor_processes()[:1]:
            row = ray._private.state.actors(handle._actor_id.hex())
            if row.get("Pid") and row.get("State") == "ALIVE":
                os.kill(row["Pid"], signal.SIGKILL)
                self.supervisors += 1

    def on_event(self, event: Event) -> None:
        """In a phase of the rebuild: strike a little later, in another thread."""
        if event.kind == "phase_begun" and event.incident is not None and event.phase == self._moment:
            with self._lock:
                self._moment = ""
            longest = {"spawn": 1.0, "initialise": 3.0, "compile": 0.4}.get(event.phase, 0.01)
            timer = threading.Timer(self._rng.uniform(0, longest), self.strike, (event.phase,))
            timer.daemon = True
            timer.start()

    def loop(self) -> None:
        """Strike while serving until the plan is carried out."""
        while not self.done:
            moment = self._rng.choice(MOMENTS)
            time.sleep(self._rng.uniform(0, 2.5))
            if self._executor.state is ExecutorState.HEALTHY:
                self._moment = moment if moment not in ("serving", "idle") else ""
                self.strike(moment if not self._moment else "serving")


@pytest.fixture
def executor() -> Iterator[ResilientExecutor]:
    config = ExecutorConfig(
        worker=WorkerSpec(WORKER),
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        address="local",
        max_restarts=100_000,
        backoff_initial_s=0.01,
        backoff_max_s=0.05,
        rpc_policies=JOURNALLED,
    )
    with ResilientExecutor(config) as running:
        yield running


def serve(engine: ReferenceEngine) -> Tokens:
    """Six requests, greedy and seeded; their tokens in the order in which they reached the caller."""
    numbers: dict[str, int] = {}
    tokens: Tokens = {}
    for number in range(6):
        temperature = 0.0 if number % 2 == 0 else 0.9
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=number, ignore_eos=True)
        numbers[engine.add_request(PROMPTS[number % len(PROMPTS)], params)] = number
        tokens[number] = []
    for event in engine.stream():
        assert event.error is None, event.error
        assert event.token_id is not None
        assert event.index == len(tokens[numbers[event.request_id]]), "tokens out of order"
        tokens[numbers[event.request_id]].append(event.token_id)
    return tokens


@pytest.mark.timeout(120 + 20 * KILLS)
def test_no_kill_at_any_moment_loses_repeats_or_changes_a_token(executor: ResilientExecutor) -> None:
    rng = random.Random(SEED)
    print(f"SEED={SEED} KILLS={KILLS}")
    engine = ReferenceEngine(executor, poison_crashes=0)
    undisturbed = serve(engine)
    assert serve(engine) == undisturbed, "the engine itself does not repeat its tokens"
    process = psutil.Process()
    memory_before, incidents_before = process.memory_info().rss, 0

    assassin = Assassin(executor, rng, KILLS)
    hunt = threading.Thread(target=assassin.loop, daemon=True)
    hunt.start()
    rounds = 0
    while not assassin.done:
        assert serve(engine) == undisturbed, f"round {rounds}, seed {SEED}"
        rounds += 1
        if rng.random() < 0.4:
            time.sleep(rng.uniform(0, 2.0))  # idle
    hunt.join(10)
    assert serve(engine) == undisturbed

    incidents = executor.incidents
    assert incidents[incidents_before:], "no kill was felt"
    for incident in incidents:
        assert incident.outcome == "recovered"
        assert incident.cause is not None
        assert incident.cause.signal == signal.SIGKILL, incident.headline()
    growth_mb = (process.memory_info().rss - memory_before) / (1 << 20)
    print(
        f"{len(assassin.delivered)} kills and {assassin.supervisors} of the supervisor in {executor.epoch} epochs, "
        f"{len(incidents)} incidents, {rounds} rounds, "
        f"driver +{growth_mb:.1f} MB; moments {dict(Counter(moment for moment, _ in assassin.delivered))}"
    )
    assert growth_mb < 20 + 1.0 * executor.epoch, "the driver's memory is not flat"
    executor.shutdown()
    assert not [pid for _, pid in assassin.delivered if psutil.pid_exists(pid)]
    assert not [w for w in executor.workers if psutil.pid_exists(w.process.pid)]
