"""Makes the pictures of the README: runs the demo in a real terminal (tmux), and draws what is seen there as SVG."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 110, 32
SOCKET = "resilient-executor-pictures"
LIMIT_S = 180
#: A viewer that may not load fonts from elsewhere must not try to.
WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def tmux(*arguments: str) -> str:
    done = subprocess.run(["tmux", "-L", SOCKET, *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def film(command: str) -> list[str]:
    """What the terminal shows while ``command`` runs, several times a second; the last frame is the end."""
    frames: list[str] = []
    tmux("kill-server")
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    tmux("new-session", "-d", *size, "-s", "demo", f"clear; {command}; echo; echo done; sleep {LIMIT_S}")
    deadline = time.monotonic() + LIMIT_S
    try:
        while not frames or "\ndone\n" not in frames[-1]:
            if time.monotonic() > deadline:
                raise SystemExit(f"the demo did not end within {LIMIT_S} s")
            time.sleep(0.2)
            frames.append(tmux("capture-pane", "-e", "-p", "-t", "demo"))
        frames[-1] = tmux("capture-pane", "-e", "-p", "-t", "demo", "-S", "-60")
    finally:
        tmux("kill-server")
    return frames


def save(frame: str, title: str, path: Path) -> None:
    """Draw one frame."""
    lines = frame.rstrip("\n").split("\n")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("\n").join(Text.from_ansi(line) for line in lines), no_wrap=True, crop=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(path), title=title, code_format=WITHOUT_FONTS, unique_id=path.stem)
    print(path, f"{path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs/img"), help="where the pictures go")
    parser.add_argument("--seed", type=int, default=12, help="of the demo")
    options = parser.parse_args()
    command = [str(Path(sys.executable).with_name("resilient-executor")), "demo", "--seed", str(options.seed)]
    frames = film(f"env -u CI -u NO_COLOR {shlex.join(command)}")
    title = f"resilient-executor demo --seed {options.seed}"
    # The most that can be seen at once: a second attempt to rebuild, with the workers coming up.
    rebuilding = [one for one in frames if "attempt 2" in one and "initialising" in one] or frames
    save(rebuilding[len(rebuilding) // 2], title, options.folder / "demo-live.svg")
    end, _, _ = frames[-1].partition("\ndone\n")
    save(end[end.rindex("\n", 0, end.index("Incidents")) + 1 :], title, options.folder / "demo-report.svg")


if __name__ == "__main__":
    main()
