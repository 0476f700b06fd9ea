"""The judge: reads a history and says what is wrong with it. Pure, and knows nothing of the run but its history.

That nothing was raised proves nothing. A history that is not whole is not believed.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from resilient_executor.chaos.faults import mark
from resilient_executor.chaos.recorder import Line, of_kind

#: What an undisturbed executor may follow with.
TRANSITIONS: Final[Mapping[str, frozenset[str]]] = {
    "STARTING": frozenset({"HEALTHY", "RECOVERING", "FAILED", "STOPPED"}),
    "HEALTHY": frozenset({"SUSPECT", "RECOVERING", "FAILED", "STOPPED"}),
    "SUSPECT": frozenset({"HEALTHY", "RECOVERING", "FAILED", "STOPPED"}),
    "RECOVERING": frozenset({"HEALTHY", "FAILED", "STOPPED"}),
    "FAILED": frozenset({"STOPPED"}),
    "STOPPED": frozenset(),
}
#: Phases that no rebuild can do without.
REBUILD: Final = frozenset({"fence", "tear_down", "place", "spawn", "compile", "warm_up"})
#: Clocks of one machine, and a line that is written a little after what it tells.
SLACK_S: Final = 0.5
#: An incident may have its cause so long before it where nothing else bounds it: a silent worker, a stalled step.
MOST_DETECT_S: Final = 90.0
#: Growth of the driver that is its own affair, and what each rebuild may leave (0.2 MB were measured).
GROWTH_MB: Final = 40.0
GROWTH_EPOCH_MB: Final = 0.4


@dataclass
class FaultReport:
    """What became of one fault. Times are seconds; None where there was nothing to time."""

    number: int
    text: str
    at: float
    felt: bool = False
    survived: bool = True
    detection_s: float | None = None
    outage_s: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class Verdict:
    """The judgement of a history.

    Attributes:
        problems: everything that is wrong, one line each; empty for a clean history.
    """

    problems: list[str] = field(default_factory=list)
    requests: int = 0
    requests_failed: int = 0
    tokens: int = 0
    tokens_lost: int = 0
    tokens_repeated: int = 0
    tokens_changed: int = 0
    faults: list[FaultReport] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def survived(self) -> int:
        """Faults that were survived."""
        return sum(fault.survived for fault in self.faults)

    def headline(self) -> str:
        """One line."""
        return (
            f"{len(self.faults)} faults, {self.survived} survived; {self.requests} requests, {self.requests_failed} "
            f"failed; {self.tokens} tokens, {self.tokens_lost} lost, {self.tokens_repeated} repeated, "
            f"{self.tokens_changed} changed; {len(self.leaks)} leaks"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, the numbers that everyone asks for first."""
        data = asdict(self)
        reports = data.pop("faults")
        return {"clean": self.clean, "faults": len(self.faults), "survived": self.survived, **data, "reports": reports}


def check(history: Sequence[Line]) -> Verdict:
    """Judge a history."""
    verdict = Verdict()
    _whole(history, verdict)
    _requests(history, verdict)
    _states(history, verdict)
    _incidents(history, verdict)
    _faults(history, verdict)
    _calls(history, verdict)
    _health(history, verdict)
    _leaks(history, verdict)
    return verdict


# -- the history itself ------------------------------------------------------------------------------------------------


def _whole(history: Sequence[Line], verdict: Verdict) -> None:
    wrong = verdict.problems
    numbers = [line.get("n") for line in history]
    if numbers != list(range(len(history))):
        wrong.append("lines are missing, doubled or out of order: the history is not whole")
    if any(later["t"] < earlier["t"] - SLACK_S for earlier, later in pairwise(history)):
        wrong.append("the clock runs backwards in it")
    if [line["kind"] for line in history[:1]] != ["run"] or len(of_kind(history, "run")) != 1:
        wrong.append("it does not begin with one head")
    if [line["kind"] for line in history[-1:]] != ["stop"] or len(of_kind(history, "stop")) != 1:
        wrong.append("it has no end: whoever wrote it was cut off")
    faults = [line["number"] for line in of_kind(history, "fault")]
    if len(set(faults)) != len(faults):
        wrong.append("a fault is told twice")


