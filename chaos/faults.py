"""Faults as data: what happens to whom, when, for how long. Frozen, checked, and the same text in and out of JSON."""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final


class Needs(str, enum.Enum):
    """What a fault cannot be done without."""

    CLUSTER = "cluster"  #: a connection to the Ray cluster; signals reach processes through an actor on their node
    PERMISSION = "permission"  #: an executor that was started with ``allow_chaos``
    NETWORK = "network"  #: the harness of several nodes on one machine, see ``resilient-chaos cluster``


class Expect(str, enum.Enum):
    """What the executor owes."""

    SURVIVES = "survives"  #: every request goes on, token for token
    FAILS = "fails"  #: the requests of that step fail with the fault's own error; all others go on


class Kind(str, enum.Enum):
    """What happens."""

    KILL = "kill"
    STOP = "stop"
    ABORT = "abort"
    EXIT = "exit"
    OUT_OF_MEMORY = "oom"
    HANG = "hang"
    SPIN = "spin"
    SLOW = "slow"
    RAISE = "raise"
    RAISE_UNPICKLABLE = "raise_unpicklable"
    RAISE_IN_RPC = "raise_in_rpc"
    BREAK_GRAPH = "break_graph"
    DROP_HEARTBEATS = "drop_heartbeats"
    LATE_HEARTBEATS = "late_heartbeats"
    KILL_SUPERVISOR = "kill_supervisor"
    STOP_SUPERVISOR = "stop_supervisor"
    KILL_AGENT = "kill_agent"
    KILL_STANDBY = "kill_standby"
    REMOVE_PLACEMENT_GROUP = "remove_placement_group"
    KILL_RAYLET = "kill_raylet"
    KILL_NODE = "kill_node"
    STOP_NODE = "stop_node"
    PULL_CABLE = "pull_cable"
    CUT_PAIR = "cut_pair"
    SLOW_LINK = "slow_link"


@dataclass(frozen=True)
class Traits:
    """What is true of every fault of one kind.

    Attributes:
        text: what happens, for people.
        needs: what it cannot be done without.
        felt: whether workers are replaced because of it: True, False, or None where it depends on the moment.
        detect_s: an incident is open so many seconds after it at most, with the settings of soaks (arenas.py). Twice
            the longest that was measured (docs/chaos.md, "Bounds"), and at least 2 s; 4 s for what waits for a step, as
            a soak may be idle for 2 s.
        expect: what the executor owes.
        role: whom it hits.
    """

    text: str
    needs: Needs
    felt: bool | None
    detect_s: float
    expect: Expect = Expect.SURVIVES
    role: str = "worker"


_C, _P, _N = Needs.CLUSTER, Needs.PERMISSION, Needs.NETWORK

