"""Messages from one process to a few on other nodes: TCP connections that the readers make.

The writer listens from the moment a channel is made, so whoever has its address can connect at once. A reader says the
channel's token first; who does not know it gets nothing. When as many have come as there are readers, nobody else is
let in, and a connection that is lost is never made again: a channel belongs to one graph, and that to one epoch.

What keeps a message on its way is the kernel's; nobody else holds it, and nobody but its two ends waits for it.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

#: Length of the message and its kind.
_HEADER: Final = struct.Struct("!QB")
_TOKEN_BYTES: Final = 16
#: For somebody who has connected to say the token, in seconds.
_HELLO_S: Final = 2.0
#: The longest piece of a wait for somebody to connect, in seconds.
_SLICE_S: Final = 1.0


def limit(timeout_s: float | None) -> float:
    """When a wait ends that may take so long, by the monotonic clock; None and -1 are for ever, as in Ray."""
    return math.inf if timeout_s is None or timeout_s == -1 else time.monotonic() + timeout_s


class Outlet:
    """The writer's end.

    Attributes:
        address: host and port where readers connect.
        token: what they have to say.
    """

    def __init__(self, host: str, readers: int) -> None:
        """Listen.

        Args:
            host: an address of this node, under which the readers' nodes reach it.
            readers: how many there will be.

        Raises:
            OSError: that address cannot be listened at.
        """
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=readers + 16)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._readers = readers
        self._connections: list[socket.socket] = []
        self._closed = threading.Event()

    def send(self, kind: int, payload: bytes, timeout_s: float | None) -> None:
        """Send one message to every reader, once all have come.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds; the outlet is closed then, for half a message may be out.
            ConnectionError: a reader is gone, or this was closed.
        """
        deadline = limit(timeout_s)
        try:
            while len(self._connections) < self._readers:
                self._let_in(deadline)
            for connection in self._connections:
                _send(connection, [_HEADER.pack(len(payload), kind), payload], deadline)
        except TimeoutError:
            self.close()
            raise
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def _let_in(self, deadline: float) -> None:
        if self._closed.is_set():
            raise ConnectionError("closed")
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError(f"{self._readers - len(self._connections)} readers have not come")
        self._listener.settimeout(min(left_s, _SLICE_S))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        connection.settimeout(_HELLO_S)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(_receive_exactly(connection, _TOKEN_BYTES), self.token):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.append(connection)
                if len(self._connections) == self._readers:
                    self._listener.close()
                return
        connection.close()

    def close(self) -> None:
        """Let go of all; whoever waits in :meth:`send` is released. From any thread; twice is fine."""
        self._closed.set()
        for one in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # whoever is in a call on it returns
            one.close()


class Inlet:
    """A reader's end. One thread reads at a time; any may close."""

    def __init__(self, address: tuple[str, int], token: bytes, timeout_s: float) -> None:
        """Connect.

        Raises:
            OSError: the writer cannot be reached in time, or is gone.
        """
        self._socket = socket.create_connection(address, timeout=timeout_s)
        try:
            self._socket.sendall(token)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._in_use = threading.Lock()
        self._closed = False
        self._expect(_HEADER.size, None)

    def _expect(self, size: int, kind: int | None) -> None:
        """What comes next: a header (no kind), or a message of this kind."""
        self._buffer, self._have, self._kind = bytearray(size), 0, kind

    def fileno(self) -> int:
        """For ``poll``; -1 when it is closed."""
        return self._socket.fileno()

    def receive(self, timeout_s: float | None) -> tuple[int, bytearray]:
        """The next message and its kind. What has come of one that is not complete in time is kept for the next call.

        Raises:
            TimeoutError: none within ``timeout_s`` seconds; 0 only looks.
            ConnectionError: the writer is gone, or this was closed.
        """
        deadline = limit(timeout_s)
        with self._in_use:
            while True:
                try:
                    count = 0 if self._closed else self._socket.recv_into(memoryview(self._buffer)[self._have :])
                except BlockingIOError:
                    self._wait(deadline)
                    continue
                if count == 0:
                    raise ConnectionError("the other end has closed")
                self._have += count
                if self._have < len(self._buffer):
                    continue
                message, kind = self._buffer, self._kind
                if kind is not None:
                    self._expect(_HEADER.size, None)
                    return kind, message
                size, kind = _HEADER.unpack(message)
                if size == 0:
                    self._expect(_HEADER.size, None)
                    return kind, bytearray()
                self._expect(size, kind)

    def _wait(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no message")
        self._poll.poll(None if left_s == math.inf else left_s * 1e3)

    def close(self) -> None:
        """Let go; whoever waits in :meth:`receive` is released. From any thread; twice is fine."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Not under the feet of whoever reads: the descriptor's number may be somebody else's a moment later.
        with self._in_use:
            self._socket.close()


def _send(connection: socket.socket, parts: Sequence[bytes], deadline: float) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the reader takes nothing")
        connection.settimeout(None if remaining_s == math.inf else remaining_s)
        sent = connection.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left:
            left[0] = left[0][sent:]


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (piece := connection.recv(size - len(received))):
            raise ConnectionError("closed")
        received += piece
    return received