# -- requests and tokens -----------------------------------------------------------------------------------------------


def _requests(history: Sequence[Line], verdict: Verdict) -> None:
    wrong = verdict.problems
    oracle: dict[str, Line] = {}
    for line in of_kind(history, "oracle"):
        if str(line["workload"]) in oracle:
            wrong.append(f"workload {line['workload']} has two oracles")
        oracle[str(line["workload"])] = line
    marks = [mark(line["number"]) for line in of_kind(history, "fault") if line["expect"] == "fails"]
    taken: dict[str, Line] = {}
    got: dict[str, list[Line]] = {}
    ends: dict[str, Line] = {}
    for line in history:
        kind, request = line["kind"], line.get("id", "")
        if kind == "request":
            if request in taken:
                wrong.append(f"{request} was taken in twice")
            taken[request], got[request] = line, got.get(request, [])
        elif kind in ("token", "end"):
            if request not in taken:
                wrong.append(f"{request}: a {kind} before it was taken in")
                continue
            if request in ends:
                wrong.append(f"{request}: a {kind} after its end")
            if kind == "token":
                got[request].append(line)
            else:
                ends[request] = line
    if not taken:
        wrong.append("no request was served: nothing is proven")
    for workload in sorted(oracle.keys() - {str(line["workload"]) for line in taken.values()}):
        wrong.append(f"workload {workload} was never asked for")
    verdict.requests = len(taken)
    for request, line in taken.items():
        want = oracle.get(str(line["workload"]))
        if want is None:
            wrong.append(f"{request}: there is no oracle for workload {line['workload']}")
        elif request not in ends:
            wrong.append(f"{request} never ended: lost")
            verdict.requests_failed += 1
        else:
            _request(request, want, got[request], ends[request], marks, verdict)


def _request(request: str, want: Line, got: Sequence[Line], end: Line, marks: Sequence[str], verdict: Verdict) -> None:
    wrong = verdict.problems
    expected, tokens = want["tokens"], [line["token"] for line in got]
    verdict.tokens += len(tokens)
    failed = bool(end.get("error")) or end["finish"] == "error"
    if failed:
        if any(one in end.get("error", "") for one in marks):
            expected = expected[: len(tokens)]  # that was the fault's to end; until then it must be right
        else:
            verdict.requests_failed += 1
            wrong.append(f"{request} failed: {end.get('error') or 'no reason given'}")
    elif end["finish"] != want["finish"]:
        wrong.append(f"{request} ended with {end['finish']!r}, not {want['finish']!r}")
    lost, repeated, changed, first = compare(expected, tokens)
    verdict.tokens_lost += lost
    verdict.tokens_repeated += repeated
    verdict.tokens_changed += changed
    if lost or repeated or changed:
        wrong.append(f"{request}: {lost} tokens lost, {repeated} repeated, {changed} changed, first at {first}")
    if [line["index"] for line in got] != list(range(len(got))):
        wrong.append(f"{request}: its tokens are numbered wrongly")


def compare(want: Sequence[int], got: Sequence[int]) -> tuple[int, int, int, int]:
    """Tokens lost, repeated and changed, and where the first of them is."""
    shorter = min(len(want), len(got))
    first = next((i for i in range(shorter) if want[i] != got[i]), shorter)
    lost = repeated = changed = 0
    matcher = difflib.SequenceMatcher(None, list(want[first:]), list(got[first:]), autojunk=False)
    for code, i1, i2, j1, j2 in matcher.get_opcodes():
        if code != "equal":
            both = min(i2 - i1, j2 - j1)
            changed, lost, repeated = changed + both, lost + i2 - i1 - both, repeated + j2 - j1 - both
    return lost, repeated, changed, first


# -- states, incidents, faults -----------------------------------------------------------------------------------------


