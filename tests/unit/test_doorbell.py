"""The bell that ends a reader's sleep: real sockets, real threads and processes, channels of this file's own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayChannelError, RayChannelTimeoutError, RayTaskError
from ray.experimental.channel.common import ChannelInterface, SynchronousReader

from resilient_executor import ExecutorConfig, WorkerSpec
from resilient_executor.doorbell import BellPlan, Doorbell, plan, usable_cores
from resilient_executor.readers import read_channels

_made: list[Doorbell] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def bell_of(a_plan: BellPlan, look_s: float = 60.0) -> Doorbell:
    """A bell that is closed after the test. Looks without a ring are a minute apart, so one that is lost is felt."""
    _made.append(Doorbell(a_plan, look_s))
    return _made[-1]


def own_plan(name: str, *rings: str, remote: bool = False) -> BellPlan:
    return BellPlan(f"test-{os.getpid()}-{name}", rings, remote, company=1, busy_wait_ms=0)


class Queue(ChannelInterface):  # type: ignore[misc]  # Ray has no types
    """A channel that is written in this process."""

    def __init__(self) -> None:
        self.values: deque[Any] = deque()
        self.looks = 0

    def read(self, timeout: float | None = None) -> Any:
        self.looks += 1
        if not self.values:
            raise RayChannelTimeoutError("nothing there")
        value = self.values.popleft()
        if isinstance(value, RayChannelError):
            raise value
        return value


def test_nothing_is_lost_between_a_look_and_a_sleep() -> None:
    bell = bell_of(own_plan("reader"))
    writer = bell_of(own_plan("writer", bell.plan.address))
    queue, count = Queue(), 3000
    reader = SynchronousReader([queue])

    def write() -> None:
        for number in range(count):
            if number % 3 == 0:
                time.sleep(random.random() * 1e-4)
            queue.values.append(number)
            writer.ring()

    thread = threading.Thread(target=write)
    thread.start()
    values = [read_channels(reader, bell, 20.0)[0] for _ in range(count)]
    thread.join(10)
    assert values == list(range(count))


def test_a_sleeper_costs_nothing_and_is_woken_by_another_process_at_once() -> None:
    bell = bell_of(own_plan("sleeper"))
    queue = Queue()
    code = (
        "import socket, time; time.sleep(0.5); "
        f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'', b'\\0' + {bell.plan.address!r}.encode())"
    )
    ringer = subprocess.Popen([sys.executable, "-c", code])
    cpu = time.thread_time()
    threading.Timer(0.2, queue.values.append, ["late"]).start()
    assert read_channels(SynchronousReader([queue]), bell, 30.0) == ["late"]
    assert time.thread_time() - cpu < 0.05
    assert queue.looks <= 3
    ringer.wait(10)


def test_a_ring_that_got_lost_costs_one_pause() -> None:
    bell = bell_of(own_plan("lost"), look_s=0.1)
    queue = Queue()
    threading.Timer(0.25, queue.values.append, [1]).start()
    began = time.monotonic()
    assert read_channels(SynchronousReader([queue]), bell, None) == [1]
    assert time.monotonic() - began < 5.0


def test_writers_of_other_nodes_are_looked_for_at_short_intervals() -> None:
    bell = bell_of(own_plan("remote", remote=True))
    queue = Queue()
    threading.Timer(0.3, queue.values.append, [1]).start()
    assert read_channels(SynchronousReader([queue]), bell, 20.0) == [1]
    assert 20 < queue.looks < 500


def test_values_of_several_channels_stay_together() -> None:
    bell = bell_of(own_plan("several"), look_s=0.01)
    first, second = Queue(), Queue()
    reader = SynchronousReader([first, second])
    first.values.extend(["a1", "b1"])
    threading.Timer(0.1, second.values.extend, [["a2", "b2"]]).start()
    assert read_channels(reader, bell, 20.0) == ["a1", "a2"]
    assert read_channels(reader, bell, 20.0) == ["b1", "b2"]


def test_an_error_does_not_wait_for_the_other_channels_and_theirs_is_dropped() -> None:
    bell = bell_of(own_plan("error"), look_s=0.01)
    first, second = Queue(), Queue()
    reader = SynchronousReader([first, second])
    error = RayTaskError("f", "traceback", ValueError("told to"))
    second.values.append(error)
    assert read_channels(reader, bell, 20.0) == [error, error]
    first.values.extend(["stale", "next1"])
    second.values.append("next2")
    assert read_channels(reader, bell, 20.0) == ["next1", "next2"]


def test_a_closed_channel_and_the_end_of_the_time_are_raised() -> None:
    bell = bell_of(own_plan("closed"))
    queue = Queue()

    def close() -> None:
        queue.values.append(RayChannelError("closed"))
        bell.wake()

    threading.Timer(0.1, close).start()
    with pytest.raises(RayChannelError):
        read_channels(SynchronousReader([queue]), bell, 20.0)
    with pytest.raises(RayChannelTimeoutError):
        read_channels(SynchronousReader([queue]), bell, 0.05)
    with pytest.raises(RayChannelTimeoutError):
        read_channels(SynchronousReader([queue]), bell, 0)


def test_the_dead_and_the_deaf_cost_the_ringer_nothing() -> None:
    deaf = bell_of(own_plan("deaf"))
    ringer = bell_of(own_plan("ringer", deaf.plan.address, "nobody-has-this-address"))
    began = time.monotonic()
    for _ in range(2000):
        ringer.ring()
    assert time.monotonic() - began < 2.0
    deaf.close()
    ringer.ring()
    ringer.close()
    ringer.ring()
    for address in (deaf.plan.address, ringer.plan.address):
        assert address not in Path("/proc/net/unix").read_text()


def test_who_rings_whom_where_there_are_no_wires() -> None:
    config = ExecutorConfig(worker=WorkerSpec("a:B"), tensor_parallel_size=2, pipeline_parallel_size=2, wires=False)
    driver, workers = plan(config, ["n1", "n1", "n1", "n2"], "n1")
    ranks = [worker for worker in workers if worker is not None]
    assert driver.rings == (ranks[0].address, ranks[1].address)
    assert [rank.rings for rank in ranks] == [(ranks[2].address,), (), (driver.address,), ()]
    assert [driver.remote, *(rank.remote for rank in ranks)] == [True, False, False, False, True]
    assert [driver.company, *(rank.company for rank in ranks)] == [4, 4, 4, 4, 1]
    again, _ = plan(config, ["n1", "n1", "n1", "n2"], "n1")
    assert again.address != driver.address, "an epoch's bells must not be another's"
    driver, workers = plan(replace(config, wires=True), ["n1", "n1", "n1", "n2"], "n1")
    assert not any(one.rings for one in [driver, *workers] if one is not None)


def test_nobody_spins_where_that_takes_a_core_from_a_peer() -> None:
    crowded = bell_of(replace(own_plan("crowded"), company=os.cpu_count() or 1, busy_wait_ms=None))
    assert crowded.spin_s == 0.0
    crowded.waited_s = 0.05
    assert crowded.spin_s == 0.0
    never = bell_of(own_plan("never"))
    never.waited_s = 1e-4
    assert never.spin_s == 0.0, "0 is never"
    alone = bell_of(replace(own_plan("alone"), company=0, busy_wait_ms=None))
    assert alone.spin_s == 0.002
    assert 0 < usable_cores() <= (os.cpu_count() or 1)


def test_a_reader_spins_once_after_a_short_wait() -> None:
    bell = bell_of(replace(own_plan("short"), company=os.cpu_count() or 1, busy_wait_ms=None), look_s=0.01)
    slices: list[float | None] = []

    class Slow(Queue):
        def read(self, timeout: float | None = None) -> Any:
            slices.append(timeout)
            return super().read(timeout)

    first, second = Slow(), Slow()
    reader = SynchronousReader([first, second])
    first.values.append(1)
    second.values.append(1)
    read_channels(reader, bell, 20.0)
    assert slices == [0.0, 0.0], "nothing is known of how long it waits"
    assert bell.waited_s < 60.0, "now it is"
    bell.waited_s = 0.0009  # whatever this machine was busy with
    slices.clear()
    for queue in (first, second):
        threading.Timer(0.05, queue.values.append, [2]).start()
    read_channels(reader, bell, 20.0)
    assert slices[:2] == [0.001, 0.0], "one spin for both"
    assert set(slices[2:]) == {0.0}, "then it sleeps"
    slices.clear()
    first.values.append(3)
    second.values.append(3)
    read_channels(reader, bell, 20.0)
    assert slices == [0.0, 0.0], "the last wait was long"
