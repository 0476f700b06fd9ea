"""Finds a running executor by namespace and name, and says who belongs to it. Nobody else can be hit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from resilient_executor.chaos.faults import Worker
from resilient_executor.protocol import ProcessIdentity

PREFIX: Final = "resilient-executor.supervisor."
DEFAULT_NAMESPACE: Final = "resilient-executor"
#: For one supervisor to answer, in seconds.
_ANSWER_S: Final = 3.0


class ChaosError(Exception):
    """The chaos kit cannot do what it was asked for; nothing was broken by it."""


class NotFound(ChaosError):
    """There is no such executor, or more than one."""


class Refused(ChaosError):
    """It was not done: the steady state fails, or the executor does not allow it."""


@dataclass(frozen=True)
class Member:
    """One worker of the executor."""

    rank: int
    stage: int
    process: ProcessIdentity
    node_ip: str
    handle: Any = None

    @property
    def worker(self) -> Worker:
        """As faults choose it."""
        return Worker(self.rank, self.stage, self.node_ip)


@dataclass(frozen=True)
class Roster:
    """Everyone of one executor, at one moment.

    Attributes:
        members: in rank order; empty while a rebuild has not come far.
        supervisor: its process, or None while it is being replaced.
        agents: node id -> the actor that is that node's agent.
        standbys: processes of the warm standbys that are ready.
        status: what ``resilient-executor status --json`` shows.
    """

    name: str
    namespace: str
    epoch: int
    state: str
    phase: str
    members: tuple[Member, ...]
    supervisor: ProcessIdentity | None = None
    agents: Mapping[str, Any] = field(default_factory=dict)
    standbys: tuple[ProcessIdentity, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether all ranks are there and the executor says that it serves."""
        return self.state == "HEALTHY" and len(self.members) == self.status.get("world_size", len(self.members)) > 0


def connect(address: str = "auto", namespace: str = DEFAULT_NAMESPACE) -> bool:
    """Join a cluster; whether the connection was made here.

    Raises:
        NotFound: no cluster answers at the address.
    """
    if ray.is_initialized():
        return False
    _use_token()
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise NotFound(f"no Ray cluster answers at {address!r}: {error}") from None
    return True


def _use_token() -> None:
    """Show this user's token, where there is one and nobody has said otherwise (``RAY_AUTH_MODE``).

    Ray does so for ``auto``, and for the clusters that it starts; for an explicit address it does not, and is refused.
    """
    try:
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except (ImportError, AttributeError):
        return  # a Ray without tokens


def executors() -> list[tuple[str, str]]:
    """(namespace, executor's name) of all executors of the cluster."""
    found = {
        (actor["namespace"], actor["name"].removeprefix(PREFIX).rpartition(".")[0])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if (actor["name"] or "").startswith(PREFIX)
    }
    return sorted(found)


def look(name: str, namespace: str = DEFAULT_NAMESPACE, timeout_s: float = 15.0) -> Roster:
    """Who belongs to the executor, now. Waits for a supervisor that is being replaced, at most ``timeout_s``.

    Raises:
        NotFound: there is none, or several of this name and namespace.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answers = _supervisors(name, namespace)
        if len(answers) > 1:
            pids = sorted(str(answer["status"].get("driver", {}).get("pid")) for answer in answers)
            raise NotFound(
                f"{len(answers)} executors are named {name!r} in namespace {namespace!r} "
                f"(drivers: pid {', '.join(pids)}); "
                "give each its own name"
            )
        if answers:
            return _roster(name, namespace, answers[0])
        if time.monotonic() > deadline:
            known = ", ".join(f"{n} in namespace {s}" for s, n in executors()) or "none"
            raise NotFound(f"no executor {name!r} in namespace {namespace!r} answers; known are: {known}")
        time.sleep(0.2)


def _supervisors(name: str, namespace: str) -> list[dict[str, Any]]:
    """What each living supervisor of the executor says; one that is dying or stopped says nothing."""
    answers = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        full = actor["name"] or ""
        if actor["namespace"] != namespace or full.rpartition(".")[0] != f"{PREFIX}{name}":
            continue
        try:
            handle = ray.get_actor(full, namespace=namespace)
            answers.append(ray.get(handle.roster.remote(), timeout=_ANSWER_S))
        except (RayError, GetTimeoutError, ValueError):
            continue
    return answers


def _roster(name: str, namespace: str, answer: Mapping[str, Any]) -> Roster:
    status = answer["status"]
    tp = max(1, int(status.get("tensor_parallel_size", 1)))
    members = sorted(answer["workers"], key=lambda worker: int(worker["rank"]))
    return Roster(
        name=name,
        namespace=namespace,
        epoch=answer["epoch"],
        state=status["state"],
        phase=status.get("phase", ""),
        members=tuple(Member(m["rank"], m["rank"] // tp, m["process"], m["node_ip"], m["handle"]) for m in members),
        supervisor=answer["supervisor"],
        agents=answer["agents"],
        standbys=tuple(answer["standbys"]),
        status=status,
    )
