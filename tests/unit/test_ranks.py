"""Rank order, topology checks and assignments."""

from __future__ import annotations

import ipaddress
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor import ranks
from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import TopologyError
from resilient_executor.protocol import ProcessIdentity, WorkerInfo, WorkerSpec


def worker(created_rank: int, node: str, ip: str, devices: tuple[str, ...] = (), pid: int | None = None) -> WorkerInfo:
    pid = 1000 + created_rank if pid is None else pid
    return WorkerInfo(created_rank, ProcessIdentity(pid, 7, node), ip, devices, f"actor{created_rank}")


def config(tp: int, pp: int, aggregate: bool = False) -> ExecutorConfig:
    return ExecutorConfig(
        worker=WorkerSpec(cls="somewhere:Worker"),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        output_aggregator=list if aggregate else None,
    )


ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str) | st.sampled_from(
    ["gpu-a", "gpu-b", "gpu-c"]
)


@st.composite
def groups(draw: st.DrawFn) -> list[WorkerInfo]:
    """Workers on nodes that have one address each, in any order."""
    ips = draw(st.lists(ADDRESSES, min_size=1, max_size=5, unique=True))
    homes = draw(st.lists(st.integers(0, len(ips) - 1), min_size=1, max_size=12))
    return draw(st.permutations([worker(i, f"node{home}", ips[home]) for i, home in enumerate(homes)]))


def test_rank_order_follows_every_rule_in_turn() -> None:
    workers = [
        worker(0, "crowded", "10.0.0.1"),
        worker(1, "crowded", "10.0.0.1"),
        worker(2, "ten", "10.0.0.10"),
        worker(3, "driver", "10.0.0.99"),
        worker(4, "driver", "10.0.0.99"),
        worker(5, "driver", "10.0.0.99"),
        worker(6, "nine", "10.0.0.9"),
    ]
    ordered = ranks.order_ranks(workers, "driver")
    assert [w.created_rank for w in ordered] == [3, 4, 5, 6, 2, 0, 1]
    assert ranks.rank_mapping(ordered) == {3: 0, 4: 1, 5: 2, 6: 3, 2: 4, 0: 5, 1: 6}


def test_addresses_are_compared_as_addresses_and_names_come_last() -> None:
    workers = [
        worker(i, f"n{i}", ip) for i, ip in enumerate(["beta", "fe80::10", "fe80::9", "10.0.0.10", "9.0.0.9", "a"])
    ]
    ordered = [w.node_ip for w in ranks.order_ranks(workers, "elsewhere")]
    assert ordered == ["9.0.0.9", "10.0.0.10", "fe80::9", "fe80::10", "a", "beta"]


@given(groups(), st.integers(0, 5))
def test_order_is_a_permutation_by_the_rule_with_nodes_together(workers: list[WorkerInfo], driver: int) -> None:
    driver_node = f"node{driver}"
    ordered = ranks.order_ranks(workers, driver_node)
    assert sorted(w.created_rank for w in ordered) == list(range(len(workers)))
    assert sorted(ranks.rank_mapping(ordered).values()) == list(range(len(workers)))

    blocks = [(node, list(block)) for node, block in itertools.groupby(ordered, key=lambda w: w.process.node_id)]
    nodes = [node for node, _ in blocks]
    assert len(nodes) == len(set(nodes)), "the workers of one node must be neighbours"
    if driver_node in nodes:
        assert nodes[0] == driver_node
        blocks = blocks[1:]
    assert all([w.created_rank for w in b] == sorted(w.created_rank for w in b) for _, b in blocks)
    for (_, left), (_, right) in itertools.pairwise(blocks):
        assert len(left) <= len(right)
        if len(left) == len(right):
            try:
                a, b = ipaddress.ip_address(left[0].node_ip), ipaddress.ip_address(right[0].node_ip)
            except ValueError:
                continue
            if a.version == b.version:
                assert int(a) < int(b)