TRAITS: Final[Mapping[Kind, Traits]] = {
    Kind.KILL: Traits("SIGKILL", _C, True, 2.0),
    Kind.STOP: Traits("SIGSTOP, and SIGCONT after its duration", _C, None, 16.0),
    Kind.ABORT: Traits("os.abort() in a step", _P, True, 4.0),
    Kind.EXIT: Traits("its process exits with a code in a step", _P, True, 4.0),
    Kind.OUT_OF_MEMORY: Traits("takes memory and is killed in a step", _P, True, 5.0),
    Kind.HANG: Traits("a step waits in Python", _P, None, 42.0),
    Kind.SPIN: Traits("a step spins in C and holds the interpreter's lock", _P, None, 42.0),
    Kind.SLOW: Traits("a few steps are slow", _P, False, 0.0),
    Kind.RAISE: Traits("an exception in a step", _P, None, 4.0, Expect.FAILS),
    Kind.RAISE_UNPICKLABLE: Traits("an exception that cannot be pickled", _P, None, 4.0, Expect.FAILS),
    Kind.RAISE_IN_RPC: Traits("an exception in a collective RPC", _P, False, 0.0),
    Kind.BREAK_GRAPH: Traits("the graph's loop in a worker ends", _P, True, 4.0),
    Kind.DROP_HEARTBEATS: Traits("no answer to heartbeats for a while", _P, None, 15.0),
    Kind.LATE_HEARTBEATS: Traits("late answers to heartbeats", _P, False, 0.0),
    Kind.KILL_SUPERVISOR: Traits("SIGKILL for the supervisor", _C, False, 0.0, role="supervisor"),
    Kind.STOP_SUPERVISOR: Traits("SIGSTOP for the supervisor", _C, False, 0.0, role="supervisor"),
    Kind.KILL_AGENT: Traits("SIGKILL for a node's agent", _C, False, 0.0, role="agent"),
    Kind.KILL_STANDBY: Traits("SIGKILL for a warm standby", _C, False, 0.0, role="standby"),
    Kind.REMOVE_PLACEMENT_GROUP: Traits("somebody removes the placement group", _C, True, 2.0, role="placement group"),
    Kind.KILL_RAYLET: Traits("SIGKILL for a node's raylet", _C, True, 4.0, role="node"),
    Kind.KILL_NODE: Traits("SIGKILL for everything on a node", _C, True, 4.0, role="node"),
    Kind.STOP_NODE: Traits("SIGSTOP for everything on a node", _C, True, 21.0, role="node"),
    Kind.PULL_CABLE: Traits("a node's cable is pulled", _N, True, 21.0, role="node"),
    Kind.CUT_PAIR: Traits("two nodes cannot reach each other", _N, True, 15.0, role="node"),
    Kind.SLOW_LINK: Traits("a node's link is slow, the head's where none is named", _N, None, 21.0, role="node"),
}  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """A worker that may be chosen.

    Attributes:
        stage: its pipeline stage, from 0.
        node: address of its node.
    """

    rank: int
    stage: int
    node: str


@dataclass(frozen=True)
class Target:
    """Whom a fault hits: all that is given must fit, ``count`` of those that do are drawn with the fault's seed.

    Attributes:
        rank, stage, node: only this rank, stage, or node (its address); None for any.
        protect: ranks that are never hit.
        count: how many at once.
    """

    rank: int | None = None
    stage: int | None = None
    node: str | None = None
    protect: tuple[int, ...] = ()
    count: int = 1

    def __post_init__(self) -> None:
        """Check the bounds; ``ValueError`` otherwise."""
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")
        object.__setattr__(self, "protect", tuple(self.protect))

    @classmethod
    def parse(cls, text: str, **others: Any) -> Target:
        """Read ``rank:1``, ``stage:0``, ``node:10.0.0.3`` or ``any``.

        Raises:
            ValueError: it is none of them.
        """
        if text == "any":
            return cls(**others)
        match = re.fullmatch(r"(rank|stage):(\d+)|(node):(\S+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no target; write rank:1, stage:0, node:10.0.0.3 or any")
        if match[3]:
            return cls(node=match[4], **others)
        return cls(**{match[1]: int(match[2]), **others})

    def choose(self, workers: Sequence[Worker], seed: int) -> list[Worker]:
        """Draw the victims, in rank order; fewer than ``count`` when there are no more, none when nobody fits."""
        fit = sorted(
            (w for w in workers if self._fits(w) and w.rank not in self.protect), key=lambda worker: worker.rank
        )
        chosen = random.Random(seed).sample(fit, min(self.count, len(fit)))
        return sorted(chosen, key=lambda worker: worker.rank)

    def _fits(self, worker: Worker) -> bool:
        wanted = ((self.rank, worker.rank), (self.stage, worker.stage), (self.node, worker.node))
        return all(want is None or want == has for want, has in wanted)


