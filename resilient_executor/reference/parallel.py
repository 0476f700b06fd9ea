"""Process groups over gloo: joining the world, and the collectives of a tensor parallel group."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from resilient_executor.reference.errors import CollectiveFailed

if TYPE_CHECKING:
    from resilient_executor.protocol import RankAssignment

_SIOCGIFADDR: Final = 0x8915  # Linux: address of a network interface


class TensorParallel:
    """The collectives of one stage's ranks; with one rank they do nothing.

    Every method raises CollectiveFailed when a peer is gone or does not come within the timeout.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            with _failures("all-reduce"):
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather_columns(self, tensor: Tensor) -> Tensor | None:
        """Join ``tensor`` [rows, columns / size] of all ranks to [rows, columns] on rank 0; None on the others."""
        if self.size == 1:
            return tensor
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.size)] if self.rank == 0 else None
        with _failures("gather"):
            dist.gather(tensor.contiguous(), parts, group=self._group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=1)


def join(assignment: RankAssignment, timeout_s: float) -> TensorParallel:
    """Join the process group of this epoch and make every TP group; returns this rank's one.

    Every wait, the rendezvous included, ends after ``timeout_s``. A world of one rank makes no process group.

    Raises:
        CollectiveFailed: the other ranks did not come.
    """
    if assignment.world_size == 1:
        return TensorParallel(0, 1, None)
    _bind_gloo_towards(assignment.distributed_init_method)
    timeout = timedelta(seconds=timeout_s)
    mine: dist.ProcessGroup | None = None
    with _failures(f"rendezvous at {assignment.distributed_init_method}"):
        dist.init_process_group(
            "gloo",
            init_method=assignment.distributed_init_method,
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=timeout,
        )
        if assignment.tp_size > 1:
            # new_group is collective over the whole world: all ranks make all groups, in the same order.
            for stage in range(assignment.pp_size):
                ranks = list(range(stage * assignment.tp_size, (stage + 1) * assignment.tp_size))
                group = dist.new_group(ranks, timeout=timeout)
                if stage == assignment.pp_rank:
                    mine = group
    return TensorParallel(assignment.tp_rank, assignment.tp_size, mine)


def leave() -> None:
    """Destroy the process group, if there is one; safe to call again."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _failures(operation: str) -> Iterator[None]:
    """Turn torch's errors (RuntimeError and its kin) into CollectiveFailed."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise CollectiveFailed(f"{operation} failed, a peer is gone, stuck or out of step: {error}") from error


def _bind_gloo_towards(init_method: str) -> None:
    """Make gloo listen on the interface that leads to the rendezvous, unless GLOO_SOCKET_IFNAME says otherwise.

    By default gloo listens on what the host name resolves to, which often is a loopback address, or another node's.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    host = urlsplit(init_method).hostname
    if host is None or ":" in host:  # a file:// rendezvous has no host; IPv6 is left to gloo
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing; picks a route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return
