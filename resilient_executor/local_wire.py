"""Messages from one process to a few others of its node: sequenced packets over Unix sockets.

A small message is one packet. A large one is a file in memory, written once for all readers, and the packet carries its
descriptor: so nobody waits for a reader to take in a large message, and what a dead reader has not read ends with its
connection. Nothing of this has a name that could outlive its processes: the sockets' addresses are abstract (Linux).
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from resilient_executor.wire import Address, Inlet, Outlet

#: The largest message that is sent as a packet, in bytes: a connection holds several of them on their way.
_PACKET: Final = 32_768
#: In place of a kind: the message is in a file, whose descriptor comes with this packet.
_FILED: Final = 255
#: Kind and size of a message in a file.
_FILE: Final = struct.Struct("=BBQ")
_KINDS: Final = [bytes([kind]) for kind in range(_FILED)]
_FDS: Final = struct.Struct("i")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
#: Bytes on their way that a connection is to hold; the kernel counts more than the messages'.
_HELD: Final = 1 << 19
#: Before something is tried again that depends on other processes, in seconds.
_PAUSE_S: Final = 0.005


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

    def _trusts(self, stranger: socket.socket) -> bool:
        return _is_ours(stranger)

    def _tune(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HELD)
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
        deadline = time.monotonic() + timeout_s
        try:
            connection.setblocking(False)
            while True:
                try:
                    connection.connect(address)
                    break
                except BlockingIOError:  # others stand in line
                    if time.monotonic() > deadline:
                        raise TimeoutError("the writer lets nobody in") from None
                    time.sleep(_PAUSE_S)
            if not _is_ours(connection):
                raise ConnectionError("somebody else listens there")
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        self._packet = bytearray(_PACKET + 1)
        self._view = memoryview(self._packet)
        self._ancillary = socket.CMSG_LEN(_FDS.size)

    def _receive(self, deadline: float) -> tuple[int, bytes | bytearray]:
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


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is of this user, or of root."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(said)[1] in (0, os.getuid())


def _read_file(rights: Sequence[tuple[int, int, bytes]], length: int) -> bytes | bytearray:
    """What is in the file that came with a packet."""
    files = [_FDS.unpack(data[: _FDS.size])[0] for _, kind, data in rights if kind == socket.SCM_RIGHTS]
    try:
        if len(files) != 1:
            raise OSError(errno.EMFILE, "a large message came without its file: this process has too many open")
        if len(whole := os.pread(files[0], length, 0)) == length:
            return whole
        payload = bytearray(length)  # the kernel gives 2 GiB at once
        left, at = memoryview(payload), 0
        while at < length:
            count = os.preadv(files[0], [left[at:]], at)
            if count == 0:
                raise OSError(errno.EIO, "a large message is shorter than was said")
            at += count
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
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                raise
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the reader takes nothing") from None
            if error.errno == errno.ETOOMANYREFS:  # this user's descriptors that are on their way, to whomever
                time.sleep(_PAUSE_S)
            else:
                poll.poll(min(left_s, 1.0) * 1e3)
