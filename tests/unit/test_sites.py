"""Which nodes are left out when some do not see each other."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import cast

import pytest

from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import WorkerStartError
from resilient_executor.lifecycle import Lifecycle
from resilient_executor.protocol import ProcessIdentity, WorkerInfo, WorkerSpec
from resilient_executor.sites import Sites
from resilient_executor.supervisor.client import Supervision
from resilient_executor.supervisor.links import Pair


class Looks:
    """In the place of the supervision: notes who is asked to look, and says what they see."""

    def __init__(self, cut: list[Pair], unfit: Iterable[str] = ()) -> None:
        self._cut, self._unfit = cut, frozenset(unfit)
        self.asked: list[set[str]] = []

    def unfit_nodes(self) -> frozenset[str]:
        return self._unfit

    def cut_pairs(self, nodes: Iterable[str]) -> list[Pair]:
        self.asked.append(set(nodes))
        return self._cut


def sites(looks: Looks) -> Sites:
    config = ExecutorConfig(worker=WorkerSpec("any:Worker"))
    return Sites(config, Lifecycle(), cast("Supervision", looks), "driver", threading.Event())


def info(node_id: str) -> WorkerInfo:
    return WorkerInfo(0, ProcessIdentity(1, 1, node_id), node_id, (), "")


GROUP = [info("a"), info("b")]


def test_what_the_supervisor_has_found_is_taken_without_a_look() -> None:
    ours = sites(looks := Looks([]))
    ours.look_for_cuts(GROUP, (Pair("a", "b"),))
    assert looks.asked == []
    assert ours._cut_off == {"b"}


def test_otherwise_the_nodes_are_asked_but_for_those_that_were_given_up() -> None:
    ours = sites(looks := Looks([Pair("b", "driver")], unfit=["a"]))
    ours.look_for_cuts(GROUP)
    assert looks.asked == [{"b"}]
    assert ours._cut_off == {"b"}, "never the driver's"
    sites(looks := Looks([], unfit=["a", "b"])).look_for_cuts(GROUP)
    assert looks.asked == []


def test_a_new_group_on_nodes_that_do_not_see_each_other_is_an_error_that_names_them() -> None:
    ours = sites(Looks([Pair("a", "b")]))
    with pytest.raises(WorkerStartError, match=r"no answer from each other: a and b"):
        ours.check_links(GROUP)
    assert ours._cut_off == {"b"}
    ours.begin()
    assert ours._cut_off == set()


@pytest.mark.parametrize(
    ("room_without", "avoided", "line"),
    [
        ({"a", "b"}, {"a", "b"}, "INFO nodes are left out: unfit: a; cut off: b"),
        ({"a"}, {"a"}, "WARNING nodes that were to be left out (unfit: a; cut off: b) are not: no room without b"),
        (set(), set(), "WARNING nodes that were to be left out (unfit: a; cut off: b) are not: no room without a, b"),
    ],
)
def test_the_choice_of_nodes_is_explained_once(
    room_without: set[str],
    avoided: set[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Room is a question to Ray, and answered here for it."""
    monkeypatch.setattr("resilient_executor.sites.has_room_without", lambda config, avoid: avoid <= room_without)
    ours = sites(Looks([], unfit=["a"]))
    ours.look_for_cuts(GROUP, (Pair("a", "b"),))
    with caplog.at_level("INFO", logger="resilient_executor.sites"):
        assert [ours._nodes_to_avoid() for _ in range(2)] == [avoided, avoided]
    assert [f"{record.levelname} {record.getMessage()}" for record in caplog.records] == [line]