@dataclass(frozen=True)
class Timing:
    """When a fault happens.

    Attributes:
        after_s: so long after it could have happened.
        phase: only when a rebuild is in this phase (``spawn``, ``compile``, ...); "" for any time.
        after_steps: faults inside a step: in the step after so many more.
    """

    after_s: float = 0.0
    phase: str = ""
    after_steps: int = 0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happens.
        target: to whom.
        timing: when.
        seed: decides what is left to chance.
        duration_s: how long: until SIGCONT, the delay of a slow step or heartbeat, the length of a hang; 0 for ever.
        exit_code: for ``exit``.
    """

    kind: Kind
    target: Target = field(default_factory=Target)
    timing: Timing = field(default_factory=Timing)
    seed: int = 0
    duration_s: float = 0.0
    exit_code: int = 3

    def __post_init__(self) -> None:
        """Check; ``ValueError`` otherwise."""
        object.__setattr__(self, "kind", Kind(self.kind))
        if not 0 <= self.duration_s <= 3600:
            raise ValueError(f"duration_s must be 0 to 3600, not {self.duration_s:g}")

    @property
    def traits(self) -> Traits:
        """What is true of its kind."""
        return TRAITS[self.kind]

    @property
    def felt(self) -> bool | None:
        """Whether workers must be replaced because of it; None where either is right."""
        if self.kind in (Kind.STOP, Kind.HANG, Kind.SPIN) and self.duration_s == 0:
            return True
        return self.traits.felt

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fault:
        """The fault that ``to_json`` has given.

        Raises:
            ValueError, TypeError: it is none.
        """
        fields = dict(data)
        target, timing = Target(**fields.pop("target", {})), Timing(**fields.pop("timing", {}))
        return cls(target=target, timing=timing, **fields)

    def describe(self) -> str:
        """One line."""
        whom = [
            f"{name} {value}" for name in ("rank", "stage", "node") if (value := getattr(self.target, name)) is not None
        ]
        count = f"{self.target.count} of " if self.target.count > 1 else ""
        when = f" in phase {self.timing.phase}" if self.timing.phase else ""
        long = f" for {self.duration_s:g} s" if self.duration_s else ""
        return f"{self.kind.value}{long} on {count}{', '.join(whom) or f'any {self.traits.role}'}{when}"


def mark(number: int) -> str:
    """What the errors of one fault carry, so that the checker can tell whose they are."""
    return f"chaos-fault-{number}."


#: How often each kind comes in a storm. Kinds that need several nodes are left to the experiments that have them.
MIXTURE: Final[Mapping[Kind, int]] = {
    Kind.KILL: 6,
    Kind.STOP: 3,
    Kind.ABORT: 2,
    Kind.EXIT: 2,
    Kind.OUT_OF_MEMORY: 1,
    Kind.HANG: 2,
    Kind.SPIN: 1,
    Kind.SLOW: 1,
    Kind.RAISE: 2,
    Kind.RAISE_UNPICKLABLE: 1,
    Kind.RAISE_IN_RPC: 1,
    Kind.BREAK_GRAPH: 1,
    Kind.DROP_HEARTBEATS: 1,
    Kind.LATE_HEARTBEATS: 1,
    Kind.KILL_SUPERVISOR: 2,
    Kind.STOP_SUPERVISOR: 1,
    Kind.KILL_AGENT: 2,
    Kind.REMOVE_PLACEMENT_GROUP: 1,
}

#: Phases of a rebuild in which a second death may come.
PHASES: Final = ("spawn", "rank", "initialise", "load", "replay", "compile", "warm_up")


def draw(rng: random.Random, kinds: Mapping[Kind, int] = MIXTURE, protect: tuple[int, ...] = ()) -> Fault:
    """Draw one fault of a mixture: one kill in four hits two workers at once, one in four a rebuild."""
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    seed, count, phase, duration = rng.randrange(1 << 30), 1, "", 0.0
    if kind in (Kind.KILL, Kind.STOP):
        count = rng.choice((1, 1, 1, 2))
    if kind is Kind.KILL and rng.random() < 0.25:
        phase = rng.choice(PHASES)
    if kind is Kind.STOP:
        duration = rng.choice((0.0, 0.3, 1.5, 9.0))
    elif kind in (Kind.HANG, Kind.SPIN):
        duration = rng.choice((0.0, 1.0, 2.0))
    elif kind in (Kind.SLOW, Kind.LATE_HEARTBEATS):
        duration = rng.uniform(0.1, 1.0)
    elif kind is Kind.DROP_HEARTBEATS:
        duration = rng.uniform(0.5, 3.0)
    elif kind is Kind.STOP_SUPERVISOR:
        duration = rng.choice((0.0, 2.0))
    timing = Timing(phase=phase, after_steps=rng.randrange(4))
    return Fault(kind, Target(protect=protect, count=count), timing, seed, duration, exit_code=rng.choice((0, 1, 77)))
