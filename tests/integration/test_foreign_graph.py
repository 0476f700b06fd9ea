"""A compiled graph of the user's own, in the process of an executor: it is Ray's affair, before, beside and after."""

from __future__ import annotations

import pytest
import ray
from probe_executor import run_step, serving
from ray.dag import InputNode
from ray.experimental.channel.shared_memory_channel import BufferedSharedMemoryChannel

from resilient_executor.wire_channel import WireChannel


class Doubling:
    def double(self, value: int) -> int:
        return 2 * value


def use_own_graph() -> None:
    actors = [ray.remote(num_cpus=0)(Doubling).remote() for _ in range(2)]
    with InputNode() as value:
        graph = actors[1].double.bind(actors[0].double.bind(value)).experimental_compile()
    try:
        assert [graph.execute(number).get(timeout=30) for number in range(5)] == [0, 4, 8, 12, 16]
        parts = [part for channel in graph.dag_output_channels for part in channel._channels]
        assert [type(part) for part in parts] == [BufferedSharedMemoryChannel]
    finally:
        graph.teardown()
        for actor in actors:
            ray.kill(actor)


@pytest.mark.parametrize("wires", [True, pytest.param(False, marks=pytest.mark.long)])
def test_it_works_before_beside_and_after_an_executor(ray_cluster: str, wires: bool) -> None:
    use_own_graph()
    with serving(pipeline_parallel_size=2, wires=wires) as executor:
        assert run_step(executor, 1)["scheduler"] == 1
        use_own_graph()
        assert run_step(executor, 2)["scheduler"] == 2
        serving_now = executor._lifecycle.serving
        assert serving_now is not None
        assert serving_now.graph is not None
        assert serving_now.graph._dag is not None
        outputs = serving_now.graph._dag.dag_output_channels
        ours = {type(part) for channel in outputs for part in channel._channels}
        assert ours == {WireChannel if wires else BufferedSharedMemoryChannel}
    use_own_graph()
