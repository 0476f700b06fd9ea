"""The live picture of a demo: a snapshot of the story in, something that rich can draw out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from resilient_executor.lifecycle import ExecutorState
from resilient_executor.reference.demo.plan import DemoRequest
from resilient_executor.reference.demo.story import PHASES, Snapshot, phase_name
from resilient_executor.reference.demo.verdict import Answer

if TYPE_CHECKING:
    from resilient_executor.protocol import WorkerInfo

#: Seconds that one column of the throughput's line stands for, and how much of it is kept.
SPARK_BUCKET_S: Final = 0.5
SPARK_WINDOW_S: Final = 120.0
#: The rate of tokens is the mean of this many seconds.
_RATE_WINDOW_S: Final = 2.0
_BARS: Final = "▁▂▃▄▅▆▇█"
_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_STATES: Final = {
    None: ("STARTING", "black on blue"),
    ExecutorState.STARTING: ("STARTING", "black on blue"),
    ExecutorState.HEALTHY: ("HEALTHY", "black on green"),
    ExecutorState.SUSPECT: ("SUSPECT", "black on yellow"),
    ExecutorState.RECOVERING: ("RECOVERING", "black on yellow"),
    ExecutorState.FAILED: ("FAILED", "white on red"),
    ExecutorState.STOPPED: ("STOPPED", "black on white"),
}
#: What a worker does in a phase of its start.
_DOING: Final = {
    "spawn": "starting",
    "rank": "getting its rank",
    "initialise": "initialising",
    "load": "loading weights",
    "replay": "replaying calls",
    "compile": "compiling",
    "warm_up": "warming up",
}
#: Workers that are shown one by one.
_MAX_WORKERS: Final = 8
#: Least width of their panel.
_WORKERS_COLUMNS: Final = 39
#: Rows of the picture that are neither answers nor workers: header, throughput, borders.
_FRAME_ROWS: Final = 6
_BAR_COLUMNS: Final = 12


def draw(snapshot: Snapshot, workers: Sequence[WorkerInfo], width: int, height: int) -> RenderableType:
    """The picture for a terminal of this size."""
    parts: list[RenderableType] = [_header(snapshot, width), _throughput(snapshot, width)]
    panels = Table.grid(expand=True)
    panels.add_column(width=max(_WORKERS_COLUMNS, width // 2))
    panels.add_column(ratio=1)
    rows = max(min(len(workers), _MAX_WORKERS) + 1, len(PHASES) // 2)
    panels.add_row(
        Panel(_workers(snapshot, workers, rows), title="workers", border_style="dim", title_align="left"),
        Panel(
            _rebuild(snapshot, rows, 1 if width < 90 else 4),
            title=_rebuild_title(snapshot),
            border_style="dim",
            title_align="left",
        ),
    )
    parts.append(panels)
    # Two rows stay free, so that the newest lines of the account are seen above the picture.
    room = max(1, height - _FRAME_ROWS - rows - 2)
    parts.append(Panel(_answers(snapshot, width - 4, room), title="answers", border_style="dim", title_align="left"))
    return Group(*parts)


def _header(snapshot: Snapshot, width: int) -> Text:
    name, style = _STATES[snapshot.state]
    spinner = _SPINNER[int(snapshot.at * 8) % len(_SPINNER)]
    left = Text.assemble((f" {name} ", f"bold {style}"), f" epoch {snapshot.epoch}  " if snapshot.epoch else "  ")
    left.append(f"{spinner} {snapshot.chapter} {snapshot.at - snapshot.chapter_began:.1f} s", "cyan")
    right = Text()
    if snapshot.kills_planned:
        right.append("✗" * len(snapshot.kills), "bold red")
        right.append("·" * (snapshot.kills_planned - len(snapshot.kills)), "dim")
        right.append(f" {len(snapshot.kills)} of {snapshot.kills_planned} kills  ")
    right.append(f"{snapshot.at - snapshot.began:.0f} s", "dim")
    gap = max(1, width - left.cell_len - right.cell_len)
    return Text.assemble(left, " " * gap, right, no_wrap=True, overflow="crop")


def _throughput(snapshot: Snapshot, width: int) -> Text:
    """Tokens over time, a column for each half second, with the kills in it; silence is dots."""
    recent = sum(1 for at in snapshot.token_times if at > snapshot.at - _RATE_WINDOW_S)
    label = f"{recent / _RATE_WINDOW_S:5.0f} tokens/s "
    columns = min(width - len(label), int(SPARK_WINDOW_S / SPARK_BUCKET_S))
    now = int((snapshot.at - snapshot.began) / SPARK_BUCKET_S)  # this bucket is not full yet and not shown
    first = max(0, now - columns)
    counts = [0] * (now - first)
    for at in snapshot.token_times:
        bucket = int((at - snapshot.began) / SPARK_BUCKET_S) - first
        if 0 <= bucket < len(counts):
            counts[bucket] += 1
    kills = {int((kill.at - snapshot.began) / SPARK_BUCKET_S) - first for kill in snapshot.kills}
    most = max(counts, default=0)
    text = Text(label, "bold", no_wrap=True, overflow="crop")
    for bucket, count in enumerate(counts):
        if bucket in kills:
            text.append("✗", "bold red")
        elif count:
            text.append(_BARS[(len(_BARS) - 1) * count // most], "green")
        else:
            text.append("·", "dim")
    return text


def _workers(snapshot: Snapshot, workers: Sequence[WorkerInfo], rows: int) -> Text:
    killed = {kill.pid for kill in snapshot.kills}
    if not workers:
        return _exactly(Text("none yet: processes are starting\n", "yellow"), rows)
    text = Text(no_wrap=True, overflow="ellipsis").append("rank stage     pid  state\n", "dim")
    for rank, worker in enumerate(workers[:_MAX_WORKERS]):
        pid = worker.process.pid
        if pid in killed:
            doing, style = "killed: SIGKILL", "bold red"
        elif snapshot.state is ExecutorState.HEALTHY:
            doing, style = "serving", "green"
        elif not Path(f"/proc/{pid}").exists():
            doing, style = "fenced", "red"
        else:
            doing, style = _DOING.get(snapshot.phase, "waiting"), "yellow"
        text.append(f"{rank:>4} {rank // snapshot.tensor_parallel_size:>5} {pid:>7}  ")
        text.append(doing + "\n", style)
    if len(workers) > _MAX_WORKERS:
        text.right_crop(1)
        text.append(f", and {len(workers) - _MAX_WORKERS} more\n", "dim")
    return _exactly(text, rows)


def _rebuild_title(snapshot: Snapshot) -> str:
    rebuild = snapshot.rebuild
    if rebuild is None:
        return "rebuild"
    if rebuild.ended_after_s is not None:
        return f"last rebuild: {rebuild.ended_after_s:.1f} s"
    attempt = f", attempt {rebuild.attempt}" if rebuild.attempt > 1 else ""
    return f"rebuild{attempt}: {max(0.0, snapshot.at - rebuild.incident.detected_at):.1f} s"


def _rebuild(snapshot: Snapshot, rows: int, gap: int) -> Text:
    """The phases in two columns, in seconds, with a running clock at the one that is under way."""
    rebuild = snapshot.rebuild
    if rebuild is None:
        return _exactly(Text("no incident so far\n", "dim"), rows)
    records = {phase.name: phase for phase in rebuild.phases}
    cells = []
    for name in PHASES:
        record = records.get(name)
        if record is None:
            cells.append(Text(f"· {phase_name(name):<10}      ", "dim"))
        elif record.took_s is None:
            cells.append(Text(f"▸ {phase_name(name):<10} {max(0.0, snapshot.at - record.began):5.1f}", "bold yellow"))
        else:
            cells.append(Text(f"✓ {phase_name(name):<10} {record.took_s:5.2f}", "green"))
    half = len(PHASES) // 2
    text = Text(no_wrap=True, overflow="crop")
    for left, right in zip(cells[:half], cells[half:], strict=True):
        text.append_text(left).append(" " * gap).append_text(right).append("\n")
    return _exactly(text, rows)


def _answers(snapshot: Snapshot, width: int, room: int) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    shown = len(snapshot.answers) if len(snapshot.answers) <= room else room - 1
    for number in range(shown):
        expected = snapshot.expected[number] if snapshot.expected else None
        line = _answer(snapshot.requests[number], snapshot.answers[number], expected, width)
        text.append_text(line).append("\n")
    if shown < len(snapshot.answers):
        text.append(f"and {len(snapshot.answers) - shown} more\n", "dim")
    if not snapshot.answers:
        text.append("no prompt has been sent yet\n", "dim")
    text.right_crop(1)
    return text


def _answer(request: DemoRequest, answer: Answer, expected: Answer | None, width: int) -> Text:
    """One request: how far it is, whether it is right so far, and the end of its text."""
    done, target = len(answer.token_ids), request.params.max_tokens
    right = expected is None or answer.token_ids == expected.token_ids[:done]
    full = min(_BAR_COLUMNS, done * _BAR_COLUMNS // target)
    colour = "red" if not right else "green" if expected is not None else "blue"
    line = Text()
    line.append("━" * full, colour).append("─" * (_BAR_COLUMNS - full), "dim")
    line.append(f" {done:>{len(str(target))}}/{target} ")
    line.append("  " if expected is None else "= " if right else "≠ ", f"bold {colour}")
    space = width - line.cell_len
    text = " ".join((request.prompt + answer.text).split())
    if cell_len(text) <= space:
        head = len(request.prompt)
        return line.append(text[:head], "dim").append(text[head:])
    text = "…" + text[-(space - 1) :]
    while cell_len(text) > space:
        text = "…" + text[2:]
    return line.append(text)


def _exactly(text: Text, rows: int) -> Text:
    """``text`` with this many lines, so that the picture does not jump."""
    lines = text.plain.count("\n")
    text.append("\n" * max(0, rows - lines))
    text.right_crop(1)
    return text
