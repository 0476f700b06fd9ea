"""The picture of scaling.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

SIZES: Final = (8, 16, 32, 64, 128, 256, 512, 1024)
#: What one series of the plot is: key, label, colour.
SERIES: Final = (
    ("supervisor_core_needed_percent", "supervisor, % of a core, for all heartbeats", "#d62728"),
    ("rpc_ms", "collective RPC, ms (simulated workers)", "#1f77b4"),
    ("ranks_ms", "ranks and assignments, ms", "#2ca02c"),
    ("bells_ms", "who rings whom, ms", "#9467bd"),
    ("judge_ms", "one pass of the detectors, ms", "#ff7f0e"),
    ("status_ms", "status page, ms", "#7f7f7f"),
)


def plot(rows: Sequence[dict[str, float]]) -> str:
    """Both axes logarithmic; one line for each of :data:`SERIES`."""
    width, height, left, bottom, top = 860, 460, 60, 60, 20
    low, high = -2.0, 4.0
    first, last = SIZES[0].bit_length(), SIZES[-1].bit_length()

    def x(size: float) -> float:
        return left + (int(size).bit_length() - first) / (last - first) * (width - left - 330)

    def y(value: float) -> float:
        return top + (high - min(high, max(low, math.log10(max(value, 1e-9))))) / (high - low) * (height - bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for power in range(int(low), int(high) + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{left}" x2="{x(SIZES[-1])}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for size in SIZES:
        parts.append(f'<text x="{x(size):.1f}" y="{height - bottom + 18}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{(left + x(SIZES[-1])) / 2}" y="{height - 14}" text-anchor="middle">workers</text>')
    for number, (key, label, colour) in enumerate(SERIES):
        points = [(x(row["workers"]), y(row[key])) for row in rows if key in row]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        parts.append(f'<text x="{x(SIZES[-1]) + 16}" y="{top + 24 * number + 14}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
