"""Messages from one process to a few others, over connections that the readers make.

This file has what is common, and what goes between nodes: TCP. Within a node see ``local_wire.py``.

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
TOKEN_BYTES: Final = 16
#: For somebody who has connected to say the token, in seconds.
_HELLO_S: Final = 2.0
#: The longest piece of a wait for somebody to connect, in seconds.
_SLICE_S: Final = 1.0


#: Host and port; within a node, a name.
Address = tuple[str, int] | bytes


def limit(timeout_s: float | None) -> float:
    """When a wait ends that may take so long, by the monotonic clock; None and -1 are for ever, as in Ray.

    Ray's loop in a worker waits so. It ends with :meth:`_End.close`, at the graph's end, or with its process: by
    fencing, or by its lease.
    """
    return math.inf if timeout_s is None or timeout_s == -1 else time.monotonic() + timeout_s


class _End:
    """What both ends have in common: any thread may close one, whoever is in a call on it is released.

    Descriptors are not closed under the feet of whoever uses them: their numbers may be somebody else's a moment later.
    """

    def __init__(self) -> None:
        self._in_use = threading.Lock()
        self._closed = threading.Event()

    def _sockets(self) -> list[socket.socket]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of all. From any thread, at any moment; twice is fine."""
        self._closed.set()
        for one in self._sockets():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # whoever is in a call on it returns
        # If not, whoever uses it closes it. That may be this very thread, below the handler of a signal.
        if self._in_use.acquire(timeout=_SLICE_S):
            try:
                self._close_sockets()
            finally:
                self._in_use.release()

    def _still_open(self) -> None:
        if self._closed.is_set():
            raise ConnectionError("closed")

    def _close_sockets(self) -> None:
        for one in self._sockets():
            one.close()

    def _close_if_told(self) -> None:
        """For whoever has used it last: :meth:`close` may have come meanwhile."""
        if self._closed.is_set():
            self._close_sockets()


class Outlet(_End):
    """The writer's end.

    Attributes:
        address: where readers connect.
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
        super().__init__()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listener, self.address = self._listen(host, readers + 16)
        self._readers = readers
        self._connections: list[socket.socket] = []
        #: Who has connected, and has not said the token yet.
        self._stranger: socket.socket | None = None

    def _listen(self, host: str, backlog: int) -> tuple[socket.socket, Address]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=backlog)
        return listener, listener.getsockname()[:2]

    def _sockets(self) -> list[socket.socket]:
        stranger = self._stranger
        return [self._listener, *self._connections, *([stranger] if stranger is not None else [])]

    def send(self, kind: int, payload: bytes, timeout_s: float | None) -> None:
        """Send one message to every reader, once all have come.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
            ConnectionError: a reader is gone, or this was closed.
            OSError: this process or node lacks something, descriptors for instance.

        Whatever is raised, the outlet is closed then: half a message may be out.
        """
        deadline = limit(timeout_s)
        with self._in_use:
            try:
                self._still_open()
                while len(self._connections) < self._readers:
                    self._let_in(deadline)
                self._send(kind, payload, deadline)
            except BaseException as error:
                told = self._closed.is_set()
                self._closed.set()
                if told and isinstance(error, OSError):  # what a descriptor says that was shut down meanwhile
                    raise ConnectionError("closed") from error
                raise
            finally:
                self._close_if_told()

    def _send(self, kind: int, payload: bytes, deadline: float) -> None:
        for connection in self._connections:
            _send_all(connection, [_HEADER.pack(len(payload), kind), payload], deadline)

    def _let_in(self, deadline: float) -> None:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError(f"{self._readers - len(self._connections)} readers have not come")
        self._listener.settimeout(min(left_s, _SLICE_S))
        try:
            stranger, _ = self._listener.accept()
        except TimeoutError:
            self._still_open()
            return
        if not self._trusts(stranger):
            stranger.close()
            return
        self._stranger, said = stranger, b""  # known to `close` before it is waited for
        self._still_open()
        with contextlib.suppress(OSError):
            said = _receive_exactly(stranger, TOKEN_BYTES, min(deadline, time.monotonic() + _HELLO_S))
        self._still_open()
        self._stranger = None
        if not hmac.compare_digest(said, self.token):
            stranger.close()
            return
        self._tune(stranger)
        self._connections.append(stranger)
        self._still_open()
        if len(self._connections) == self._readers:
            self._listener.close()

    def _trusts(self, stranger: socket.socket) -> bool:
        return True  # until the token is said, nobody knows who that is

    def _tune(self, connection: socket.socket) -> None:
        _tune(connection)


class Inlet(_End):
    """A reader's end. One thread reads at a time."""

    def __init__(self, address: Address, token: bytes, timeout_s: float) -> None:
        """Connect.

        Raises:
            OSError: the writer cannot be reached in time, or is gone.
        """
        super().__init__()
        self._socket = self._connect(address, timeout_s)
        try:
            self._socket.sendall(token)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._prepare()

    def _prepare(self) -> None:
        self._expect(_HEADER.size, None)

    def _connect(self, address: Address, timeout_s: float) -> socket.socket:
        connection = socket.create_connection(address, timeout=timeout_s)  # type: ignore[arg-type]  # host and port
        _tune(connection)
        return connection

    def _sockets(self) -> list[socket.socket]:
        return [self._socket]

    def _expect(self, size: int, kind: int | None) -> None:
        """What comes next: a header (no kind), or a message of this kind."""
        self._buffer, self._have, self._kind = bytearray(size), 0, kind

    def fileno(self) -> int:
        """For ``poll``; -1 when it is closed."""
        return self._socket.fileno()

    def receive(self, timeout_s: float | None) -> tuple[int, bytes | bytearray]:
        """The next message and its kind. What has come of one that is not complete in time is kept for the next call.

        Raises:
            TimeoutError: none within ``timeout_s`` seconds; 0 only looks.
            ConnectionError: the writer is gone, or this was closed.
        """
        deadline = limit(timeout_s)
        with self._in_use:
            try:
                self._still_open()
                return self._receive(deadline)
            finally:
                self._close_if_told()

    def _receive(self, deadline: float) -> tuple[int, bytes | bytearray]:
        while True:
            try:
                count = self._socket.recv_into(memoryview(self._buffer)[self._have :])
            except BlockingIOError:
                self._wait(deadline)
                continue
            if count == 0:
                raise ConnectionError("the other end has closed")
            self._have += count
            if self._have < len(self._buffer):
                continue
            message, kind = self._buffer, self._kind
            if kind is None:
                size, kind = _HEADER.unpack(message)
                self._expect(size, kind)
                if size > 0:
                    continue
                message = self._buffer
            self._expect(_HEADER.size, None)
            return kind, message

    def _wait(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no message")
        self._poll.poll(None if left_s == math.inf else left_s * 1e3)


def _tune(connection: socket.socket) -> None:
    """Small messages at once; and signs of life, so that no firewall forgets an idle engine's connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send_all(connection: socket.socket, parts: Sequence[bytes], deadline: float) -> None:
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


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (piece := connection.recv(size - len(received))):
            raise ConnectionError("closed")
        received += piece
    return received
