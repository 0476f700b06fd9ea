"""``resilient-executor status`` and ``stacks``: the endpoint's data in a terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from resilient_executor.errors import ConfigError, ResilientExecutorError

#: For one answer, in seconds; stacks take the agents a moment.
_ANSWER_S: Final = 10.0
_COLOURS: Final = {"HEALTHY": "green", "FAILED": "red", "STOPPED": "red", "SUSPECT": "yellow", "RECOVERING": "yellow"}


class EndpointUnreachable(ResilientExecutorError):
    """Nobody answers at the endpoint's address, or not as an endpoint does."""


def fetch(url: str, page: str) -> str:
    """Read one page of the endpoint at ``url``.

    Raises:
        ConfigError: that is no address of an endpoint.
        EndpointUnreachable: nobody answers there.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address of an endpoint: {error}") from None
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(f"{url!r} is no address of an endpoint; it looks like http://127.0.0.1:8090")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/{page}", timeout=_ANSWER_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        raise EndpointUnreachable(f"{url} answers {error.code} to /{page}: is it a resilient-executor?") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EndpointUnreachable(
            f"no endpoint answers at {url} ({reason}). It is off unless status_port is set; executor.status_url says "
            "where it is"
        ) from None


def fetch_status(url: str) -> dict[str, Any]:
    """Read and check ``/status``.

    Raises:
        ConfigError, EndpointUnreachable: see :func:`fetch`.
    """
    try:
        data = json.loads(fetch(url, "status"))
    except json.JSONDecodeError:
        data = None
    if not isinstance(data, dict) or "state" not in data:
        raise EndpointUnreachable(f"what answers at {url} is not a resilient-executor")
    return data


def show_status(url: str, *, watch_s: float | None, as_json: bool, console: Console | None = None) -> int:
    """Print the status, once or until Ctrl-C; returns the exit code: 0 if it is healthy, else 1."""
    console = console or Console()
    data = fetch_status(url)
    if as_json:
        print(json.dumps(data, indent=2))
    elif watch_s is None:
        console.print(render(data))
    else:
        with Live(render(data), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                time.sleep(watch_s)
                try:
                    data = fetch_status(url)
                    live.update(render(data), refresh=True)
                except EndpointUnreachable as error:
                    # A supervisor that is being replaced is back in a moment.
                    live.update(Group(render(data), Text(str(error), style="red")), refresh=True)
    return 0 if data["state"] == "HEALTHY" else 1


def show_stacks(url: str) -> int:
    """Print everybody's place and Python stacks; returns the exit code."""
    print(fetch(url, "stacks"), end="")
    return 0


def render(data: Mapping[str, Any]) -> Group:
    """The status as tables."""
    state = data["state"]
    head = Text.assemble((data.get("name", "resilient-executor"), "bold"), " is ", (state, _COLOURS.get(state, "")))
    if "driver" in data:
        phase = f", phase {data['phase']}" if data["phase"] else ""
        restarts, driver = data["restarts"], data["driver"]
        head.append(f": epoch {data['epoch']}{phase}, restarts {restarts['used']} of {restarts['max']}")
        if any(data["standbys"].values()):
            head.append(f", standbys {data['standbys']['ready']} ready")
        head.append(f", driver {driver['pid']}")
        if driver["silent_s"] > 3:
            head.append(f" silent for {driver['silent_s']:.0f} s", style="yellow")
    ranks = _table("rank", "node", "devices", "pid", "epoch", "phase", "doing", "heartbeat", "round trip")
    for r in data["ranks"]:
        devices = ",".join(r["devices"]) or "CPU"
        cells = [r["rank"], r["node"], devices, r["pid"], r["epoch"], r["phase"], r["doing"]]
        _row(ranks, [*cells, f"{r['heartbeat_age_s']:.1f} s ago", f"{1000 * r['round_trip_s']:.1f} ms"])
    parts: list[Any] = [head, ranks if data["ranks"] else Text("no workers now", style="dim")]
    if data["incidents"]:
        incidents = _table("incident", "epoch", "first cause", "outcome", "outage")
        for i in data["incidents"][-5:]:
            outage = "-" if i["duration_s"] is None else f"{i['duration_s']:.1f} s"
            _row(incidents, [i["number"], i["epoch"], i["cause"], i["outcome"], outage])
        parts.append(incidents)
    return Group(*parts)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _row(table: Table, cells: Sequence[object] | Iterable[object]) -> None:
    # As Text: what comes from elsewhere is not markup.
    table.add_row(*(Text(str(cell)) for cell in cells))
