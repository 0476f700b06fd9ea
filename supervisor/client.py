"""The executor's side of supervision: the supervisor actor, the node agents, and the thread that listens to them.

Both kinds of actor may die at any time, with a worker or alone. They are made anew, with what is known here; nothing
that a restart would lose is kept in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from resilient_executor.actors import actor_class
from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import ConfigError, ResilientExecutorError
from resilient_executor.processes import identify, vitals
from resilient_executor.protocol import ProcessIdentity
from resilient_executor.supervisor import links
from resilient_executor.supervisor.actor import Examination, Finding, Member, SupervisorActor
from resilient_executor.supervisor.agent import Fenced, NodeAgent
from resilient_executor.supervisor.agents import Agents
from resilient_executor.supervisor.fencing import Fencing
from resilient_executor.supervisor.incidents import CauseKind
from resilient_executor.supervisor.nodes import NodeWatch
from resilient_executor.supervisor.progress import DriverView
from resilient_executor.supervisor.standin import Charges, StandIn
from resilient_executor.supervisor.status import News
from resilient_executor.supervisor.watch import WatchSettings

logger = logging.getLogger(__name__)

#: A long poll returns after this many seconds without news, so that its thread notices a shutdown, or a supervisor
#: that does not answer.
_POLL_S: Final = 1.0
#: Before the executor's name in the name of its supervisor's actor; behind it comes a dot and a random number.
SUPERVISOR_PREFIX: Final = "resilient-executor.supervisor."
#: What a call may take beyond the time that the callee was given.
_GRACE_S: Final = 5.0
#: A supervisor that runs, and gives no answer for so many seconds, is replaced all the same.
SLOW_S: Final = 60.0


class SupervisorUnreachable(ResilientExecutorError):
    """The supervisor did not answer. If it has died, or is stopped, it is being replaced."""


class Supervision:
    """Makes, feeds and replaces the supervisor and the agents. Safe for several threads."""

    def __init__(
        self,
        config: ExecutorConfig,
        on_finding: Callable[[Finding], None],
        view: Callable[[int], DriverView] = lambda _: DriverView(),
    ) -> None:
        """Nothing is started yet.

        Args:
            config: heartbeat and time settings.
            on_finding: called in the listening thread, once for each finding; must not block.
            view: what is known of an epoch here; called in the same thread.
        """
        self._config, self._on_finding, self._view = config, on_finding, view
        self._node_id = ray.get_runtime_context().get_node_id()
        self._lock = threading.RLock()
        self._supervisor: ActorHandle | None = None
        self._agents = Agents(lambda node: self._make(NodeAgent, node).remote(), identify(os.getpid(), self._node_id))
        self._epoch = 0
        self._members: tuple[Member, ...] = ()
        self._known = 0
        self._stopping = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="resilient-executor-listen", daemon=True)
        self._supervisor_process: ProcessIdentity | None = None
        #: When the supervisor was last heard; and when it was made, or told of an epoch: it is not silent for longer.
        self._heard_at = self._expected_at = 0.0
        self._stand_in = StandIn(config, self._charges, self._stopping)
        self._nodes = NodeWatch(self._on_node, self._fence_soon, self._stopping)
        #: Whether the executor could be placed without these nodes; only then is one left, or given up.
        self.can_do_without: Callable[[frozenset[str]], bool] = lambda nodes: False
        self._news: News | None = None
        #: Where the endpoint listens, once it does; a new supervisor takes the same port.
        self.status_url: str | None = None
        self._status_port = config.status_port

    def start(self) -> None:
        """Start the supervisor and this node's agent; both come up while the workers do."""
        with self._lock:
            self._supervisor = self._make_supervisor()
        self._agents.get(self._node_id)
        self._listener.start()
        self._stand_in.start()
        self._nodes.start()

    def open_endpoint(self) -> None:
        """Have the supervisor open its endpoint, where one is configured.

        Raises:
            ConfigError: that address cannot be listened at.
        """
        host, port = self._config.status_host, self._status_port
        if port is None:
            return
        assert self._supervisor is not None
        opened = ray.get(self._supervisor.serve.remote(host, port), timeout=self._config.start_timeout_s)
        if isinstance(opened, str):
            raise ConfigError(
                f"the endpoint cannot listen at status_host {host!r}, status_port {port}: {opened}. Choose others, or "
                "status_port=0 for any free port"
            )
        self._status_port = opened
        self.status_url = f"http://{f'[{host}]' if ':' in host else host}:{opened}"

    def tell(self, news: News) -> None:
        """Pass on what the executor knows. Does not wait."""
        with self._lock:
            self._news, supervisor = news, self._supervisor
        if supervisor is not None and not self._stopping.is_set():
            supervisor.tell.remote(news)

    def _make_supervisor(self) -> ActorHandle:
        # Named, so that the chaos kit finds it by the executor's; unique, because the one before may still be dying.
        name = f"{SUPERVISOR_PREFIX}{self._config.name}.{secrets.token_hex(4)}"
        self._expected_at = time.monotonic()
        actor = self._make(SupervisorActor, self._node_id, name=name)
        return actor.remote(WatchSettings.from_config(self._config))

    def _charges(self) -> Charges:
        """Whose leases somebody must renew, and since when the supervisor has not been heard."""
        limit_s = _POLL_S + self._config.heartbeat_interval_s
        with self._lock:
            neglected = time.monotonic() - self._heard_at > limit_s
            return Charges(self._epoch, self._members, self._agents.handles(), neglected)

    def _make(self, cls: type, node_id: str, **options: Any) -> Any:
        # Ray's own affinity strategy, not a placement group: these outlive the groups of all epochs.
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        # Ray keeps a record of each call and sends it to the cluster's head; these are too many, and of no interest.
        options |= {"num_cpus": 0, "max_concurrency": 1000, "enable_task_events": False}
        return actor_class(cls).options(scheduling_strategy=strategy, **options)

    def be_on(self, nodes: Iterable[str]) -> None:
        """Have an agent on each of these nodes. Does not wait for them."""
        for node_id in nodes:
            self._agents.get(node_id)

    # -- the epoch --------------------------------------------------------------------------------------------------

    def adopt(self, epoch: int, members: Sequence[Member]) -> None:
        """Have these workers watched from now on, instead of all earlier ones. Waits until they are."""
        with self._lock:
            self._epoch, self._members, self._known = epoch, tuple(members), 0
            self._expected_at = time.monotonic()
        by_node: dict[str, list[ProcessIdentity]] = {}
        for member in members:
            by_node.setdefault(member.process.node_id, []).append(member.process)
        for node_id, processes in by_node.items():
            self._ask_agent(node_id, "watch", processes)
        self._introduce()

    def _introduce(self) -> None:
        """Tell the supervisor whom to watch; a dead one is replaced."""
        for attempt in (1, 2):
            with self._lock:
                supervisor, epoch, members = self._supervisor, self._epoch, self._members
            agents = self._agents.handles()
            try:
                assert supervisor is not None
                process = ray.get(supervisor.adopt.remote(epoch, members, agents), timeout=_GRACE_S + 25)
                with self._lock:
                    if self._supervisor is supervisor:
                        self._supervisor_process, self._heard_at = process, time.monotonic()
                return
            except (RayError, GetTimeoutError):
                if attempt == 2 or self._stopping.is_set():
                    raise
                self._replace(supervisor)

    def _replace(self, lost: ActorHandle | None) -> None:
        """Put a new supervisor in the place of a lost one, unless another thread has done so already."""
        with self._lock:
            if self._supervisor is not lost or self._stopping.is_set():
                return
            logger.warning("the supervisor is gone; starting a new one for epoch %d", self._epoch)
            if lost is not None:
                ray.kill(lost, no_restart=True)
            if (process := self._supervisor_process) is not None:  # stopped, it would outlive Ray's kill
                self.kill(process)
            self._supervisor_process = None
            self._supervisor = self._make_supervisor()
            self._known = 0
            if self._status_port is not None:
                # The lost one's port is free when its process is gone, which takes a moment; the first try that works.
                self._supervisor.serve.remote(self._config.status_host, self._status_port, _GRACE_S)
            if self._news is not None:
                self._supervisor.tell.remote(self._news)

    def retire(self, epoch: int) -> None:
        """End the watch over an epoch: its workers are about to be killed."""
        with self._lock:
            if epoch == self._epoch:
                self._members = ()
            supervisor = self._supervisor
        if supervisor is not None:
            supervisor.retire.remote(epoch)

    def _listen(self) -> None:
        """Long-poll the supervisor for findings, and replace it when it is gone."""
        while not self._stopping.is_set():
            with self._lock:
                supervisor, epoch, known, members = self._supervisor, self._epoch, self._known, self._members
            if not members:
                self._stopping.wait(0.02)
                continue
            try:
                assert supervisor is not None
                call = supervisor.findings.remote(epoch, known, _POLL_S, self._view(epoch))
                findings = ray.get(call, timeout=_POLL_S + _GRACE_S)
            except (RayError, GetTimeoutError) as error:
                if not (self._stopping.is_set() or (isinstance(error, GetTimeoutError) and self._is_slow())):
                    self._recover_supervisor(supervisor)
                continue
            except Exception:
                if self._stopping.is_set():
                    return  # Ray itself is going down
                logger.exception("listening to the supervisor failed")
                self._stopping.wait(1.0)
                continue
            self._heard_at = time.monotonic()
            with self._lock:
                fresh = findings[known:] if epoch == self._epoch else []
                self._known += len(fresh)
            for finding in fresh:
                self._on_finding(finding)
            try:
                self._replace_agents()
            except Exception:
                logger.exception("putting an agent in the place of a dead one failed")

    def _replace_agents(self) -> None:
        """Put new agents in the place of those that have died under their workers. Does not wait for them."""
        for node_id in self._agents.take_dead():
            with self._lock:  # an agent that is made here is among those that `stop` ends
                local = [member.process for member in self._members if member.process.node_id == node_id]
                if not local or self._stopping.is_set() or not self._nodes.is_alive_node(node_id):
                    continue
                agent, supervisor, epoch = self._agents.get(node_id), self._supervisor, self._epoch
            agent.watch.remote(local)
            if supervisor is not None:
                supervisor.take_agent.remote(epoch, node_id, agent)

    def _is_slow(self) -> bool:
        """Whether a silent supervisor waits for a processor: another one would wait, too. The stand-in beats for it."""
        with self._lock:
            process, since = self._supervisor_process, max(self._heard_at, self._expected_at)
        if time.monotonic() - since > SLOW_S:
            return False
        with contextlib.suppress(OSError, ValueError, IndexError):
            seen = vitals(process) if process is not None else None
            return process is None or (seen is not None and seen.runnable)  # None: it has not come up yet
        return False

    def _recover_supervisor(self, lost: ActorHandle | None) -> None:
        self._replace(lost)
        try:
            self._introduce()
        except (RayError, GetTimeoutError):
            logger.warning("the new supervisor does not answer either; trying again")
            self._stopping.wait(1.0)

    # -- questions --------------------------------------------------------------------------------------------------

    def examine(self, epoch: int, timeout_s: float) -> Examination:
        """Ask every worker of ``epoch`` through the supervisor, now.

        Raises:
            SupervisorUnreachable: no answer from the supervisor itself; if it is lost, a new one is on its way.
        """
        supervisor = self._supervisor
        try:
            assert supervisor is not None
            result: Examination = ray.get(supervisor.examine.remote(epoch, timeout_s), timeout=timeout_s + 1.0)
            return result
        except (RayError, GetTimeoutError) as error:
            raise SupervisorUnreachable(f"the supervisor does not answer ({type(error).__name__})") from error

    def pulse(self, timeout_s: float = 2.0) -> dict[int, tuple[list[float], float, float]]:
        """Rank -> round trips of its heartbeats since the last call and its silence, in seconds, and its suspicion.

        Raises:
            ray.exceptions.RayError: the supervisor gives no answer.
        """
        supervisor = self._supervisor
        if supervisor is None:
            return {}
        return ray.get(supervisor.pulse.remote(), timeout=timeout_s)  # type: ignore[no-any-return]  # Ray has no types

    def fence(self, processes: Sequence[ProcessIdentity]) -> list[Fenced]:
        """Kill processes on their nodes and have it proven, at most ``fence_timeout_s`` for all nodes together.

        A process on a node that Ray has declared dead counts as gone: nothing there can be asked any more. One on a
        node that does not answer counts as ended when its lease has run out since: it writes to no channel any more.
        Its device may still be held; so that node is given up, and nothing is placed there until the proof has come.
        """
        return Fencing(self._nodes, self._agents.get, self._agents.drop, self._config, self._node_id).run(
            processes, self.can_do_without
        )

    def _fence_soon(self, node_id: str, processes: Sequence[ProcessIdentity]) -> Any:
        return self._agents.get(node_id).fence.remote(list(processes), self._config.fence_timeout_s)

    def unfit_nodes(self) -> frozenset[str]:
        """Ids of the nodes where nothing new may be placed; see :class:`NodeWatch`."""
        return self._nodes.unfit()

    def cut_pairs(self, nodes: Iterable[str]) -> list[links.Pair]:
        """Have these nodes connect to each other, now; returns the pairs that do not see each other, at most 3 s."""
        agents = self._agents.handles({self._node_id, *nodes})
        if len(agents) < 2:
            return []
        return asyncio.run(self._look_at_links(agents))

    async def _look_at_links(self, agents: dict[str, ActorHandle]) -> list[links.Pair]:
        peers = await links.doors(agents)
        _, failed = await links.look(self._node_id, agents, peers)
        return sorted(failed)

    def _on_node(self, node_id: str, word: str) -> None:
        """Ray says that a node is dead, or will be."""
        with self._lock:
            epoch, members = self._epoch, self._members
        if word == "dead":
            self._agents.drop(node_id)
        here = [member for member in members if member.process.node_id == node_id]
        if not here:
            return
        kind, text = CauseKind.NODE_LOSS, "Ray has declared the node dead"
        if word == "draining":
            if not self._config.move_on_drain:
                return
            if not self.can_do_without(self._nodes.unfit()):
                logger.warning("node %s is being drained, and there is no room elsewhere", here[0].node_ip)
                return
            kind, text = CauseKind.NODE_DRAIN, "the group moves before the node goes"
        self._on_finding(Finding(epoch, kind, here[0].rank, time.time(), text))

    def kill(self, process: ProcessIdentity) -> None:
        """Have one process killed without waiting for it; :meth:`fence` proves it later."""
        self._agents.get(process.node_id).fence.remote([process], self._config.fence_timeout_s)

    def forget(self, processes: Sequence[ProcessIdentity], timeout_s: float = 0.0) -> None:
        """Let the agents drop what they know of a buried epoch, and remove what it has left in shared memory."""
        references = [agent.forget.remote(list(processes)) for agent in self._agents.handles().values()]
        if timeout_s > 0 and references:
            ray.wait(references, num_returns=len(references), timeout=timeout_s)

    def _ask_agent(self, node_id: str, method: str, *args: Any) -> Any:
        """Call an agent; a dead one is replaced. None when the node gives no answer, or is dead."""
        limit = self._config.fence_timeout_s + _GRACE_S
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self._nodes.is_alive_node(node_id):
            agent = self._agents.get(node_id)
            try:
                return ray.get(getattr(agent, method).remote(*args), timeout=max(0.1, deadline - time.monotonic()))
            except (RayError, GetTimeoutError):
                self._agents.drop(node_id, agent)
                time.sleep(0.2)
        logger.warning("the agent of node %s gave no answer within %g s", node_id[:8], limit)
        return None

    # -- the end ----------------------------------------------------------------------------------------------------

    def actor_processes(self) -> list[ActorHandle]:
        """The supervisor and the agents, for whoever wants to look at (or kill) them."""
        with self._lock:
            return [h for h in (self._supervisor, *self._agents.handles().values()) if h is not None]

    def stop(self) -> None:
        """Stop listening, and end the supervisor and the agents."""
        self._stopping.set()
        with self._lock:
            handles = self.actor_processes()
            self._supervisor, self._members = None, ()
            self._agents.clear()
        for handle in handles:
            ray.kill(handle, no_restart=True)
        for thread in (self._listener, self._stand_in, self._nodes):
            if thread.is_alive():
                thread.join(_POLL_S + _GRACE_S + 1)
