"""The near end of the heartbeats of one node: one beat to each worker, and the answers that come in time.

An agent has it, and the supervisor for its own node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from resilient_executor.heart import Answer, Beat, address_of, decode_answer, encode_beat, open_socket, receive
from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor.calls import within


class Beats:
    """Asks the workers of one node. Belongs to one event loop."""

    def __init__(self) -> None:
        self._socket = open_socket()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_answers)
        #: Beats without an answer: nothing piles up at a worker that is silent.
        self._awaited: dict[ProcessIdentity, tuple[Beat, float]] = {}
        #: The newest answer of each that nobody has taken yet.
        self._answers: dict[ProcessIdentity, Answer] = {}
        self._came = asyncio.Event()

    async def ask(
        self, beats: Mapping[ProcessIdentity, Beat], wait_s: float, patience_s: float
    ) -> dict[ProcessIdentity, Answer]:
        """Send a beat to each process that owes no answer to the same grantor, and wait, at most ``wait_s``.

        Args:
            beats: for whom, and what.
            wait_s: seconds.
            patience_s: who has owed an answer for longer counts as out of reach on this way: another may be asked.

        Returns:
            the answers to this grantor that have come since its last call, in it or between the two.
        """
        self._on_answers()  # after a pause they lie there, and nobody is to be given up for that
        now = time.monotonic()
        for process, beat in beats.items():
            kept = self._answers.get(process)
            if kept is not None and kept.grantor != beat.grantor:
                del self._answers[process]
            owed = self._awaited.get(process)
            if owed is not None and (owed[0].epoch, owed[0].grantor) == (beat.epoch, beat.grantor):
                if now - owed[1] > patience_s:
                    self._give_up(process, beat, f"no answer for {now - owed[1]:.1f} s")
                continue
            try:
                self._socket.sendto(encode_beat(beat), address_of(process))
            except OSError as error:
                self._give_up(process, beat, str(error))
            else:
                self._awaited[process] = (beat, now)
        deadline = now + wait_s
        while any(process in self._awaited for process in beats) and (left_s := deadline - time.monotonic()) > 0:
            self._came.clear()
            try:
                await within(self._came.wait(), left_s)
            except asyncio.TimeoutError:
                break
        return {
            process: self._answers.pop(process)
            for process, beat in beats.items()
            if process in self._answers and self._answers[process].grantor == beat.grantor
        }

    def _give_up(self, process: ProcessIdentity, beat: Beat, why: str) -> None:
        self._awaited.pop(process, None)
        self._answers[process] = Answer(beat.number, beat.grantor, refusal=why, reachable=False)

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
