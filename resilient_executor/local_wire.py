"""Messages from one process to a few others of its node: sequenced packets over Unix sockets.

A small message is one packet. A large one is a file in memory, written once for all readers, and the packet carries its
descriptor: so nobody waits for a reader to take in a large message, and what a dead reader has not read ends with its
connection. Nothing of this has a name that could outlive its processes: the sockets' addresses are abstract (Linux).
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from resilient_executor.wire import Address, Inlet, Outlet, limit

#: The largest message that is sent as a packet, in bytes: a connection holds several of them on their way.
_PACKET: Final = 32_768
#: In place of a kind: the message is in a file, whose descriptor comes with this packet.
_FILED: Final = 255
#: Kind and size of a message in a file.
_FILE: Final = struct.Struct("=BBQ")
_KINDS: Final = [bytes([kind]) for kind in range(_FILED)]
_FDS: Final = struct.Struct("i")


class LocalOutlet(Outlet):
    """The writer's end."""

    def __init__(self, readers: int) -> None:
        """Listen.

        Raises:
            OSError: there are no sockets to be had.
        """
        super().__init__("", readers)

    def _listen(self, host: str, backlog: int) -> tuple[socket.socket, Address]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(b"\0resilient-executor-wire-" + secrets.token_hex(12).encode())
            listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
        return listener, listener.getsockname()

    def _tune(self, connection: socket.socket) -> None:
        connection.setblocking(False)

    def _send(self, kind: int, payload: bytes, deadline: float) -> None:
        if len(payload) <= _PACKET:
            parts: Sequence[bytes] = (_KINDS[kind], payload)
            for connection in self._connections:
                try:
                    connection.sendmsg(parts)
                except BlockingIOError:
                    _send_patiently(connection, parts, (), deadline)
            return
        file = _filed(payload)
        try:
            parts, rights = (_FILE.pack(_FILED, kind, len(payload)),), _rights(file)
            for connection in self._connections:
                _send_patiently(connection, parts, rights, deadline)
        finally:
            os.close(file)


class LocalInlet(Inlet):
    """A reader's end. One thread reads at a time."""

    def _connect(self, address: Address, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout_s)
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        self._packet = bytearray(_PACKET + 1)
        self._view = memoryview(self._packet)
        self._ancillary = socket.CMSG_LEN(_FDS.size)

    def receive(self, timeout_s: float | None) -> tuple[int, bytes | bytearray]:
        """The next message and its kind.

        Raises:
            TimeoutError: none within ``timeout_s`` seconds; 0 only looks.
            ConnectionError: the writer is gone, or this was closed.
        """
        deadline = 0.0 if timeout_s == 0 else limit(timeout_s)
        with self:
            while True:
                try:
                    size, rights, _, _ = self._socket.recvmsg_into(
                        (self._packet,), self._ancillary, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    self._wait(deadline)
                    continue
                if size == 0:
                    raise ConnectionError("the other end has closed")
                kind = self._packet[0]
                if kind != _FILED:
                    return kind, bytes(self._view[1:size])
                _, kind, length = _FILE.unpack_from(self._packet)
                return kind, _read_file(rights, length)


def _filed(payload: bytes) -> int:
    """A file in memory with this in it."""
    file = os.memfd_create("resilient-executor", os.MFD_CLOEXEC)
    try:
        left = memoryview(payload)
        while left:
            left = left[os.write(file, left) :]
    except BaseException:
        os.close(file)
        raise
    return file


def _read_file(rights: Sequence[tuple[int, int, bytes]], length: int) -> bytes:
    """What is in the file that came with a packet."""
    files = [_FDS.unpack(data[: _FDS.size])[0] for _, kind, data in rights if kind == socket.SCM_RIGHTS]
    try:
        if len(files) != 1:
            raise ConnectionError("a large message came without its file: too many are open")
        payload = os.pread(files[0], length, 0)
        while len(payload) < length:  # the kernel gives 2 GiB at once
            if not (piece := os.pread(files[0], length - len(payload), len(payload))):
                raise ConnectionError("a large message is shorter than was said")
            payload += piece
        return payload
    finally:
        for file in files:
            os.close(file)


def _rights(file: int) -> Sequence[tuple[int, int, bytes]]:
    return ((socket.SOL_SOCKET, socket.SCM_RIGHTS, _FDS.pack(file)),)


def _send_patiently(
    connection: socket.socket, parts: Sequence[bytes], rights: Sequence[tuple[int, int, bytes]], deadline: float
) -> None:
    """Send one packet to a reader that has not taken earlier ones yet."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while True:
        try:
            connection.sendmsg(parts, rights)
            return
        except BlockingIOError:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the reader takes nothing") from None
            poll.poll(min(left_s, 1.0) * 1e3)
