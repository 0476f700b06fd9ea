"""The report of a history: JSON, and one HTML page that needs nothing else, for a person who was not there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from statistics import median
from typing import Final

from resilient_executor.chaos.checker import FaultReport, Verdict, check, intervals
from resilient_executor.chaos.recorder import Line, of_kind, read

_WIDTH: Final = 1120
_ROW_S: Final = 120.0
_COLOURS: Final = {"HEALTHY": "#cdeccf", "SUSPECT": "#fbe6a2", "RECOVERING": "#f5b7b1", "FAILED": "#c0392b"}
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 1160px; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.verdict { padding: .6rem 1rem; border-radius: 6px; font-weight: 600 }
.good { background: #d9f2dc } .bad { background: #f8d0cc }
table { border-collapse: collapse; width: 100%; font-size: 13px }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e4e4e4 } td.n, th.n { text-align: right }
.numbers { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0 }
.numbers div { border: 1px solid #ddd; border-radius: 6px; padding: .4rem .9rem } .numbers b { display: block; font-size: 1.35rem }
.key span { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1.2em; vertical-align: -2px }
svg { display: block; width: 100%; height: auto; margin: .3rem 0 } svg text { font: 11px system-ui, sans-serif; fill: #444 }
.small { color: #666; font-size: 13px }
"""  # noqa: E501 - a style sheet reads best with one rule a line


def write(history: Path, page: Path) -> Verdict:
    """Judge a history and write the page, and beside it the same as ``.json``."""
    lines = read(history)
    verdict = check(lines)
    page.write_text(html(lines, verdict), encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(verdict.to_json(), indent=1) + "\n", encoding="utf-8")
    return verdict


