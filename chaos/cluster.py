"""The cluster harness (see :mod:`resilient_executor.chaos.netns`) and its commands, ``resilient-chaos cluster ...``."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from resilient_executor.chaos.netns import DEFAULT_PREFIX, TUNED, ClusterError, NetnsCluster, missing, running

__all__ = ["TUNED", "ClusterError", "NetnsCluster", "add_commands", "missing", "run_command", "running"]

_ON_NODE: Final = {
    "kill": "SIGKILL every process of a node",
    "restart": "bring a node back as a new one",
    "stop": "SIGSTOP every process of a node",
    "cont": "SIGCONT them",
    "cut": "pull a node's cable",
    "heal": "put it back",
    "unslow": "give a node's link its full speed back",
}
_ON_PAIR: Final = {"pair-cut": "two nodes lose sight of each other", "pair-heal": "and see each other again"}


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``cluster up|down|run|...`` to a command line; the parsed arguments' ``run`` executes it."""
    cluster = subparsers.add_parser("cluster", help="several real nodes on this machine, in network namespaces")
    cluster.add_argument("--prefix", default=DEFAULT_PREFIX, help="of the namespaces' names (%(default)s)")
    actions = cluster.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser("up", help="make the nodes and start Ray on them; stays until 'down'")
    up.add_argument("nodes", nargs="?", type=int, default=4, help="how many, the head included (%(default)s)")
    up.add_argument("--cpus", type=int, default=1, help="of each node but the head (%(default)s)")
    up.add_argument("--ray-defaults", action="store_true", help="Ray's own health checks, not the fast ones")
    actions.add_parser("down", help="kill and remove everything of this prefix, also of a crashed run")
    actions.add_parser("status", help="nodes, addresses, and how many processes run on each")
    inside = actions.add_parser("run", help="run a command on the head, for instance a driver")
    inside.add_argument("command", nargs=argparse.REMAINDER)
    for name, text in _ON_NODE.items():
        actions.add_parser(name, help=text).add_argument("node", type=int)
    for name, text in _ON_PAIR.items():
        pair = actions.add_parser(name, help=text)
        pair.add_argument("node", type=int)
        pair.add_argument("peer", type=int)
    slow = actions.add_parser("slow", help="let a node's link carry only so much")
    slow.add_argument("node", type=int)
    slow.add_argument("kbit_per_s", type=int)
    cluster.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Execute a parsed ``cluster`` command; returns the exit code."""
    try:
        return _execute(arguments)
    except ClusterError as error:
        print(f"resilient-chaos cluster: {error}", file=sys.stderr)
        return 1


def _execute(arguments: argparse.Namespace) -> int:
    if why := missing():
        raise ClusterError(f"{why}. On this machine only faults of processes can be tried")
    action = arguments.action
    environment = {} if getattr(arguments, "ray_defaults", False) else TUNED
    cluster = NetnsCluster(arguments.prefix, cpus=getattr(arguments, "cpus", 1), environment=environment)
    if action == "up":
        cluster.up(arguments.nodes)
        print(f"{arguments.nodes} nodes; a driver: resilient-chaos cluster run COMMAND, with address={cluster.address}")
        return 0
    if action == "down":
        cluster.down()
        return 0
    if not (present := cluster.nodes()):
        raise ClusterError(f"there is no cluster with the prefix {cluster.prefix!r}; make one with 'up'")
    if action == "status":
        for node in present:
            print(f"node {node}  {cluster.ip(node)}  {len(cluster.pids(node))} processes")
        return 0
    if action == "run":
        if not arguments.command:
            raise ClusterError("no command is given")
        # Without a bound: it is the user's own command, in the foreground, and Ctrl-C ends it.
        return int(cluster.popen(0, arguments.command).wait())
    nodes = [arguments.node, arguments.peer] if action in _ON_PAIR else [arguments.node]
    if unknown := [node for node in nodes if node not in present]:
        raise ClusterError(f"there is no node {unknown[0]}; nodes are {present}")
    if action == "slow":
        cluster.slow(arguments.node, arguments.kbit_per_s)
    else:
        getattr(cluster, action.replace("-", "_"))(*nodes)
    return 0
