"""Keeps killed workers from leaving segments of shared memory behind. Pure but for the file system.

vLLM's CPU groups reduce through named segments, 4 MiB for each rank and group, and unlink them in an orderly end only.
A segment needs its name no longer once all ranks of its group have opened it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_SHM: Final = Path("/dev/shm")
#: ``<meeting point>-<group>-[<ranks>]-cpushm_<rank in group>``
_SEGMENT: Final = re.compile(r"-\[(?P<ranks>\d+(?:-\d+)*)\]-cpushm_\d+$")


def unlink(ident: str, rank: int, folder: Path = _SHM) -> list[str]:
    """Take away the names of the segments of all groups that ``rank`` has joined.

    Args:
        ident: the meeting point as vLLM names it; empty where there are no such segments.
        rank: a global rank whose groups are complete: whoever has joined a group has waited for all others.
        folder: where the segments are.

    Returns:
        the names.
    """
    if not ident:
        return []
    gone = []
    for path in folder.glob(f"{ident}-*-cpushm_*"):
        match = _SEGMENT.search(path.name)
        if match is not None and str(rank) in match["ranks"].split("-"):
            path.unlink(missing_ok=True)  # another rank of the group may have been faster
            gone.append(path.name)
    return sorted(gone)
