"""The control-plane journal keeps what must be replayed, in order."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from resilient_executor.journal import Journal, JournalEntry, RpcPolicy

ENTRIES = st.builds(
    JournalEntry,
    method=st.sampled_from(["load", "tune"]),
    name=st.sampled_from(["load", "tune"]),
    arguments=st.binary(max_size=2),
    per_rank=st.none() | st.tuples(st.binary(max_size=1), st.binary(max_size=1)),
    key=st.none() | st.sampled_from(["a", "b", "0", "1"]),
)


def entry(name: str, key: str | None = None) -> JournalEntry:
    return JournalEntry(name, name, b"", key=key)


@given(st.lists(st.tuples(st.just("record"), ENTRIES) | st.tuples(st.just("forget"), st.sampled_from("ab01"))))
def test_the_journal_is_a_list_with_replacement(operations: list[tuple[str, JournalEntry | str]]) -> None:
    journal, model = Journal(), list[JournalEntry]()
    for _, operand in operations:
        if isinstance(operand, JournalEntry):
            journal.record(operand)
            model = [e for e in model if e.key is None or e.key != operand.key] + [operand]
        else:
            assert journal.forget(operand) == any(e.key == operand for e in model)
            model = [e for e in model if e.key != operand]
        assert list(journal) == model
        assert len(journal) == len(model)


def test_the_same_call_without_a_key_is_kept_twice() -> None:
    journal = Journal()
    journal.record(entry("add_adapter"))
    journal.record(entry("add_adapter"))
    assert len(journal) == 2


def test_recording_during_a_replay_does_not_disturb_it() -> None:
    journal = Journal()
    journal.record(entry("a", key="k"))
    journal.record(entry("b"))
    seen = []
    for one in journal:
        seen.append(one.name)
        journal.record(entry("late", key="k"))
    assert seen == ["a", "b"]
    assert [e.name for e in journal] == ["b", "late"]


def test_entries_and_policies_cross_processes() -> None:
    one = entry("a", key="k")
    assert pickle.loads(pickle.dumps(one)) == one
    assert RpcPolicy("journal") is RpcPolicy.JOURNAL
