"""Between nodes: whoever dies, whatever is on its way, no node is lost for it, and nobody spins.

``ROUNDS=10 SEED=7`` repeats; the figures are printed (``-s``).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commander import Commander
from test_nodes import running_as, workers

from resilient_executor.chaos.cluster import TUNED, NetnsCluster, missing, running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROUNDS = int(os.environ.get("ROUNDS", "1"))
SEED = int(os.environ.get("SEED", "0")) or random.randrange(1, 10**6)
TOKENS = 120
#: No node is avoided here: two are all there are.
SETTINGS = {"backoff_initial_s": 0.05, "backoff_max_s": 0.5, "max_restarts": 1000, "avoid_after": 1000}

ACTORS = ("ray::WorkerActor", "ray::NodeAgent", "ray::SupervisorActor", "ray::DAGDriverProxyActor")


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetnsCluster]:
    """The head and two nodes of one CPU each, both in use: one that is lost is missed at once."""
    if why := missing():
        pytest.skip(why)
    with running(3, f"rw{os.getpid() % 100000}", environment=TUNED) as one:
        yield one


@pytest.fixture
def commander(cluster: NetnsCluster) -> Iterator[Commander]:
    with Commander(cluster, SETTINGS) as one:
        yield one


def probed(commander: Commander) -> list[str]:
    commander.tell("probe")
    found = commander.wait("probed", 60)
    assert found["alive"] == len(commander.cluster.nodes())
    nodes: list[str] = found["nodes"]
    return nodes


def all_of(cluster: NetnsCluster) -> list[str]:
    return sorted(cluster.ip(node) for node in cluster.nodes())


def processor_s(pids: list[int]) -> float:
    """Processor time of these processes, in seconds."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_nobody_spins_while_there_is_nothing_to_do(commander: Commander) -> None:
    expected = commander.oracle(TOKENS, seed=5)
    assert expected
    ranks = [pid for node in (1, 2) for pid in workers(commander.cluster, node)]
    assert len(ranks) == 2
    time.sleep(1.0)
    before, began = processor_s(ranks), time.monotonic()
    time.sleep(5.0)
    used = (processor_s(ranks) - before) / (time.monotonic() - began)
    print(json.dumps({"idle_cores_of_two_ranks": round(used, 3)}), flush=True)
    assert used < 0.15, "Ray's own channels take a whole core each"


def test_a_worker_that_is_fed_from_another_node_dies_again_and_again(commander: Commander) -> None:
    """Each time with steps on their way to it, and the next one on the same two nodes."""
    cluster, expected = commander.cluster, commander.oracle(TOKENS, seed=5)
    for number in range(2 * max(2, ROUNDS)):
        rng = random.Random(f"{SEED}-{number}")
        commander.tell(f"go {TOKENS} 5")
        commander.wait("mark", 60)
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(workers(cluster, 1 + number % 2)[0], signal.SIGKILL)
        done = commander.wait("done", 60)
        facts: dict[str, Any] = {
            "fault": "worker",
            "round": number,
            "seed": SEED,
            "outage_s": round(done["outage_s"], 2),
        }
        print(json.dumps(facts | {"causes": [i["line"] for i in done["incidents"]]}), flush=True)
        assert done["tokens"] == expected
        assert done["errors"] == {}
        assert [i["kind"] for i in done["incidents"]] == ["process_exit"]
        assert f"rank {number % 2} " in done["incidents"][0]["line"]
        assert probed(commander) == all_of(cluster), "a raylet waits for a reader who is dead"


def test_the_channel_of_an_accelerator_has_wires_under_it(cluster: NetnsCluster, tmp_path: Path) -> None:
    """NCCL carries tensors; what else a message holds takes the way of all others."""
    script = str(Path(__file__).with_name("accelerator.py"))
    command = [sys.executable, script, cluster.address, str(tmp_path), "2"]
    done = cluster.popen(0, command, stdout=subprocess.PIPE, text=True)
    said, _ = done.communicate(timeout=100)
    assert done.returncode == 0, said
    assert "wires [2, 1]" in said  # what is no tensor, and what tensors there are; the reply


def test_a_driver_that_dies_costs_no_node(cluster: NetnsCluster) -> None:
    """Its node gets the replies of a rank elsewhere; the next driver finds all nodes as they were."""
    rng = random.Random(f"{SEED}-driver")
    expected: list[list[int]] = []
    for _ in range(max(2, ROUNDS)):
        with Commander(cluster, SETTINGS) as commander:
            expected = expected or commander.oracle(TOKENS, seed=5)
            commander.tell(f"go {TOKENS} 5")
            commander.wait("mark", 60)
            time.sleep(rng.uniform(0.0, 0.3))
            commander.kill()
        deadline = time.monotonic() + 30
        while left := [pid for node in cluster.nodes() for name in ACTORS for pid in running_as(cluster, node, name)]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.2)
    with Commander(cluster, SETTINGS) as commander:
        commander.tell(f"go {TOKENS} 5")
        assert commander.wait("done", 60)["tokens"] == expected
        assert probed(commander) == all_of(cluster)
