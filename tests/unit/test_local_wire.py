"""Messages within a node: real sockets, real threads, files in memory."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from test_wire import beside

from resilient_executor.local_wire import LocalInlet, LocalOutlet

LARGE = 5_000_000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def outlet() -> Iterator[LocalOutlet]:
    one = LocalOutlet(1)
    yield one
    one.close()


@pytest.fixture
def inlet(outlet: LocalOutlet) -> Iterator[LocalInlet]:
    one = LocalInlet(outlet.address, outlet.token, 5.0)
    yield one
    one.close()


def test_messages_of_all_sizes_come_whole_and_in_order(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    """The middle ones are about as long as a packet may be."""
    rng = random.Random(2)
    sizes = (0, 1, 9, 0, 32_767, 32_768, 32_769, 70_000, LARGE, 2)
    sent = [(rng.randrange(3), rng.randbytes(size)) for size in sizes]

    def send() -> None:
        for kind, payload in sent:
            outlet.send(kind, payload, 10.0)

    thread, result = beside(send)
    assert [inlet.receive(10.0) for _ in sent] == sent
    thread.join(10.0)
    assert result == [None]


def test_every_reader_gets_every_message_and_no_file_stays_open() -> None:
    before = open_files()
    outlet = LocalOutlet(3)
    inlets = [LocalInlet(outlet.address, outlet.token, 5.0) for _ in range(3)]
    large = random.Random(3).randbytes(LARGE)
    for payload in (b"one", large, b"two"):
        outlet.send(1, payload, 5.0)
        for inlet in inlets:
            assert inlet.receive(5.0) == (1, payload)
    for inlet in inlets:
        inlet.close()
    outlet.close()
    assert open_files() == before


def test_large_messages_wait_for_nobody(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    """More than a connection holds is on its way, and the writer goes on."""
    payload = bytes(LARGE)
    outlet.send(0, b"first", 5.0)
    assert inlet.receive(5.0) == (0, b"first")
    for _ in range(6):
        outlet.send(0, payload, 0.5)
    for _ in range(6):
        assert inlet.receive(5.0) == (0, payload)


def test_what_nobody_has_read_ends_with_the_connection(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    def shared_kib() -> int:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))

    before = shared_kib()
    for _ in range(4):
        outlet.send(0, bytes(50_000_000), 5.0)
    assert shared_kib() > before + 150_000
    inlet.close()
    outlet.close()
    deadline = time.monotonic() + 5.0
    while shared_kib() > before + 50_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_more_small_messages_than_it_holds_are_waited_for(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    numbers = list(range(2000))

    def send() -> None:
        for number in numbers:
            outlet.send(0, number.to_bytes(4, "big") * 1000, 10.0)

    thread, result = beside(send)
    time.sleep(0.1)
    assert thread.is_alive()
    assert [int.from_bytes(inlet.receive(10.0)[1][:4], "big") for _ in numbers] == numbers
    thread.join(10.0)
    assert result == [None]


def test_a_reader_that_takes_nothing_ends_the_wire(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    began = time.monotonic()

    def send_on() -> None:
        for _ in range(1000):
            outlet.send(0, bytes(30_000), 0.3)

    with pytest.raises(TimeoutError):
        send_on()
    assert time.monotonic() - began < 5.0
    with pytest.raises(ConnectionError):
        outlet.send(0, b"one reader may have got it, another not", 1.0)


def test_strangers_get_nothing_and_take_nobody_s_place(outlet: LocalOutlet) -> None:
    wrong = LocalInlet(outlet.address, b"x" * 16, 5.0)
    hasty = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hasty.connect(outlet.address)
    hasty.close()
    thread, result = beside(lambda: outlet.send(0, b"for the right one", 10.0))
    right = LocalInlet(outlet.address, outlet.token, 5.0)
    assert right.receive(10.0) == (0, b"for the right one")
    thread.join(5.0)
    assert result == [None]
    with pytest.raises(ConnectionError):
        wrong.receive(5.0)
    with pytest.raises(OSError, match="refused"):
        LocalInlet(outlet.address, outlet.token, 5.0)  # all are there: nobody listens any more
    wrong.close()
    right.close()


def test_what_was_sent_before_a_death_is_read_before_it_is_known(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    outlet.send(0, b"last words", 5.0)
    outlet.send(0, b"x" * LARGE, 5.0)
    outlet.close()
    assert inlet.receive(5.0) == (0, b"last words")
    assert inlet.receive(5.0) == (0, b"x" * LARGE)
    with pytest.raises(ConnectionError):
        inlet.receive(5.0)


def test_a_close_releases_whoever_waits(outlet: LocalOutlet, inlet: LocalInlet) -> None:
    lonely = LocalOutlet(1)
    waits = [beside(lambda: inlet.receive(None)), beside(lambda: lonely.send(0, b"", None))]
    time.sleep(0.1)
    assert all(thread.is_alive() for thread, _ in waits)
    began = time.monotonic()
    inlet.close()
    lonely.close()
    for thread, result in waits:
        thread.join(5.0)
        assert isinstance(result[0], ConnectionError)
    assert time.monotonic() - began < 3.0
