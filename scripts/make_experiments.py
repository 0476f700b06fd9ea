"""Writes the ready experiments of chaos/experiments: one table here instead of many files that differ by a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent.parent / "chaos" / "experiments"
WHERE: Final = {"name": "${name}", "namespace": "${namespace}", "address": "${address}"}
CONFIGURATION: Final = {
    key: {"type": "env", "key": f"CHAOS_{key.upper()}", "default": default}
    for key, default in (("name", "executor"), ("namespace", "resilient-executor"), ("address", "auto"))
}

#: file: (failures of docs/chaos.md, title, what is seen, faults, whether workers are replaced)
SURVIVED: Final[dict[str, tuple[str, str, list[dict[str, Any]], bool]]] = {
    "kill-worker": ("F1 F30", "a worker is killed", [{"kind": "kill"}], True),
    "freeze-worker": ("F2 F24", "a worker is frozen", [{"kind": "stop"}], True),
    "freeze-briefly": ("F4 F5", "a worker is frozen for a moment", [{"kind": "stop", "duration_s": 1.0}], False),
    "hang-in-step": ("F3 F11", "a step hangs in one worker", [{"kind": "hang"}], True),
    "slow-steps": ("F4 F13", "some steps are slow", [{"kind": "slow", "duration_s": 1.0}], False),
    "late-heartbeats": ("F5 F6", "heartbeats come late", [{"kind": "late_heartbeats", "duration_s": 0.5}], False),
    "abort-in-step": ("F7 F19", "a worker aborts in a step", [{"kind": "abort"}], True),
    "out-of-memory": ("F7", "a worker takes memory and is killed", [{"kind": "oom"}], True),
    "two-at-once": ("F20 F28", "two workers are killed at once", [{"kind": "kill", "count": 2}], True),
    "kill-in-rebuild": ("F31", "a worker dies in the rebuild from a death",
                        [{"kind": "kill"}, {"kind": "kill", "phase": "initialise"}], True),
    "kill-supervisor": ("F8", "the supervisor is killed", [{"kind": "kill_supervisor"}], False),
    "kill-agent": ("F7 F23", "a node's agent is killed, then a worker",
                   [{"kind": "kill_agent"}, {"kind": "kill"}], True),
    "remove-placement-group": ("F21 F22", "somebody removes the placement group",
                               [{"kind": "remove_placement_group"}], True),
}  # fmt: skip


def activity(kind: str, name: str, module: str, function: str, /, **arguments: Any) -> dict[str, Any]:
    """One activity, as the Chaos Toolkit wants it."""
    provider = {"type": "python", "module": f"resilient_executor.chaos.{module}", "func": function}
    return {"type": kind, "name": name, "provider": {**provider, "arguments": {**arguments, **WHERE}}}


def experiment(ids: str, title: str, expects: str, method: list[dict[str, Any]], steady: bool) -> dict[str, Any]:
    """A whole experiment. ``steady``: its hypothesis is also what must hold at the end."""
    probe = activity("probe", "all workers answer", "probes", "survives_within", seconds=90.0)
    hypothesis = {"title": "The executor is healthy", "probes": [{**probe, "tolerance": True}]}
    return {
        "title": f"What if {title}?",
        "description": f"Expected: it {expects}. Covers {ids} of docs/chaos.md.",
        "tags": ids.split(),
        "configuration": CONFIGURATION,
        "extensions": [{"name": "resilient-executor", "expects": expects}],
        "controls": [
            {"name": "healing", "provider": {"type": "python", "module": "resilient_executor.chaos.controls"}}
        ],
        "steady-state-hypothesis": hypothesis,
        "method": method,
        "rollbacks": [activity("action", "let everything go on", "actions", "heal")],
    } | ({} if steady else {"runtime": {"hypothesis": {"strategy": "before-method-only"}}})


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for file, (ids, title, faults, felt) in SURVIVED.items():
        method = [activity("action", f"fault: {fault['kind']}", "actions", "fault", **fault) for fault in faults]
        if felt:
            # A frozen worker serves, as far as anyone knows, until it is found: first the rebuild, then the hypothesis.
            waits = activity("probe", "the workers are replaced", "probes", "rebuilt_within", seconds=120.0)
            method.append({**waits, "tolerance": True})
        else:
            waits = activity("probe", "nobody is replaced", "probes", "not_rebuilt_for", seconds=8.0)
            method.append({**waits, "tolerance": True})
        data = experiment(ids, title, "survives", method, steady=True)
        (FOLDER / f"{file}.json").write_text(json.dumps(data, indent=2) + "\n")
    kills = [activity("action", "fault: kill", "actions", "fault", kind="kill")]
    end = activity("probe", "it says that it has failed", "probes", "fails_within", seconds=60.0)
    data = experiment(
        "F27", "the restart budget is spent (start the executor with max_restarts=0)", "fails within 60 s",
        [*kills, {**end, "tolerance": True}], steady=False,
    )  # fmt: skip
    (FOLDER / "spend-budget.json").write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
