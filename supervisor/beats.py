"""The agent's end of the heartbeats of its node: one beat to each worker, and the answers that come in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from resilient_executor.heart import Answer, Beat, address_of, decode_answer, encode_beat, open_socket, receive
from resilient_executor.protocol import ProcessIdentity


class Beats:
    """Asks the workers of one node. Belongs to one event loop."""

    def __init__(self) -> None:
        self._socket = open_socket()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_answers)
        #: Beats without an answer: nothing piles up at a worker that is silent.
        self._awaited: dict[ProcessIdentity, tuple[Beat, float]] = {}
        self._answers: dict[ProcessIdentity, Answer] = {}
        self._came = asyncio.Event()

    async def ask(self, beats: Mapping[ProcessIdentity, Beat], wait_s: float) -> dict[ProcessIdentity, Answer]:
        """Send a beat to each process that owes no answer to the same grantor, and wait, at most ``wait_s``.

        Returns:
            the answers that have come since the last call; one that is late is among those of a later call.
        """
        for process, beat in beats.items():
            owed = self._awaited.get(process)
            if owed is not None and (owed[0].epoch, owed[0].grantor) == (beat.epoch, beat.grantor):
                continue
            self._answers.pop(process, None)  # another grantor's
            try:
                self._socket.sendto(encode_beat(beat), address_of(process))
            except OSError as error:
                self._awaited.pop(process, None)
                self._answers[process] = Answer(beat.number, beat.grantor, refusal=str(error), reachable=False)
            else:
                self._awaited[process] = (beat, time.monotonic())
        deadline = time.monotonic() + wait_s
        while any(process in self._awaited for process in beats) and (left_s := deadline - time.monotonic()) > 0:
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), left_s)
            except asyncio.TimeoutError:
                break
        return {process: self._answers.pop(process) for process in beats if process in self._answers}

    def forget(self, process: ProcessIdentity) -> None:
        """It is gone, and owes nothing."""
        self._awaited.pop(process, None)
        self._answers.pop(process, None)
        self._came.set()

    def close(self) -> None:
        """Ask nobody any more."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    def _on_answers(self) -> None:
        now = time.monotonic()
        while True:
            try:
                message, sender = receive(self._socket)
            except BlockingIOError:
                break
            if not sender:
                continue
            try:
                answer = decode_answer(message)
            except (TypeError, ValueError):
                continue
            for process, (beat, sent_at) in self._awaited.items():
                if address_of(process) == sender:
                    if (beat.number, beat.grantor) == (answer.number, answer.grantor):
                        del self._awaited[process]
                        self._answers[process] = replace(answer, trip_s=now - sent_at)
                    break
        self._came.set()
