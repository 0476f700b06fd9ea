"""Messages between nodes: real sockets, real threads."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilient_executor import wire
from resilient_executor.wire import Inlet, Outlet

HOST = "127.0.0.1"
BIG = 20_000_000  # more than a connection holds on its way


@pytest.fixture
def outlet() -> Iterator[Outlet]:
    one = Outlet(HOST, 1)
    yield one
    one.close()


@pytest.fixture
def inlet(outlet: Outlet) -> Iterator[Inlet]:
    one = Inlet(outlet.address, outlet.token, 5.0)
    yield one
    one.close()


def beside(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run in a thread; what it returned or raised is in the list when the thread has ended."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except Exception as error:  # noqa: BLE001 - whatever it is
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def test_messages_of_all_sizes_come_whole_and_in_order(outlet: Outlet, inlet: Inlet) -> None:
    rng = random.Random(1)
    sent = [(rng.randrange(3), rng.randbytes(size)) for size in (0, 1, 9, 0, 70_000, 3_000_000, 2)]

    def send() -> None:
        for kind, payload in sent:
            outlet.send(kind, payload, 10.0)

    thread, result = beside(send)
    assert [inlet.receive(10.0) for _ in sent] == [(kind, bytearray(payload)) for kind, payload in sent]
    thread.join(10.0)
    assert result == [None]


def test_every_reader_gets_every_message() -> None:
    outlet = Outlet(HOST, 3)
    inlets = [Inlet(outlet.address, outlet.token, 5.0) for _ in range(3)]
    outlet.send(1, b"one", 5.0)
    outlet.send(0, b"two", 5.0)
    for inlet in inlets:
        assert [bytes(inlet.receive(5.0)[1]) for _ in range(2)] == [b"one", b"two"]
        inlet.close()
    outlet.close()


def test_a_look_takes_no_time_and_what_has_come_of_a_message_is_kept(outlet: Outlet, inlet: Inlet) -> None:
    with pytest.raises(TimeoutError):
        inlet.receive(0.0)
    payload = bytes(range(256)) * (BIG // 256)
    thread, result = beside(lambda: outlet.send(1, payload, 30.0))
    looks, deadline = 0, time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            kind, message = inlet.receive(0.0)
            break
        except TimeoutError:
            looks += 1
    assert (kind, bytes(message) == payload) == (1, True)
    assert looks > 0
    thread.join(5.0)
    assert result == [None]


def test_strangers_get_nothing_and_take_nobody_s_place(outlet: Outlet) -> None:
    wrong = Inlet(outlet.address, b"x" * 16, 5.0)
    hasty = socket.create_connection(outlet.address)  # type: ignore[arg-type]
    hasty.close()
    thread, result = beside(lambda: outlet.send(0, b"for the right one", 10.0))
    right = Inlet(outlet.address, outlet.token, 5.0)
    assert bytes(right.receive(10.0)[1]) == b"for the right one"
    thread.join(5.0)
    assert result == [None]
    with pytest.raises(ConnectionError):
        wrong.receive(5.0)
    with pytest.raises(OSError, match="refused"):
        Inlet(outlet.address, outlet.token, 5.0)  # all are there: nobody listens any more
    wrong.close()
    right.close()


def test_what_was_sent_before_a_death_is_read_before_it_is_known(outlet: Outlet, inlet: Inlet) -> None:
    outlet.send(0, b"last words", 5.0)
    outlet.close()
    assert bytes(inlet.receive(5.0)[1]) == b"last words"
    with pytest.raises(ConnectionError):
        inlet.receive(5.0)


def test_a_reader_that_is_gone_is_an_error_and_no_wait(outlet: Outlet, inlet: Inlet) -> None:
    outlet.send(0, b"one", None)
    inlet.close()

    def send_on() -> None:  # the first ones may still be taken by the kernel
        for _ in range(100):
            outlet.send(0, b"x" * 1000, None)
            time.sleep(0.01)

    with pytest.raises(ConnectionError):
        send_on()


def test_a_send_that_takes_too_long_ends_the_connection(outlet: Outlet, inlet: Inlet) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        outlet.send(0, bytes(BIG), 0.3)
    assert time.monotonic() - began < 2.0
    with pytest.raises(ConnectionError):
        outlet.send(0, b"the rest would be taken for something else", 1.0)
    with pytest.raises(ConnectionError):
        inlet.receive(5.0)  # half of it came, and no more will


def test_readers_that_do_not_come_are_waited_for_so_long(outlet: Outlet) -> None:
    with pytest.raises(TimeoutError, match="1 readers have not come"):
        outlet.send(0, b"", 0.2)


def waits_for_readers(outlet: Outlet, inlet: Inlet) -> Any:
    lonely = Outlet(HOST, 1)
    return lonely, lambda: lonely.send(0, b"", None)


def waits_for_room(outlet: Outlet, inlet: Inlet) -> Any:
    return outlet, lambda: outlet.send(0, bytes(BIG), None)


def waits_for_a_message(outlet: Outlet, inlet: Inlet) -> Any:
    outlet.send(0, b"", 5.0)
    inlet.receive(5.0)
    return inlet, lambda: inlet.receive(None)


@pytest.mark.parametrize("waits", [waits_for_readers, waits_for_room, waits_for_a_message])
def test_close_releases_whoever_waits(outlet: Outlet, inlet: Inlet, waits: Callable[..., Any]) -> None:
    end, wait = waits(outlet, inlet)
    thread, result = beside(wait)
    time.sleep(0.2)
    assert result == []
    end.close()
    thread.join(3.0)
    assert isinstance(result[0], ConnectionError)
    end.close()


def test_a_closed_end_has_no_descriptor_and_gives_nothing(outlet: Outlet, inlet: Inlet) -> None:
    assert inlet.fileno() >= 0
    inlet.close()
    assert inlet.fileno() == -1
    with pytest.raises(ConnectionError):
        inlet.receive(0.0)


def test_a_stranger_that_says_little_holds_nobody_up(outlet: Outlet) -> None:
    """Neither beyond the deadline, nor beyond a close."""
    stranger = socket.create_connection(outlet.address)  # type: ignore[arg-type]
    thread, result = beside(lambda: outlet.send(0, b"", None))
    for number in range(8):
        with contextlib.suppress(OSError):  # it has been shown out
            stranger.send(b"x")
        time.sleep(0.1)
        if number == 4:
            outlet.close()
    thread.join(3.0)
    assert isinstance(result[0], ConnectionError)
    other = Outlet(HOST, 1)
    hurried = socket.create_connection(other.address)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        other.send(0, b"", 0.3)
    assert time.monotonic() - began < 1.5
    for one in (stranger, hurried):
        one.close()


def test_nothing_is_sent_after_a_close_that_came_while_the_reader_did(
    outlet: Outlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = wire._receive_exactly

    def slow(*arguments: Any) -> bytes:
        said = real(*arguments)
        outlet.close()
        return said

    monkeypatch.setattr(wire, "_receive_exactly", slow)
    inlet = Inlet(outlet.address, outlet.token, 5.0)
    with pytest.raises(ConnectionError):
        outlet.send(0, b"nobody's", None)
    with pytest.raises(ConnectionError):
        inlet.receive(5.0)
    inlet.close()


def test_a_close_from_within_does_not_wait_for_itself(
    inlet: Inlet, outlet: Outlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may shut an executor down in the middle of a read."""

    def closed_meanwhile(deadline: float) -> Any:
        inlet.close()
        assert inlet.fileno() >= 0
        raise KeyboardInterrupt

    monkeypatch.setattr(inlet, "_receive", closed_meanwhile)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        inlet.receive(5.0)
    assert time.monotonic() - began < 3.0
    assert inlet.fileno() == -1
