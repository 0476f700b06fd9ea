"""Heartbeats to the workers of one's own node, by datagrams, past Ray.

A call of Ray costs a millisecond of its sender's processor time, many times what the answer costs. So the supervisor
asks the workers of its node by datagrams, and calls one agent on each other node, which does the same. Each worker
listens at an abstract address (Linux) that follows from its process; it ends with the process, however that ends.
Datagrams between the processes of one machine are not lost: what cannot be delivered is the sender's error.

A thread of its own answers, so that neither a long step nor a long call is taken for death. Messages are JSON, not
pickles, and are believed from the same user and from root alone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from resilient_executor import processes
from resilient_executor.protocol import Phase, ProcessIdentity, Progress, StaleEpoch

logger = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_LONGEST: Final = 4096


@dataclass(frozen=True)
class Beat:
    """A heartbeat.

    Attributes:
        epoch: the generation that the sender takes the worker for.
        grantor: who renews the lease by it; see :class:`resilient_executor.lease.Lease`.
        number: of this beat, counted by the grantor from 1.
        heard: the newest beat whose answer the grantor has; 0 for none.
    """

    epoch: int
    grantor: str
    number: int
    heard: int


@dataclass(frozen=True)
class Answer:
    """What a worker says to a beat.

    Attributes:
        number: of the beat.
        grantor: of the beat.
        progress: where the worker is; None when it cannot or will not say, and ``refusal`` says why.
        trip_s: from the beat to the answer, as the agent saw it, in seconds.
        reachable: whether the beat could be delivered, and was answered before patience ran out.
    """

    number: int
    grantor: str
    progress: Progress | None = None
    refusal: str = ""
    trip_s: float = 0.0
    reachable: bool = True


def address_of(process: ProcessIdentity) -> bytes:
    """Where a worker listens: its pid may be another's some day, its time of birth will not."""
    return f"\0resilient-executor-heart-{process.pid}-{process.start_ticks}".encode()


def open_socket(address: bytes = b"") -> socket.socket:
    """A socket at ``address``, or at one that the kernel chooses; it learns who sends what it gets.

    Raises:
        OSError: the address is taken.
    """
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        opened.bind(address)
    except BaseException:
        opened.close()
        raise
    return opened


def receive(opened: socket.socket) -> tuple[Any, Any]:
    """The next message and its sender's address; (None, None) for one that is not to be believed.

    Raises:
        BlockingIOError: there is none, and the socket does not wait.
        OSError: the socket is closed.
    """
    data, ancillary, _, sender = opened.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
    users = [
        _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[1]
        for _, kind, value in ancillary
        if kind == socket.SCM_CREDENTIALS
    ]
    if not users or users[0] not in (0, os.getuid()):
        return None, None
    try:
        return json.loads(data), sender
    except ValueError:
        return None, None


def encode_beat(beat: Beat) -> bytes:
    """A beat as bytes."""
    return json.dumps(astuple(beat)).encode()


def decode_answer(message: Any) -> Answer:
    """The answer in a message.

    Raises:
        ValueError, TypeError: it is none.
    """
    number, grantor, fields, refusal = message
    if fields is None:
        return Answer(int(number), str(grantor), None, str(refusal))
    progress = Progress(*fields)
    progress = replace(progress, phase=Phase(progress.phase), failed_steps=tuple(progress.failed_steps))
    return Answer(int(number), str(grantor), progress)


class Heart:
    """A worker's end: answers until its process ends.

    Args:
        answer: gives the progress, and raises :class:`StaleEpoch` for another generation.
    """

    def __init__(self, answer: Callable[[Beat], Progress]) -> None:
        self._answer = answer
        try:
            self._socket = open_socket(address_of(processes.identify(os.getpid(), "")))
        except OSError as error:
            # The supervisor finds nobody there, and calls through Ray.
            logger.warning("no heartbeats by datagram: %s", error)
            return
        threading.Thread(target=self._beat, name="resilient-executor-heart", daemon=True).start()

    def _beat(self) -> None:
        while True:  # without a bound, on purpose: it ends with the process
            try:
                message, sender = receive(self._socket)
            except OSError as error:  # an engine has closed a descriptor that is not its own
                logger.warning("no heartbeats by datagram any more: %s", error)
                return
            if not sender:
                continue
            try:
                beat = Beat(*message)
                try:
                    said: list[Any] = [astuple(self._answer(beat)), ""]
                except StaleEpoch as error:
                    said = [None, str(error)]
                self._socket.sendto(json.dumps([beat.number, beat.grantor, *said]).encode(), sender)
            except Exception as error:  # noqa: BLE001 - whoever asked is gone, or is none of ours; a heart goes on
                logger.debug("a heartbeat without an answer: %s: %s", type(error).__name__, error)
