"""A real Ray cluster of several nodes on one machine: one network namespace and one address a node.

Everything that can happen to a cluster's nodes and cables happens here for real: a node's processes are killed or
stopped, its link goes down, two nodes lose sight of each other. Needs root and iproute2, nothing else. The driver runs
inside, too: :meth:`NetnsCluster.popen`, node 0.

``ray stop`` is never used: processes are not isolated, it would end every Ray on the machine. What belongs to a cluster
is what runs in its namespaces, and they are found by the prefix of their names: so :meth:`NetnsCluster.down` also
removes what a crashed run has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from resilient_executor import semaphores

#: Health checks of Ray's head that notice a dead node in 1.4 s and a silent one in 3 to 4.5 s (docs/operations.md).
TUNED: Final[Mapping[str, str]] = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # These must be the same in every process, the driver included.
    "RAY_grpc_client_keepalive_time_ms": "1000",
    "RAY_grpc_client_keepalive_timeout_ms": "1000",
}
DEFAULT_PREFIX: Final = "rx"
#: A file in the folder of a cluster: it is removed with everything in it, and nobody else's may be.
_MARK: Final = ".resilient-chaos"
#: Tells a command that runs inside whose cluster it is in.
PREFIX_VARIABLE: Final = "RESILIENT_CHAOS_CLUSTER"
#: What ``ip netns exec NAME`` puts in the place of files of /etc.
_SETTINGS: Final = Path("/etc/netns")
_NETWORK: Final = "10.77.0"
_PORT: Final = 6379
_STORE_BYTES: Final = 300_000_000
#: For one ``ip`` command, and for the processes of a node to be gone, in seconds.
_COMMAND_S: Final = 20.0
#: For Ray to start on one node, in seconds.
_START_S: Final = 90.0
#: Longest unix socket path is 107 bytes, and Ray adds about 75 to its folder.
_LONGEST_FOLDER: Final = 30


class ClusterError(RuntimeError):
    """The cluster cannot be made, or a command on it failed; the message says why."""


def missing() -> str:
    """Why this machine cannot have such a cluster, or ""."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the ip command is missing: install iproute2"
    probe = f"rxprobe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "br0", "type", "bridge")
        finally:
            _ip("netns", "del", probe)
    except ClusterError as error:
        return f"no network namespace with a bridge can be made here ({error})"
    return ""


