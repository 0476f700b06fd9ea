"""The stall report: who waits for whom, from what ranks say and what their stacks show."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.protocol import Phase, Progress
from resilient_executor.supervisor.stalls import MAX_STACK, RankReport, StallReport, make_report, tidy_stacks

IN_STEP = """Thread 0x1 (most recent call first):
  File "app/engine.py", line 7 in compute
  File "resilient_executor/worker.py", line 230 in run_step"""
IN_COLLECTIVE = """Thread 0x1 (most recent call first):
  File "site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "site-packages/torch/distributed/c10d_logger.py", line 3 in wrapper
  File "app/engine.py", line 7 in compute
  File "resilient_executor/worker.py", line 230 in run_step"""
WATCHMAN = """Thread 0x2 (most recent call first):
  File "threading.py", line 320 in wait
  File "resilient_executor/worker.py", line 300 in sentinel"""
MAIN = """Thread 0x3 (most recent call first):
  File "ray/_private/worker.py", line 1 in main_loop"""


def rank(number: int, step: int = -1, stacks: str = "", last_step: int = 9, **changes: Any) -> RankReport:
    progress = Progress(number, 1, Phase.SERVING, step, 9.0 if step >= 0 else 0.0, last_step, (), "")
    return RankReport(number, 100 + number, "10.0.0.1", progress, 0.5, stacks=stacks, **changes)


def report(*ranks: RankReport, suspects: tuple[int, ...], tp: int = 2) -> StallReport:
    return make_report(
        at=0.0,
        epoch=3,
        suspects=suspects,
        text="step 10 is 9.0 s old",
        ranks={one.rank: one for one in ranks},
        tensor_parallel_size=tp,
    )


def test_the_rank_that_is_not_in_the_collective_is_the_culprit() -> None:
    it = report(rank(0, 10, IN_COLLECTIVE), rank(1, 10, IN_STEP), rank(2), rank(3), suspects=(0, 1))
    assert it.culprit == 1
    assert it.waits() == {0: (1,), 2: (1,), 3: (1,)}
    lines = it.lines()
    assert lines[0] == "epoch 3: step 10 is 9.0 s old"
    assert lines[1].startswith(
        "rank 0 (pid 100, node 10.0.0.1): in step 10 for 9.0 s, in the collective all_reduce, waits for rank 1"
    )
    assert any(line.startswith("rank 1") and "all others wait for it" in line for line in lines)
    assert any("idle after step 9, waits for rank 1" in line for line in lines)
    assert '      File "app/engine.py", line 7 in compute' in lines
    assert len(it.lines(stacks=False)) == 5


def test_nobody_is_blamed_where_it_cannot_be_told() -> None:
    both = report(rank(0, 10, IN_COLLECTIVE), rank(1, 10, IN_COLLECTIVE), suspects=(0, 1))
    assert both.culprit is None
    assert both.waits() == {0: (1,), 1: (0,)}
    assert report(rank(0, 10), rank(1, 10), suspects=(0, 1)).culprit is None


def test_earlier_stages_wait_for_nobody() -> None:
    it = report(rank(0, last_step=10), rank(1, 10, IN_STEP), suspects=(1,), tp=1)
    assert it.culprit == 1
    assert it.waits() == {}


def test_a_silent_rank_is_reported_with_what_is_known() -> None:
    silent = RankReport(1, 7, "10.0.0.2", None, 6.0, process="is stopped")
    assert report(rank(0), silent, suspects=(1,)).lines()[2] == (
        "rank 1 (pid 7, node 10.0.0.2): has not said anything, all others wait for it, its process is stopped, "
        "last heard 6.0 s ago"
    )


def test_working_threads_come_first_and_watchmen_not_at_all() -> None:
    assert tidy_stacks("\n\n".join([WATCHMAN, MAIN, IN_STEP]) + "\n") == f"{IN_STEP}\n\n{MAIN}"


@given(st.lists(st.sampled_from([IN_STEP, IN_COLLECTIVE, WATCHMAN, MAIN, "x" * 10_000, ""]), max_size=60))
def test_stacks_are_bounded(blocks: list[str]) -> None:
    tidy = tidy_stacks("\n\n".join(blocks))
    assert len(tidy) <= MAX_STACK
    assert sys.getsizeof(tidy) < 2 * MAX_STACK
