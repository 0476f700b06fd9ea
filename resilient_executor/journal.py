"""The control-plane journal: calls that have changed the workers' state, and must be replayed on new workers. Pure.

The executor owns one journal and touches it under its own lock; nothing here is safe for threads by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class RpcPolicy(str, enum.Enum):
    """What becomes of a collective RPC when the epoch that it runs in dies."""

    #: Never repeated: the caller gets ``RpcLost``, and decides.
    ONCE = "once"
    #: Changes nothing in the workers: repeated after the rebuild if it was lost in flight, and then forgotten.
    READ = "read"
    #: Changes the workers' state: repeated if it was lost in flight, and replayed on the workers of every later epoch,
    #: in the order of the first time.
    JOURNAL = "journal"


@dataclass(frozen=True)
class JournalEntry:
    """One call, as it was sent.

    Attributes:
        method: a name, or a cloudpickled callable.
        name: for people: the method's name in logs and errors.
        arguments: pickled ``(args, kwargs)``, the same for all ranks.
        per_rank: pickled ``(args, kwargs)`` by rank, in place of ``arguments``; None for a call that is the same for
            all ranks.
        key: calls with the same key replace each other (the last ``set_log_level`` is the one that counts); None keeps
            every call.
    """

    method: str | bytes
    name: str
    arguments: bytes
    per_rank: tuple[bytes, ...] | None = None
    key: str | None = None


class Journal:
    """Entries in the order in which they must be replayed."""

    def __init__(self) -> None:
        # A dict keeps its order, and finds a key without a search. Entries without a key get a number.
        self._entries: dict[str | int, JournalEntry] = {}
        self._next_number = 0

    def record(self, entry: JournalEntry) -> None:
        """Append ``entry``. An earlier one with the same key is dropped: the new one stands at the end."""
        slot: str | int
        if entry.key is None:
            slot = self._next_number
            self._next_number += 1
        else:
            slot = entry.key
            self._entries.pop(slot, None)
        self._entries[slot] = entry

    def forget(self, key: str) -> bool:
        """Drop the entry with this key; returns whether there was one."""
        return self._entries.pop(key, None) is not None

    def __iter__(self) -> Iterator[JournalEntry]:
        """Iterate over a snapshot, so that a replay is not disturbed by what is recorded meanwhile."""
        return iter(tuple(self._entries.values()))

    def __len__(self) -> int:
        """Return the number of calls that a new epoch replays."""
        return len(self._entries)
