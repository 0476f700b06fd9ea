"""The end of a demo: what happened, as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient_executor.reference.demo.plan import DemoOptions
from resilient_executor.reference.demo.story import PHASES, Kill, Story, phase_name, planned_text
from resilient_executor.reference.demo.verdict import Comparison
from resilient_executor.supervisor.incidents import Incident

#: Differing answers that are listed one by one.
_MAX_DIFFERENCES = 5
#: Width of all but the widest column of the incidents.
_OTHER_COLUMNS = 51


@dataclass(frozen=True)
class Outcome:
    """Everything that the report is made of.

    Attributes:
        start_s: from the first line to the first executor that serves.
        undisturbed_s: duration of the undisturbed run.
        reasons: why the demo has failed; empty when it has not.
        left_behind: processes that should be gone.
        seconds: duration of the whole demo.
    """

    options: DemoOptions
    story: Story
    incidents: Sequence[Incident]
    comparison: Comparison
    start_s: float
    undisturbed_s: float
    left_behind: Sequence[str]
    reasons: Sequence[str]
    seconds: float

    @property
    def kills_delivered(self) -> int:
        """Kills that ended a process."""
        return sum(kill.delivered for kill in self.story.kills)

    def kills_of(self, incident: Incident) -> list[Kill]:
        """The kills that an incident goes back to, the first one included."""
        epochs = {incident.epoch, *incident.epochs_tried[:-1]}
        return [kill for kill in self.story.kills if kill.epoch in epochs]

    def outage_s(self, incident: Incident) -> float | None:
        """How long the client got no token because of it."""
        end = incident.resolved_at if incident.resolved_at is not None else float("inf")
        return self.story.longest_silence(incident.detected_at, end)

    @property
    def undisturbed_rate(self) -> float:
        """Tokens a second without any kill."""
        return sum(len(one.token_ids) for one in self.story.expected) / self.undisturbed_s

    @property
    def service_rate(self) -> float | None:
        """Tokens a second in the disturbed run, without its outages."""
        times = self.story.disturbed_times
        if len(times) < 2:
            return None
        outages = sum(self.outage_s(incident) or 0.0 for incident in self.incidents)
        busy = times[-1] - times[0] - outages
        return len(times) / busy if busy > 0 else None


def print_report(console: Console, outcome: Outcome) -> None:
    """Print everything; the last line is the verdict."""
    console.print()
    if outcome.incidents:
        console.print(_incidents(outcome, console.width))
    console.print(_tokens(outcome))
    for difference in outcome.comparison.differences[:_MAX_DIFFERENCES]:
        console.print(Text(f"  {difference.describe()}", "red"))
    if (more := len(outcome.comparison.differences) - _MAX_DIFFERENCES) > 0:
        console.print(Text(f"  and {more} more", "red"))
    console.print()
    verdict = [Text.assemble(("FAILED ", "bold red"), reason) for reason in outcome.reasons] or [
        Text.assemble(("PASSED ", "bold green"), _success(outcome))
    ]
    for line in verdict:
        console.print(line, soft_wrap=not console.is_terminal)


def _success(outcome: Outcome) -> str:
    kills = outcome.options.kills
    killed = f"{kills} worker{'s' * (kills != 1)} killed" if kills else "no worker killed"
    return (
        f"in {outcome.seconds:.0f} s: {killed}, {outcome.comparison.tokens} tokens, every one as in the undisturbed "
        f"run; nothing is left behind. Again: --seed {outcome.options.seed}"
    )


def _incidents(outcome: Outcome, width: int) -> Table:
    table = Table(title="Incidents", title_justify="left", box=rich.box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    table.add_column("#", justify="right")
    table.add_column("first cause, and the phases of the rebuild in seconds", ratio=1)
    for name in ("noticed", "rebuilt", "outage", "epochs"):
        table.add_column(name, justify="right", no_wrap=True)
    for incident in outcome.incidents:
        what = Text(outcome.story.describe(incident.cause) if incident.cause is not None else "not known")
        for kill in outcome.kills_of(incident)[1:]:
            after = f", noticed after {_milliseconds(kill.noticed_after_s)}" if kill.noticed_at is not None else ""
            what.append(f"\nthen rank {kill.rank} (pid {kill.pid}) {kill.describe()}{after}")
        phases = [f"{phase_name(name)} {incident.phases[name]:.2f}" for name in PHASES if name in incident.phases]
        what.append("".join("\n" + line for line in _packed(phases, width - _OTHER_COLUMNS)), "dim")
        table.add_row(
            str(incident.number),
            what,
            _milliseconds(_noticed_after(outcome, incident)),
            _seconds(incident.duration_s),
            _seconds(outcome.outage_s(incident)),
            " ".join(str(epoch) for epoch in (incident.epoch, *incident.epochs_tried)),
        )
    return table


def _packed(items: Sequence[str], width: int) -> list[str]:
    """Lines of whole items."""
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + 2 + len(item) > width:
            lines.append("")
        lines[-1] += f"  {item}" if lines[-1] else item
    return lines


def _tokens(outcome: Outcome) -> Table:
    comparison, story = outcome.comparison, outcome.story
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    requests, rounds = len(story.requests), len(story.rounds)
    table.add_row(
        "answers",
        f"{comparison.identical}/{comparison.answers} identical to the undisturbed run "
        f"({requests} request{'s' * (requests != 1)}, {rounds} round{'s' * (rounds != 1)})",
    )
    table.add_row(
        "tokens",
        f"{comparison.tokens} compared: {comparison.lost} lost, {comparison.repeated} repeated, "
        f"{comparison.changed} changed",
    )
    table.add_row("kills", f"{outcome.kills_delivered} of {outcome.options.kills} delivered")
    rate = outcome.service_rate
    table.add_row(
        "speed",
        f"{outcome.undisturbed_rate:.0f} tokens/s undisturbed"
        + (f", {rate:.0f} tokens/s between the outages" if rate is not None and outcome.incidents else ""),
    )
    if outages := [one for incident in outcome.incidents if (one := outcome.outage_s(incident)) is not None]:
        table.add_row("outage", f"{statistics.median(outages):.1f} s in the median, {max(outages):.1f} s at most")
    return table


def _noticed_after(outcome: Outcome, incident: Incident) -> float | None:
    kills = outcome.kills_of(incident)
    return kills[0].noticed_after_s if kills else None


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The report as plain data. Times are seconds, moments are seconds since the Unix epoch."""
    options, comparison, story = outcome.options, outcome.comparison, outcome.story
    return {
        "format": 1,
        "passed": not outcome.reasons,
        "reasons": list(outcome.reasons),
        "seconds": outcome.seconds,
        "seed": options.seed,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "requests": options.requests,
        "max_tokens": options.max_tokens,
        "sampling": options.sampling,
        "rounds": len(story.rounds),
        "start_seconds": outcome.start_s,
        "comparison": {
            "answers": comparison.answers,
            "identical": comparison.identical,
            "tokens": comparison.tokens,
            "lost": comparison.lost,
            "repeated": comparison.repeated,
            "changed": comparison.changed,
            "differences": [dataclasses.asdict(one) for one in comparison.differences],
        },
        "tokens_per_second": {"undisturbed": outcome.undisturbed_rate, "between_outages": outcome.service_rate},
        "kills_planned": options.kills,
        "kills": [_kill(kill) for kill in story.kills],
        "incidents": [
            {
                **incident.to_dict(),
                "noticed_after_s": _noticed_after(outcome, incident),
                "outage_s": outcome.outage_s(incident),
            }
            for incident in outcome.incidents
        ],
        "left_behind": list(outcome.left_behind),
    }


def _kill(kill: Kill) -> dict[str, Any]:
    data = {**dataclasses.asdict(kill), "noticed_after_s": kill.noticed_after_s}
    return {**data, "planned": planned_text(kill.planned), "number": kill.planned.number}


def write_json(path: Path, outcome: Outcome) -> None:
    """Write the report, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(to_dict(outcome), indent=2, default=str) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