@given(groups(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_the_order_of_arrival(
    workers: list[WorkerInfo], driver: int, rng: random.Random
) -> None:
    shuffled = list(workers)
    rng.shuffle(shuffled)
    assert ranks.order_ranks(workers, f"node{driver}") == ranks.order_ranks(shuffled, f"node{driver}")


def test_a_node_with_two_addresses_stays_together() -> None:
    workers = [
        worker(0, "a", "10.0.0.9"),
        worker(1, "b", "10.0.0.5"),
        worker(2, "a", "10.0.0.1"),
        worker(3, "b", "10.0.0.5"),
    ]
    assert [w.process.node_id for w in ranks.order_ranks(workers, "")] == ["a", "a", "b", "b"]


def test_devices_are_sorted_as_numbers_then_text() -> None:
    workers = [
        worker(0, "a", "10.0.0.1", ("10",)),
        worker(1, "a", "10.0.0.1", ("2", "MIG-7")),
        worker(2, "a", "10.0.0.1", ("10", "GPU-1f")),
        worker(3, "b", "10.0.0.2"),
    ]
    assert ranks.devices_by_node(workers) == {"a": ("2", "10", "GPU-1f", "MIG-7"), "b": ()}


@given(st.lists(st.text(max_size=4), max_size=8))
def test_any_device_id_can_be_sorted(ids: list[str]) -> None:
    assert set(ranks.devices_by_node([worker(0, "a", "10.0.0.1", tuple(ids))])["a"]) == set(ids)


def test_a_good_topology_passes() -> None:
    ranks.check_topology([worker(0, "a", "10.0.0.1"), worker(1, "b", "10.0.0.2", pid=1000)], 2)


@pytest.mark.parametrize(
    ("workers", "expected", "words"),
    [
        ([worker(0, "a", "10.0.0.1")], 2, ["1 workers", "needs 2"]),
        (
            [worker(0, "aaa", "10.0.0.1"), worker(1, "bbb", "10.0.0.1")],
            2,
            ["aaa", "bbb", "10.0.0.1", "ray start --node-ip-address="],
        ),
        (
            [worker(0, "aaa", "10.0.0.1"), worker(1, "aaa", "10.0.0.2")],
            2,
            ["aaa", "10.0.0.1, 10.0.0.2", "ray start --node-ip-address="],
        ),
        ([worker(0, "a", "10.0.0.1", pid=5), worker(1, "a", "10.0.0.1", pid=5)], 2, ["share process 5", "10.0.0.1"]),
        ([worker(0, "a", "10.0.0.1", pid=5), worker(0, "a", "10.0.0.1", pid=6)], 2, ["created as number 0"]),
    ],
)
def test_bad_topologies_are_named(workers: list[WorkerInfo], expected: int, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        ranks.check_topology(workers, expected)
    assert all(word in str(caught.value) for word in words), caught.value


def test_two_wrongs_that_even_out_are_found() -> None:
    """As many addresses as nodes, and still wrong: counting alone would let it pass."""
    workers = [worker(0, "a", "10.0.0.1"), worker(1, "a", "10.0.0.2"), worker(2, "b", "10.0.0.2")]
    with pytest.raises(TopologyError, match=r"nodes a, b all have address 10\.0\.0\.2.*node a shows"):
        ranks.check_topology(workers, 3)


def test_rendezvous_is_on_loopback_for_one_node_and_at_rank_0_for_several() -> None:
    one = [worker(0, "a", "10.0.0.1"), worker(1, "a", "10.0.0.1")]
    assert ranks.rendezvous_host(one) == "127.0.0.1"
    assert ranks.rendezvous_host([*one, worker(2, "b", "10.0.0.2")]) == "10.0.0.1"
    with pytest.raises(TopologyError):
        ranks.rendezvous_host([])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "tcp://10.0.0.1:80"),
        ("fe80::1", "tcp://[fe80::1]:80"),
        ("[::1]", "tcp://[::1]:80"),
        ("h", "tcp://h:80"),
    ],
)
def test_init_method(host: str, expected: str) -> None:
    assert ranks.init_method(host, 80) == expected


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_init_method_refuses_a_port_that_is_none(port: int) -> None:
    with pytest.raises(ValueError, match="port"):
        ranks.init_method("h", port)


@given(st.integers(1, 6), st.integers(1, 6))
def test_grid_holds_every_rank_once_in_stage_order(tp: int, pp: int) -> None:
    stages = ranks.grid(tp, pp)
    assert [len(stage) for stage in stages] == [tp] * pp
    assert [rank for stage in stages for rank in stage] == list(range(tp * pp))


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_assignments_agree_with_each_other(tp: int, pp: int, aggregate: bool, data: st.DataObject) -> None:
    homes = data.draw(st.lists(st.integers(0, 3), min_size=tp * pp, max_size=tp * pp))
    workers = [worker(i, f"n{h}", f"10.0.0.{h + 1}", (str(i),)) for i, h in enumerate(homes)]
    ordered = ranks.order_ranks(workers, "n0")
    result = ranks.assignments(ordered, config=config(tp, pp, aggregate), epoch=5, init_method="tcp://h:1")

    assert [a.rank for a in result] == list(range(tp * pp))
    assert all(a.rank == a.pp_rank * a.tp_size + a.tp_rank for a in result)
    assert all((a.world_size, a.tp_size, a.pp_size, a.epoch) == (tp * pp, tp, pp, 5) for a in result)
    assert [a.rank for a in result if a.is_output_rank] == [tp * (pp - 1)]
    wanted = range(tp * (pp - 1), tp * pp) if aggregate else [tp * (pp - 1)]
    assert [a.rank for a in result if a.wants_output] == list(wanted)
    for node in {a.node_id for a in result}:
        here = [a for a in result if a.node_id == node]
        assert [a.local_rank for a in here] == list(range(len(here)))
        assert all(len(a.device_ids) == len(here) for a in here)


def test_assignments_need_exactly_the_world() -> None:
    with pytest.raises(TopologyError):
        ranks.assignments([worker(0, "a", "10.0.0.1")], config=config(2, 1), epoch=1, init_method="tcp://h:1")


def test_a_replacement_on_another_node_moves_ranks_by_the_same_rule() -> None:
    first = [worker(0, "a", "10.0.0.1"), worker(1, "b", "10.0.0.2")]
    assert ranks.rank_mapping(ranks.order_ranks(first, "b")) == {1: 0, 0: 1}
    moved = [replace(first[0]), worker(1, "c", "10.0.0.0")]
    assert ranks.rank_mapping(ranks.order_ranks(moved, "b")) == {1: 0, 0: 1}
    moved_up = [replace(first[0]), worker(1, "c", "10.0.0.3")]
    assert ranks.rank_mapping(ranks.order_ranks(moved_up, "b")) == {0: 0, 1: 1}
