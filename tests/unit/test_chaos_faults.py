"""Faults as data, victims, storms and the command line; nothing is started."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.chaos import cli, hands, targets
from resilient_executor.chaos.faults import MIXTURE, TRAITS, Fault, Kind, Needs, Target, Worker, draw
from resilient_executor.injection import Harm, Injection
from resilient_executor.supervisor.client import SUPERVISOR_PREFIX

WORKERS = [Worker(rank, rank // 2, f"10.0.0.{rank % 2}") for rank in range(6)]
faults = st.integers(0, 1 << 30).map(lambda seed: draw(random.Random(seed)))


@given(faults)
def test_a_fault_goes_through_json_as_it_is(fault: Fault) -> None:
    assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault
    assert fault.kind.value in fault.describe()


@given(
    st.integers(0, 1 << 30), st.integers(1, 8), st.sets(st.integers(0, 5)), st.none() | st.integers(0, 2),
    st.none() | st.sampled_from(["10.0.0.0", "10.0.0.1"]),
)  # fmt: skip
def test_victims_fit_are_not_protected_and_depend_on_the_seed_alone(
    seed: int, count: int, protect: set[int], stage: int | None, node: str | None
) -> None:
    target = Target(stage=stage, node=node, protect=tuple(protect), count=count)
    chosen = target.choose(WORKERS, seed)
    assert chosen == target.choose(random.Random(seed).sample(WORKERS, len(WORKERS)), seed)
    fit = [w for w in WORKERS if stage in (None, w.stage) and node in (None, w.node) and w.rank not in protect]
    assert len(chosen) == min(count, len(fit)) == len({worker.rank for worker in chosen})
    assert set(chosen) <= set(fit)


def test_a_target_is_read_from_its_text() -> None:
    assert Target.parse("rank:1") == Target(rank=1)
    assert Target.parse("node:10.0.0.3", count=2) == Target(node="10.0.0.3", count=2)
    assert Target.parse("any") == Target()
    with pytest.raises(ValueError, match="no target"):
        Target.parse("rank:x")


def test_every_kind_has_traits_and_those_inside_a_worker_are_what_workers_know() -> None:
    assert set(TRAITS) == set(Kind)
    inside = {kind.value for kind, traits in TRAITS.items() if traits.needs is Needs.PERMISSION}
    assert inside == {harm.value for harm in Harm}
    assert all(TRAITS[kind].needs is not Needs.NETWORK for kind in MIXTURE)
    assert targets.PREFIX == SUPERVISOR_PREFIX


def test_what_an_injection_may_take_is_bounded() -> None:
    with pytest.raises(ValueError, match="megabytes"):
        Injection(Harm.OUT_OF_MEMORY, megabytes=1 << 20)
    with pytest.raises(ValueError, match="duration_s"):
        Injection(Harm.SLOW, duration_s=-1)


@pytest.mark.parametrize("seed", range(5))
def test_a_storm_is_the_same_with_the_same_seed(seed: int) -> None:
    options = argparse.Namespace(mtbf=20.0, duration=600.0, max_faults=50)
    plan = list(cli.storm(options, seed, dict(MIXTURE), (0,)))
    assert plan == list(cli.storm(options, seed, dict(MIXTURE), (0,)))
    assert sum(pause for pause, _ in plan) <= 600.0
    assert all(fault.target.protect == (0,) for _, fault in plan)


def test_a_signal_goes_to_the_process_that_is_meant_and_to_no_later_one_of_its_pid() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        ticks = hands.start_ticks(child.pid)
        assert ticks is not None
        assert child.pid in hands.descendants(os.getpid())
        assert not hands.send(child.pid, ticks + 1, signal.SIGKILL)
        assert child.poll() is None
        assert hands.send(child.pid, ticks, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    assert not hands.send(child.pid, ticks, signal.SIGKILL)


def test_what_is_frozen_for_a_while_is_let_go_on_by_whoever_froze_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        ticks = hands.start_ticks(child.pid)
        assert ticks is not None
        assert hands.Hand().freeze([(child.pid, ticks)], 0.5) == [child.pid]
        assert os.waitpid(child.pid, os.WUNTRACED)[1] == signal.SIGSTOP << 8 | 0x7F
        assert os.WIFCONTINUED(os.waitpid(child.pid, os.WCONTINUED)[1])
        child.kill()


def test_durations_and_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert [cli.seconds(text) for text in ("20", "20s", "10m", "500ms")] == [20.0, 20.0, 600.0, 0.5]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["storm", "--mtbf", "soon"])
    assert exit_info.value.code == 2
    assert "no duration" in capsys.readouterr().err
    assert cli.main(["check", str(tmp_path / "missing")]) == cli.EXIT_REFUSED
    assert "cannot be judged" in capsys.readouterr().err
    history = tmp_path / "history.jsonl"
    history.write_text('{"n":0,"t":1,"kind":"run"}\n')
    assert cli.main(["check", str(history)]) == cli.EXIT_NOT_SURVIVED
    assert "it has no end" in capsys.readouterr().out