def html(history: Sequence[Line], verdict: Verdict) -> str:
    """The page."""
    head = of_kind(history, "run")[0] if of_kind(history, "run") else {}
    began = datetime.fromtimestamp(history[0]["t"], timezone.utc) if history else datetime.now(timezone.utc)
    took = history[-1]["t"] - history[0]["t"] if history else 0.0
    good = "survived: no token was lost, repeated or changed, and nothing was left behind"
    bad = f"{len(verdict.problems)} problems, see below"
    title = f"Chaos report: {len(verdict.faults)} faults"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p class="small">{escape(str(head.get("engine", "")))} engine, seed {escape(str(head.get("seed", "")))},
{began:%Y-%m-%d %H:%M} UTC, {took / 60:.1f} minutes; again with <code>{escape(str(head.get("command", "")))}</code></p>
<p class="verdict {"good" if verdict.clean else "bad"}">{good if verdict.clean else bad}</p>
{_numbers(verdict, history)}
{_problems(verdict)}
<h2>What happened when</h2>
<p class="small">Faults were made on purpose while the engine was serving the same requests again and again. Below each
other: the state of the executor (colour), the tokens that reached the clients in each second (curve), and the faults
(marks). Where the curve is at zero, clients waited; they got no error.</p>
{_key()}
{_timeline(history)}
<h2>Kinds of faults</h2>
{_kinds(verdict)}
<h2>Every fault</h2>
<p class="small">Noticed: from the fault to the open incident. Outage: from the fault to the end of the rebuild. Empty:
no worker had to be replaced.</p>
{_faults(verdict)}
</body></html>
"""


def _numbers(verdict: Verdict, history: Sequence[Line]) -> str:
    outages = [f.outage_s for f in verdict.faults if f.outage_s is not None]
    incidents = len(of_kind(history, "incident"))
    pairs = [
        (f"{verdict.survived} of {len(verdict.faults)}", "faults survived"),
        (str(incidents), "rebuilds"),
        (f"{verdict.requests}", "requests"),
        (f"{verdict.requests_failed}", "requests failed"),
        (f"{verdict.tokens}", "tokens"),
        (f"{verdict.tokens_lost} / {verdict.tokens_repeated} / {verdict.tokens_changed}", "lost / repeated / changed"),
        (f"{len(verdict.leaks)}", "leaks"),
        (f"{median(outages):.1f} s" if outages else "none", "median outage"),
    ]
    return f'<div class="numbers">{"".join(f"<div><b>{value}</b>{what}</div>" for value, what in pairs)}</div>'


def _problems(verdict: Verdict) -> str:
    if verdict.clean:
        return ""
    return f"<h2>Problems</h2><ul>{''.join(f'<li>{escape(one)}</li>' for one in verdict.problems)}</ul>"


def _key() -> str:
    spans = [f'<span style="background:{colour}"></span>{state}' for state, colour in _COLOURS.items()]
    return f'<p class="key small">{"".join(spans)}<span style="background:#1f4e79"></span>tokens per second</p>'


def _timeline(history: Sequence[Line]) -> str:
    states = of_kind(history, "state")
    if not states:
        return "<p>No state was recorded.</p>"
    zero, end = states[0]["t"], history[-1]["t"]
    rates = Counter(int(line["t"] - zero) for line in of_kind(history, "token"))
    top = max(rates.values(), default=1)
    rows = []
    start = 0.0
    while start < end - zero:
        rows.append(_row(history, zero, start, rates, top))
        start += _ROW_S
    return "\n".join(rows)


def _row(history: Sequence[Line], zero: float, start: float, rates: Counter[int], top: int) -> str:
    height, floor, left = 86, 70, 44
    scale = (_WIDTH - left) / _ROW_S

    def x(t: float) -> float:
        return round(left + min(max(t - zero - start, 0.0), _ROW_S) * scale, 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">']
    for state, colour in _COLOURS.items():
        for since, until in intervals(history, frozenset({state})):
            if until > zero + start and since < zero + start + _ROW_S:
                box = f'x="{x(since)}" y="12" width="{max(0.5, x(until) - x(since)):.1f}" height="{floor - 12}"'
                parts.append(f'<rect {box} fill="{colour}"><title>{state}, {until - since:.1f} s</title></rect>')
    seconds = range(int(start), int(start + _ROW_S) + 1)
    last = history[-1]["t"] - zero
    points = [f"{x(zero + s)},{floor - rates[s] / top * (floor - 16):.1f}" for s in seconds if s <= last]
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#1f4e79" stroke-width="1.4"/>')
    for strike in of_kind(history, "fault"):
        if 0 <= strike["at"] - zero - start < _ROW_S:
            at, text = x(strike["at"]), escape(f"{strike['number']}: {strike['text']}: {', '.join(strike['victims'])}")
            parts.append(f'<g><title>{text}</title><path d="M{at} 12 l-4 -8 h8 z" fill="#8e1b10"/>')
            parts.append(f'<line x1="{at}" y1="12" x2="{at}" y2="{floor}" stroke="#8e1b10" stroke-width=".8"/>')
            parts.append(f'<text x="{at + 3}" y="{floor + 12}">{strike["number"]}</text></g>')
    parts.append(f'<text x="0" y="24">{top}/s</text><text x="0" y="{floor}">{start:.0f} s</text></svg>')
    return "".join(parts)


def _kinds(verdict: Verdict) -> str:
    kinds: dict[str, list[FaultReport]] = {}
    for fault in verdict.faults:
        kinds.setdefault(fault.text.split(" ")[0], []).append(fault)
    rows = []
    for kind, reports in sorted(kinds.items(), key=lambda item: -len(item[1])):
        detected = [r.detection_s for r in reports if r.detection_s is not None]
        outages = [r.outage_s for r in reports if r.outage_s is not None]
        survived = sum(report.survived for report in reports)
        rows.append(
            f'<tr><td>{escape(kind)}</td><td class="n">{len(reports)}</td><td class="n">{survived}</td>'
            f'<td class="n">{len(outages)}</td><td class="n">{_spread(detected)}</td>'
            f'<td class="n">{_spread(outages)}</td></tr>'
        )
    head = ("faults", "survived", "replaced workers", "noticed after (median, most)", "outage (median, most)")
    return f"<table><tr><th>kind</th>{''.join(f'<th class=n>{h}</th>' for h in head)}</tr>{''.join(rows)}</table>"


def _faults(verdict: Verdict) -> str:
    rows = []
    for report in verdict.faults:
        phases = ", ".join(f"{name} {spent:.2f}" for name, spent in report.phases.items() if spent >= 0.05)
        rows.append(
            f'<tr><td class="n">{report.number}</td><td>{escape(report.text)}</td>'
            f"<td>{'yes' if report.survived else '<b>no</b>'}</td>"
            f'<td class="n">{_time(report.detection_s)}</td><td class="n">{_time(report.outage_s)}</td>'
            f"<td>{escape(phases)}</td></tr>"
        )
    head = "<th class=n>no.</th><th>fault</th><th>survived</th><th class=n>noticed</th><th class=n>outage</th>"
    return f"<table><tr>{head}<th>phases of the rebuild (s)</th></tr>{''.join(rows)}</table>"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} s, {max(values):.2f} s" if values else ""


def _time(value: float | None) -> str:
    return f"{value:.2f} s" if value is not None else ""