def _states(history: Sequence[Line], verdict: Verdict) -> None:
    wrong, before, epoch = verdict.problems, "", 0
    for line in of_kind(history, "state"):
        state = line["state"]
        if state not in TRANSITIONS:
            wrong.append(f"state {state} is none")
            continue
        if state == "FAILED":
            wrong.append("it FAILED")
        if not before and state not in ("STARTING", "HEALTHY"):
            wrong.append(f"the first state was {state}")
        if before and state not in TRANSITIONS[before]:
            wrong.append(f"it went from {before} to {state}")
        if line["epoch"] < epoch:
            wrong.append(f"epoch {line['epoch']} came after {epoch}")
        before, epoch = state, max(epoch, line["epoch"])
    if before and before != "STOPPED":
        wrong.append(f"it was {before} at the end, not STOPPED")
    if not before:
        wrong.append("no state was recorded")


def intervals(history: Sequence[Line], states: frozenset[str]) -> list[tuple[float, float]]:
    """When it was in one of ``states``, as (from, to)."""
    lines = of_kind(history, "state")
    if not lines:
        return []
    ends = [line["t"] for line in lines[1:]] + [history[-1]["t"]]
    return [(line["t"], end) for line, end in zip(lines, ends, strict=True) if line["state"] in states]


def _incidents(history: Sequence[Line], verdict: Verdict) -> None:
    wrong = verdict.problems
    opened, resolved = of_kind(history, "incident"), of_kind(history, "resolved")
    numbers = [line["number"] for line in opened]
    if sorted(line["number"] for line in resolved) != sorted(numbers) or len(set(numbers)) != len(numbers):
        wrong.append("incidents that were opened and those that were resolved are not the same")
    for line in resolved:
        if line["outcome"] != "recovered":
            wrong.append(f"incident {line['number']} ended with {line['outcome']}: {line['cause']}")
    states = [line["state"] for line in of_kind(history, "state")]
    again = sum(before == "RECOVERING" and after == "HEALTHY" for before, after in pairwise(states))
    if again != sum(line["outcome"] == "recovered" for line in resolved):
        wrong.append(f"it came back {again} times; its incidents say otherwise")
    recoveries = len([1 for line in of_kind(history, "state") if line["state"] == "RECOVERING"])
    if recoveries != len(opened):
        wrong.append(f"it was RECOVERING {recoveries} times, with {len(opened)} incidents")
    strikes = of_kind(history, "fault")
    for line in opened:
        since, now = line["detected_at"] - MOST_DETECT_S, line["detected_at"] + SLACK_S
        if not any(since <= strike["at"] <= now and strike["felt"] is not False for strike in strikes):
            wrong.append(f"incident {line['number']} has no cause among the faults: a false alarm")
    taken_back = Counter(_cause_of(line, strikes) for line in opened)
    for number, count in taken_back.items():
        if number is not None and count > 2:
            wrong.append(f"fault {number} made {count} incidents")


def _cause_of(incident: Line, strikes: Sequence[Line]) -> int | None:
    """The newest fault that may have made it."""
    before = [s for s in strikes if s["at"] <= incident["detected_at"] + SLACK_S and s["felt"] is not False]
    return max(before, key=lambda strike: float(strike["at"]))["number"] if before else None


def _faults(history: Sequence[Line], verdict: Verdict) -> None:
    ends = {line["number"]: line for line in of_kind(history, "resolved")}
    incidents = of_kind(history, "incident")
    failed = any(line["state"] == "FAILED" for line in of_kind(history, "state"))
    strikes = of_kind(history, "fault")
    for strike in strikes:
        report = FaultReport(strike["number"], strike["text"], strike["at"])
        verdict.faults.append(report)
        incident = _incident_of(strike, strikes, incidents, ends)
        if incident is not None:
            end = ends.get(incident["number"])
            report.felt = True
            report.detection_s = round(max(0.0, incident["detected_at"] - strike["at"]), 3)
            report.survived = end is not None and end["outcome"] == "recovered"
            if end is not None:
                report.outage_s = round(max(0.0, end["t"] - strike["at"]), 3)
                report.phases = _phases(history, incident["detected_at"], end["t"])
                if missing := sorted(REBUILD - report.phases.keys()):
                    verdict.problems.append(f"the rebuild after fault {report.number} had no phase {missing}")
        report.survived = report.survived and not (failed and incident is None)
        if strike["felt"] and incident is None:
            report.survived = False
            verdict.problems.append(f"fault {report.number} ({report.text}) was not noticed")
        if strike["felt"] and (report.detection_s or 0.0) > strike["detect_s"] + SLACK_S:
            late = f"noticed after {report.detection_s:.1f} s; the bound is {strike['detect_s']:g} s"
            verdict.problems.append(f"fault {report.number} ({report.text}) was {late}")


