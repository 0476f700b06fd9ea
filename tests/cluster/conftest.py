"""A cluster of four real nodes (namespaces) and a driver on its head, for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from commander import Commander

from resilient_executor.chaos.cluster import NetnsCluster, missing, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[NetnsCluster]:
    """The head and three nodes of one CPU each: two in use, one to spare."""
    if why := missing():
        pytest.skip(why)
    with running(4, f"rt{os.getpid() % 100000}") as one:
        yield one


@pytest.fixture(scope="session")
def commander(cluster: NetnsCluster) -> Iterator[Commander]:
    """A driver that serves, PP=2 over two nodes."""
    with Commander(cluster, {"backoff_initial_s": 0.05, "backoff_max_s": 0.5, "max_restarts": 1000}) as one:
        yield one
