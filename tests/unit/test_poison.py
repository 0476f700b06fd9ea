from __future__ import annotations

import signal
import threading
import time

import pytest

from resilient_executor import Cause, CauseKind, Incident
from resilient_executor.poison import Quarantine, await_cause, died_in_rebuild

KILLED = Cause(CauseKind.PROCESS_EXIT, signal=signal.SIGKILL)
SEGFAULT = Cause(CauseKind.PROCESS_EXIT, signal=signal.SIGSEGV)
EXIT = Cause(CauseKind.PROCESS_EXIT, exit_code=1)


def suspects(quarantine: Quarantine) -> list[str]:
    """All of them, each cleared in its turn."""
    found = []
    while (name := quarantine.on_trial) is not None:
        found.append(name)
        quarantine.forget(name)
    return found


def test_twice_at_the_same_point_makes_suspects_newest_first() -> None:
    quarantine = Quarantine(2)
    assert quarantine.died([("old", 9), ("new", 0)], None) is None
    assert quarantine.on_trial is None
    quarantine.died([("old", 9), ("new", 0)], None)
    assert suspects(quarantine) == ["new", "old"]


def test_whoever_gets_on_between_two_deaths_is_no_suspect() -> None:
    quarantine = Quarantine(2)
    quarantine.died([("fine", 3), ("stuck", 3)], None)
    quarantine.died([("fine", 4), ("stuck", 3)], None)
    assert suspects(quarantine) == ["stuck"]


@pytest.mark.parametrize("cause", [SEGFAULT, EXIT])
def test_one_death_alone_convicts_if_the_process_ended_by_itself(cause: Cause) -> None:
    quarantine = Quarantine(2)
    for _ in range(2):
        quarantine.died([("innocent", 5), ("poison", 0)], cause)
    assert quarantine.on_trial == "poison"
    assert quarantine.died([("poison", 0)], cause) == "poison"
    assert quarantine.on_trial is None, "nobody else is suspected any more"


@pytest.mark.parametrize("cause", [KILLED, None, Cause(CauseKind.FROZEN)])
def test_a_kill_from_outside_may_be_a_coincidence(cause: Cause | None) -> None:
    quarantine = Quarantine(2)
    for _ in range(2):
        quarantine.died([("innocent", 5), ("poison", 0)], cause)
    for _ in range(3):
        assert quarantine.died([("poison", 0)], cause) is None
        assert quarantine.on_trial == "poison"
    assert quarantine.died([("poison", 0)], cause) == "poison"


def test_one_token_alone_clears() -> None:
    quarantine = Quarantine(2)
    for _ in range(2):
        quarantine.died([("a", 5), ("b", 5)], None)
    assert not quarantine.progressed("b", 5)
    assert quarantine.progressed("b", 6)
    assert quarantine.on_trial == "a"
    quarantine.forget("a")
    assert quarantine.on_trial is None


def test_a_lost_node_is_nobodys_fault() -> None:
    quarantine = Quarantine(1)
    quarantine.died([("a", 0)], Cause(CauseKind.NODE_LOSS))
    assert quarantine.on_trial is None


def test_it_can_be_switched_off() -> None:
    quarantine = Quarantine(0)
    for _ in range(9):
        assert quarantine.died([("a", 0)], SEGFAULT) is None
    assert quarantine.on_trial is None


def test_a_cause_is_waited_for_even_before_there_is_an_incident() -> None:
    """The step is lost first, the incident opened then, and its cause known at last."""
    incidents: list[Incident] = []
    cause = Cause(CauseKind.PROCESS_EXIT, signal=6)

    def happen() -> None:
        time.sleep(0.05)
        incidents.extend([Incident(1, 3, 0.0, Cause(CauseKind.FROZEN)), Incident(2, 4, 0.0)])
        time.sleep(0.05)
        incidents[1].cause = cause

    thread = threading.Thread(target=happen)
    thread.start()
    assert await_cause(lambda: incidents, epoch=4, timeout_s=5.0) is cause
    thread.join()
    assert await_cause(lambda: incidents, epoch=5, timeout_s=0.05) is None


def test_a_killer_who_strikes_in_rebuilds_too_makes_nobody_guilty() -> None:
    """Kills from outside that hit one request again and again are coincidences then, however many."""
    quarantine = Quarantine(suspect_after=2)
    for _ in range(2):
        assert quarantine.died([("a", 0)], KILLED) is None
    assert quarantine.on_trial == "a"
    for _ in range(20):
        assert quarantine.died([("a", 0)], KILLED, stormy=True) is None
    assert quarantine.died([("a", 0)], SEGFAULT, stormy=True) == "a", "a crash of its own doing proves it all the same"


def test_which_rebuilds_were_stormy() -> None:
    calm, stormy = Incident(1, 1, 0.0, epochs_tried=[2]), Incident(2, 2, 0.0, epochs_tried=[3, 4, 5])
    assert [died_in_rebuild([calm, stormy], epoch) for epoch in range(1, 6)] == [False, False, False, False, True]