def _calls(history: Sequence[Line], verdict: Verdict) -> None:
    """Each call that a fault had fail has failed with just that, and all others have not."""
    strikes = [s for s in of_kind(history, "fault") if s["fault"]["kind"] == "raise_in_rpc"]
    wanted = Counter(mark(strike["number"]) for strike in strikes)
    for line in of_kind(history, "rpc"):
        found = [one for one in wanted if one in line["error"]]
        if line["error"] and not found:
            verdict.problems.append(f"a collective RPC failed with none of the faults' errors: {line['error']}")
        wanted.subtract(found)
    verdict.problems += [f"the collective RPC of {one} was not answered once" for one, left in wanted.items() if left]


def _incident_of(
    strike: Line, strikes: Sequence[Line], incidents: Sequence[Line], ends: Mapping[int, Line]
) -> Line | None:
    """The incident that was open when the fault came; else the next one, if no newer fault may have made it."""
    if strike["felt"] is False:
        return None
    for incident in incidents:
        end = ends.get(incident["number"])
        if end is not None and strike["at"] > end["t"]:
            continue
        if incident["detected_at"] <= strike["at"]:
            return incident
        newer = [s for s in strikes if strike["at"] < s["at"] <= incident["detected_at"] and s["felt"] is not False]
        waited = incident["detected_at"] - strike["at"]
        if strike["felt"] or (not newer and waited <= strike["detect_s"] + SLACK_S):
            return incident
        return None
    return None


def _phases(history: Sequence[Line], since: float, until: float) -> dict[str, float]:
    spent: dict[str, float] = {}
    for line in of_kind(history, "phase"):
        if since - SLACK_S <= line["t"] <= until + SLACK_S:
            spent[line["phase"]] = round(spent.get(line["phase"], 0.0) + line["duration_s"], 4)
    return spent


# -- health and leaks --------------------------------------------------------------------------------------------------


def _health(history: Sequence[Line], verdict: Verdict) -> None:
    down = intervals(history, frozenset({"RECOVERING", "FAILED"}))
    up = intervals(history, frozenset({"HEALTHY"}))
    strikes = of_kind(history, "fault")
    if not of_kind(history, "health"):
        verdict.problems.append("nobody asked for health")
    for line in of_kind(history, "health"):
        began, ended = line["began"], line["t"]
        if line["ok"] and any(since + SLACK_S < began and ended < until - SLACK_S for since, until in down):
            verdict.problems.append(f"the health check said that all was well in a rebuild, at {began:.1f}")
        hit = any(began - MOST_DETECT_S <= strike["at"] <= ended for strike in strikes)
        healthy = any(since + SLACK_S < began and ended < until - SLACK_S for since, until in up)
        if not line["ok"] and healthy and not hit:
            verdict.problems.append(f"the health check failed where nothing was wrong: {line['why']}")


def _leaks(history: Sequence[Line], verdict: Verdict) -> None:
    looks = of_kind(history, "holdings")
    before = next((line for line in looks if line["when"] == "before"), None)
    after = next((line for line in looks if line["when"] == "after"), None)
    if before is None or after is None or len([x for x in looks if x["when"] in ("before", "after")]) != 2:
        verdict.problems.append("what was held before and after was not recorded")
        return
    for kind, things in after["things"].items():
        more = sorted(set(things) - set(before["things"].get(kind, ())))
        verdict.leaks += [f"{kind}: {thing}" for thing in more]
    during = [line for line in looks if line["when"] == "during"]
    if len(during) >= 2:
        epochs = during[-1]["epoch"] - during[0]["epoch"]
        growth = during[-1]["rss_mb"] - during[0]["rss_mb"]
        if growth > GROWTH_MB + GROWTH_EPOCH_MB * epochs:
            verdict.leaks.append(f"memory: the driver grew by {growth:.0f} MB in {epochs} epochs")
    verdict.problems += [f"left behind: {leak}" for leak in verdict.leaks]