class NetnsCluster:
    """Node 0 is the head and the driver's; it offers no CPU. Nodes 1 .. n-1 offer ``cpus`` each.

    Args:
        prefix: begins the names of all namespaces; two clusters of one machine need two.
        cpus: of each node but the head.
        environment: added to that of Ray's processes and of commands run inside; :data:`TUNED` by default.
        ray: the ``ray`` command; None takes the one beside this Python.
    """

    def __init__(
        self,
        prefix: str = DEFAULT_PREFIX,
        *,
        cpus: int = 1,
        environment: Mapping[str, str] = TUNED,
        ray: str | None = None,
    ) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,8}", prefix):
            raise ClusterError(f"the prefix must be 1 to 9 small letters and digits, not {prefix!r}")
        self.prefix = prefix
        self.cpus = cpus
        self._ray = ray or str(Path(sys.executable).with_name("ray"))
        self._environment = {
            **os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            PREFIX_VARIABLE: prefix, **environment,
        }  # fmt: skip
        self._environment.pop("RAY_ADDRESS", None)
        folder = Path(tempfile.gettempdir()) / f"chaos-{prefix}"
        self._folder = folder if len(str(folder)) <= _LONGEST_FOLDER else Path("/tmp") / folder.name

    @property
    def address(self) -> str:
        """What a driver inside passes to Ray."""
        return f"{self.ip(0)}:{_PORT}"

    def ip(self, node: int) -> str:
        """The address of a node."""
        return f"{_NETWORK}.{10 + node}"

    def folder(self, node: int) -> Path:
        """Where Ray's session folder of a node is, with its logs."""
        return self._folder / f"n{node}"

    def nodes(self) -> list[int]:
        """The nodes that there are now, dead ones included."""
        return sorted(int(n.removeprefix(f"{self.prefix}n")) for n in self._namespaces() if not n.endswith("sw"))

    # -- up and down ------------------------------------------------------------------------------------------------

    def up(self, count: int) -> None:
        """Make ``count`` nodes and wait until Ray runs on all of them; a former cluster of this prefix is removed.

        Raises:
            ClusterError: that is not possible here, or Ray did not start; nothing is left then.
        """
        if why := missing():
            raise ClusterError(why)
        if not 2 <= count <= 100:
            raise ClusterError(f"a cluster has 2 to 100 nodes, not {count}")
        self.down()
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:  # ``down`` removes only what carries our mark
            raise ClusterError(f"{self._folder} is somebody else's; choose another prefix") from None
        (self._folder / _MARK).touch()
        try:
            self._wire(count)
            self._await_start({0: self._start(0)})
            self._await_start({node: self._start(node) for node in range(1, count)})
        except BaseException:  # Ctrl-C among them
            self.down()
            raise

    def _wire(self, count: int) -> None:
        switch = f"{self.prefix}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "addr", "add", f"{_NETWORK}.1/24", "dev", "br0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for node in range(count):
            name = self._namespace(node)
            # torch asks for the name of every address that it connects to; here nobody would answer, for 10 s each.
            settings = _SETTINGS / name
            settings.mkdir(parents=True, exist_ok=True)
            (settings / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"v{node}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.ip(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            # pair_cut's rules must come before the table of local addresses, which is the first as a rule.
            _ip("-n", name, "rule", "add", "pref", "100", "lookup", "local")
            _ip("-n", name, "rule", "del", "pref", "0")
            # Ray finds its own address by "connecting" a socket outwards; nothing is sent there.
            _ip("-n", name, "route", "add", "default", "via", f"{_NETWORK}.1")

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        where = (
            ["--head", f"--port={_PORT}", "--num-cpus=0", "--include-dashboard=false"]
            if node == 0
            else [f"--address={self.address}", f"--num-cpus={self.cpus}"]
        )
        command = [
            self._ray, "start", *where, f"--node-ip-address={self.ip(node)}", f"--temp-dir={self.folder(node)}",
            f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", "--include-log-monitor=false",
        ]  # fmt: skip
        with open(self._log(node), "wb") as log:
            return self.popen(node, command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def _await_start(self, starting: Mapping[int, subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + _START_S
        for node, process in starting.items():
            try:
                if process.wait(max(0.1, deadline - time.monotonic())) == 0:
                    continue
                why = f"Ray did not start on node {node}"
            except subprocess.TimeoutExpired:
                why = f"Ray did not start on node {node} within {_START_S:g} s"
            raise ClusterError(f"{why}: {self._log(node).read_text(errors='replace')[-600:]}")

    def down(self) -> None:
        """Kill and remove everything of this prefix, whoever made it. Twice is fine."""
        for name in self._namespaces():
            _end(name)
            with contextlib.suppress(ClusterError):
                _ip("netns", "del", name)
            shutil.rmtree(_SETTINGS / name, ignore_errors=True)
        if (self._folder / _MARK).exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> NetnsCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- inside -----------------------------------------------------------------------------------------------------

    def popen(self, node: int, command: Sequence[str], **arguments: Any) -> subprocess.Popen[Any]:
        """Start a command on a node. It ends with this process, unless it makes a daemon of itself, as Ray does."""
        inside = ["ip", "netns", "exec", self._namespace(node), *command]
        arguments.setdefault("env", self._environment)
        return subprocess.Popen(inside, preexec_fn=_end_with_parent, **arguments)  # noqa: PLW1509 - one system call

    # -- faults -----------------------------------------------------------------------------------------------------

    def kill(self, node: int) -> None:
        """SIGKILL every process of a node, as when its power is cut. The address stays."""
        _end(self._namespace(node))

    def restart(self, node: int) -> None:
        """Bring a node back as a new one: whatever still runs there is killed, links are healed, Ray is started.

        Raises:
            ClusterError: Ray did not start.
        """
        self.cont(node)
        self.kill(node)
        self.heal(node)
        self._await_start({node: self._start(node)})

    def stop(self, node: int) -> None:
        """SIGSTOP every process of a node; those that it makes meanwhile, too."""
        for _ in range(3):
            _signal(_pids(self._namespace(node)), signal.SIGSTOP)

    def cont(self, node: int) -> None:
        """SIGCONT every process of a node."""
        _signal(_pids(self._namespace(node)), signal.SIGCONT)

    def cut(self, node: int) -> None:
        """Pull a node's cable: silence, no error."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"v{node}", "down")

    def heal(self, node: int) -> None:
        """Put the cable back."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"v{node}", "up")

    def pair_cut(self, one: int, other: int) -> None:
        """Two nodes lose sight of each other; both still see all others. Silent: what arrives is dropped."""
        # A rule of the routing policy, as not every machine has a packet filter.
        for node, peer in ((one, other), (other, one)):
            _ip("-n", self._namespace(node), "rule", "add", "pref", "10", *self._from(peer))

    def pair_heal(self, one: int, other: int) -> None:
        """Undo :meth:`pair_cut`. Twice is fine."""
        for node, peer in ((one, other), (other, one)):
            with contextlib.suppress(ClusterError):
                _ip("-n", self._namespace(node), "rule", "del", "pref", "10", *self._from(peer))

    def _from(self, node: int) -> list[str]:
        return ["from", self.ip(node), "iif", "eth0", "blackhole"]

    def slow(self, node: int, kbit_per_s: int) -> None:
        """Let a node's link carry so much in each direction; what is too much waits, up to 2 s.

        Raises:
            ClusterError: there is no tc, or the kernel lacks the token bucket filter.
        """
        self.unslow(node)
        for namespace, device in self._ends(node):
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                 "rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "2s")  # fmt: skip

    def unslow(self, node: int) -> None:
        """Give the link its full speed back. Twice is fine."""
        for namespace, device in self._ends(node):
            with contextlib.suppress(ClusterError):
                _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def _ends(self, node: int) -> list[tuple[str, str]]:
        return [(f"{self.prefix}sw", f"v{node}"), (self._namespace(node), "eth0")]

    def pids(self, node: int) -> list[int]:
        """The processes of a node."""
        return _pids(self._namespace(node))

    def _namespace(self, node: int) -> str:
        return f"{self.prefix}n{node}"

    def _namespaces(self) -> list[str]:
        names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]
        return [name for name in names if re.fullmatch(rf"{self.prefix}(n\d+|sw)", name)]

    def _log(self, node: int) -> Path:
        return self._folder / f"n{node}.log"


@contextlib.contextmanager
def running(count: int, prefix: str = DEFAULT_PREFIX, **settings: Any) -> Iterator[NetnsCluster]:
    """A cluster that is gone afterwards, also after Ctrl-C or SIGTERM."""
    cluster = NetnsCluster(prefix, **settings)
    try:
        cluster.up(count)
        yield cluster
    finally:
        cluster.down()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _pids(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    except ClusterError:  # it has gone meanwhile
        return []


def _end(namespace: str) -> None:
    """Kill everything in a namespace, and remove what a killed raylet leaves in the machine's shared memory."""
    deadline, ended = time.monotonic() + _COMMAND_S, set[int]()
    while (pids := _pids(namespace)) and time.monotonic() < deadline:
        ended.update(pids)
        _signal(pids, signal.SIGKILL)
        time.sleep(0.01)
    for pid in ended:
        semaphores.remove_all(pid)


def _signal(pids: Sequence[int], number: signal.Signals) -> bool:
    """Send a signal to each; returns whether there was anybody."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def _end_with_parent() -> None:
    """In the child: be killed when the parent ends (prctl's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
