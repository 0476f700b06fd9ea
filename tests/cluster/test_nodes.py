"""Nodes die, freeze, lose their cable or each other: the engine goes on elsewhere, with the tokens that were due.

``ROUNDS=10 SEED=7`` repeats every fault so often; the figures are printed (``-s``) as one JSON line a round.
``RAY_DEFAULTS=1 SLACK=20`` takes Ray's own health checks instead of the fast ones.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from commander import Commander, Message

from resilient_executor.chaos.cables import SLOW_KBIT
from resilient_executor.chaos.cluster import TUNED, NetnsCluster, missing, running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(880)]

ROUNDS = int(os.environ.get("ROUNDS", "1"))
SEED = int(os.environ.get("SEED", "0")) or random.randrange(1, 10**6)
#: Enough for the fault to be there before the last one.
TOKENS = 250
#: The bounds are those of a machine that has nothing else to do: SLACK=1 there.
SLACK = float(os.environ.get("SLACK", "3"))

#: Takes the cluster and the nodes in use (rank order), breaks something; returns the node that must not be used after.
Fault = Callable[[NetnsCluster, list[int], random.Random], int | None]


def killed(cluster: NetnsCluster, used: list[int], rng: random.Random) -> int | None:
    cluster.kill(victim := rng.choice(used))
    return victim


def frozen(cluster: NetnsCluster, used: list[int], rng: random.Random) -> int | None:
    cluster.stop(victim := rng.choice(used))
    return victim


def unplugged(cluster: NetnsCluster, used: list[int], rng: random.Random) -> int | None:
    cluster.cut(victim := rng.choice(used))
    return victim


def parted(cluster: NetnsCluster, used: list[int], rng: random.Random) -> int | None:
    cluster.pair_cut(*used)
    return None


#: Fault -> what an outage may last with tuned health checks, in seconds.
FAULTS: dict[str, tuple[Fault, float]] = {
    "killed": (killed, 8.0),
    "frozen": (frozen, 15.0),
    "unplugged": (unplugged, 15.0),
    "parted": (parted, 15.0),
}


#: The longest time without a token while the head's link is slow, in seconds: with a rebuild over it, and without.
SLOW_REBUILD_S = 15.0
SLOW_STEP_S = 5.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetnsCluster]:
    """The head and three nodes of one CPU each: two in use, one to spare."""
    if why := missing():
        pytest.skip(why)
    environment = {} if "RAY_DEFAULTS" in os.environ else TUNED
    with running(4, f"rt{os.getpid() % 100000}", environment=environment) as one:
        yield one


@pytest.fixture(scope="module")
def commander(cluster: NetnsCluster) -> Iterator[Commander]:
    """A driver that serves, PP=2 over two nodes."""
    with Commander(cluster, {"backoff_initial_s": 0.05, "backoff_max_s": 0.5, "max_restarts": 1000}) as one:
        yield one


@pytest.fixture
def repaired(commander: Commander) -> Iterator[Commander]:
    """The cluster is whole again after the test: three nodes that Ray calls alive."""
    yield commander
    repair(commander.cluster)


def repair(cluster: NetnsCluster) -> None:
    nodes = cluster.nodes()[1:]
    for one in nodes:
        for other in nodes:
            if one < other:
                cluster.pair_heal(one, other)
    fallen(cluster)


def fallen(cluster: NetnsCluster) -> list[int]:
    """Nodes whose raylet is gone, started again."""
    dead = [node for node in cluster.nodes()[1:] if not running_as(cluster, node, "raylet")]
    for node in dead:
        print(json.dumps({"fallen": node, "last_words": last_words(cluster, node)}), flush=True)
    for node in dead:
        cluster.restart(node)
    return dead


def last_words(cluster: NetnsCluster, node: int) -> list[str]:
    """What its raylet said when it aborted."""
    logs = sorted(cluster.folder(node).glob("session_*/logs/raylet*.out"))
    return [line for log in logs for line in log.read_text(errors="replace").splitlines() if "Check failed" in line]


def round_of(commander: Commander, name: str, number: int) -> Message:
    fault, _ = FAULTS[name]
    cluster, rng = commander.cluster, random.Random(f"{SEED}-{name}-{number}")
    expected = commander.oracle(TOKENS, seed=5)
    commander.tell(f"go {TOKENS} 5")
    mark = commander.wait("mark", 60)
    used = [commander.node_of(address) for address in mark["nodes"]]
    began = time.time()
    victim = fault(cluster, used, rng)
    done = commander.wait("done", 150)
    now = [commander.node_of(address) for address in done["nodes"]]
    noticed = min((i["at"] for i in done["incidents"]), default=0.0) - began
    facts = {
        "fault": name, "round": number, "seed": SEED, "outage_s": round(done["outage_s"], 2),
        "noticed_s": round(noticed, 2), "from": used, "to": now,
        "rebuilds": sum(len(i["tried"]) for i in done["incidents"]),
        "causes": [i["line"] for i in done["incidents"]], "phases": [i["phases"] for i in done["incidents"]],
        "evidence": [i["text"] for i in done["incidents"]],
    }  # fmt: skip
    print(json.dumps(facts), flush=True)
    assert done["errors"] == {}
    assert done["tokens"] == expected, "a token was lost, repeated or changed"
    assert done["state"] == "HEALTHY"
    assert len(done["incidents"]) >= 1
    assert now == sorted(now), "ranks follow the addresses"
    assert len(set(now)) == 2
    assert set(now) != set(used)
    if victim is not None:
        assert victim not in now
        ended(cluster, victim, name)
        cluster.restart(victim)
    else:
        cluster.pair_heal(*used)
    assert fallen(cluster) == [], "a node that came back took another one's raylet down"
    return facts


@pytest.mark.parametrize("dies", [False, True], ids=["alone", "and a death"])
def test_the_head_s_slow_link(repaired: Commander, dies: bool) -> None:
    """Steps become slow, and nobody is replaced for it; a worker that dies is, over the same slow link."""
    cluster, name = repaired.cluster, f"slow, {'a worker dies' if dies else 'alone'}"
    expected = repaired.oracle(TOKENS, seed=5)
    for number in range(ROUNDS):
        rng = random.Random(f"{SEED}-{name}-{number}")
        repaired.tell(f"go {TOKENS} 5")
        used = [repaired.node_of(address) for address in repaired.wait("mark", 60)["nodes"]]
        cluster.slow(0, SLOW_KBIT)
        try:
            if dies:
                time.sleep(rng.uniform(0.0, 2.0))
                os.kill(workers(cluster, rng.choice(used))[0], signal.SIGKILL)
            done = repaired.wait("done", 150)
        finally:
            cluster.unslow(0)
        facts = {
            "fault": name, "round": number, "seed": SEED, "outage_s": round(done["outage_s"], 2), "from": used,
            "causes": [i["line"] for i in done["incidents"]], "phases": [i["phases"] for i in done["incidents"]],
        }  # fmt: skip
        print(json.dumps(facts), flush=True)
        assert done["errors"] == {}
        assert done["tokens"] == expected, "a token was lost, repeated or changed"
        assert done["state"] == "HEALTHY"
        assert [i["kind"] for i in done["incidents"]] == ["process_exit"] * dies
        assert done["outage_s"] <= (SLOW_REBUILD_S if dies else SLOW_STEP_S) * SLACK


def ended(cluster: NetnsCluster, victim: int, name: str) -> None:
    """The old node comes back; its workers are ignored and end themselves."""
    if name == "killed":
        return
    cluster.cont(victim)
    cluster.heal(victim)
    deadline = time.monotonic() + 20
    while workers(cluster, victim) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers(cluster, victim) == []


def workers(cluster: NetnsCluster, node: int) -> list[int]:
    return running_as(cluster, node, "ray::WorkerActor")


def running_as(cluster: NetnsCluster, node: int, title: str) -> list[int]:
    """Processes of a node whose command has this name."""
    found = []
    for pid in cluster.pids(node):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if file.read().split("\0")[0].rpartition("/")[2].startswith(title):
                    found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_nodes(repaired: Commander, name: str) -> None:
    for number in range(ROUNDS):
        facts = round_of(repaired, name, number)
        assert facts["outage_s"] <= FAULTS[name][1] * SLACK


def test_a_node_that_is_drained_is_left_before_it_goes(repaired: Commander) -> None:
    cluster, expected = repaired.cluster, repaired.oracle(TOKENS, seed=5)
    repaired.tell("where")
    address = repaired.wait("here", 30)["nodes"][1]
    repaired.tell(f"drain {address}")
    assert repaired.wait("drained", 30)["accepted"]
    repaired.tell(f"go {TOKENS} 5")
    done = repaired.wait("done", 90)
    print(json.dumps({"fault": "drained", "outage_s": done["outage_s"], "causes": done["incidents"]}))
    assert done["tokens"] == expected
    assert done["errors"] == {}
    assert address not in done["nodes"]
    [incident] = done["incidents"]
    assert incident["kind"] == "node_drain", incident
    cluster.restart(repaired.node_of(address))


def test_a_rebuild_waits_for_a_node_and_says_so(repaired: Commander) -> None:
    cluster, expected = repaired.cluster, repaired.oracle(TOKENS, seed=5)
    repaired.tell(f"go {TOKENS} 5")
    used = [repaired.node_of(address) for address in repaired.wait("mark", 60)["nodes"]]
    gone = [node for node in cluster.nodes()[1:] if node != used[0]]
    for node in gone:
        cluster.kill(node)
    waits = repaired.wait("waits", 60)["text"]
    assert waits.startswith("waiting for capacity: need 2 x {'CPU': 1.0}, free {")
    for node in gone:
        cluster.restart(node)
    done = repaired.wait("done", 90)
    assert done["tokens"] == expected
    assert done["errors"] == {}


def test_the_chaos_kit_hits_nodes_and_cables_from_inside(repaired: Commander) -> None:
    cluster, expected = repaired.cluster, repaired.oracle(40, seed=5)
    for fault in ("kill_node", "pull_cable"):
        command = [sys.executable, "-m", "resilient_executor.chaos.cli", fault, "--address", cluster.address]
        kit = cluster.popen(0, [*command, "--within", "100s"], stdout=subprocess.PIPE, text=True)
        said, _ = kit.communicate(timeout=200)
        assert kit.returncode == 0, said
        assert "survived" in said
        hit = {
            address for line in said.splitlines() if fault in line for address in re.findall(r"10\.77\.0\.\d+", line)
        }
        repaired.tell("go 40 5")
        done = repaired.wait("done", 60)
        assert done["tokens"] == expected
        assert len(hit) == 1, said
        assert not hit <= set(done["nodes"]), said
        if fault == "kill_node":
            node = repaired.node_of(hit.pop())
            assert cluster.pids(node) == []
            cluster.restart(node)
        fallen(cluster)
