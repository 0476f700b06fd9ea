"""The cost of a step and of a call: the executor, asleep between steps and spinning, over Ray's compiled graph alone.

The graph alone spins, as Ray has it. All arms run over the same workers, in turns, in an order that changes with every
round; what is told is the median of the rounds' ratios, and the smallest and largest of them.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import ray
from ray.dag import InputNode, MultiOutputNode

from resilient_executor import ExecutorConfig, ResilientExecutor, WorkerSpec, wire_channel

#: Work in each worker, in milliseconds of processor time; 0 for a step that does nothing.
WORK_MS: Final = (0, 5, 10)
#: Steps of work in a round, for so many of those that do nothing.
_FEWER: Final = 20
_BLOCK: Final = bytes(1 << 16)


class Burn(NamedTuple):
    """A step that keeps each worker's processor busy, outside of the interpreter, as a kernel does."""

    blocks: int


class EchoWorker:
    """Does what it is told to, which is nothing at all as a rule, so that what is left is the executor's."""

    def __init__(self, assignment: Any) -> None:
        self.rank = assignment.rank

    def init_device(self) -> None:
        """Nothing to select."""

    def load_model(self) -> None:
        """Nothing to load."""

    def execute_stage(self, scheduler_output: Any, grammar_output: Any, intermediate: Any) -> Any:
        """Sleep (a float: seconds) or work (:class:`Burn`) if told to, and echo."""
        if isinstance(scheduler_output, float):
            time.sleep(scheduler_output)
        elif isinstance(scheduler_output, Burn):
            burn(scheduler_output.blocks)
        return scheduler_output

    def nothing(self) -> None:
        """An RPC without work."""


def burn(blocks: int) -> None:
    """Work of a fixed amount."""
    digest = hashlib.sha256()
    for _ in range(blocks):
        digest.update(_BLOCK)


def blocks_of(milliseconds: float) -> int:
    """How many blocks take so long, undisturbed."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        burn(100)
        times.append(time.thread_time() - began)
    return max(1, round(milliseconds * 1e-3 / (min(times) / 100)))


# -- the arms ---------------------------------------------------------------------------------------------------------

Step = Callable[[Any], Any]


def _bare(_: Any, values: Any) -> Any:
    if isinstance(values[0], Burn):
        burn(values[0].blocks)
    return values


def _use_rays_channels(_: Any) -> None:
    wire_channel.serve_worker(False, bytes_only=False)


@contextmanager
def raw_graph(executor: ResilientExecutor) -> Iterator[Step]:
    """Ray's compiled graph alone, in the same shape, over the same actors.

    An actor can be in one graph at a time, so the executor's own is taken down first; :func:`own_graph` builds it anew.
    """
    generation, config = executor._lifecycle.serving, executor._config
    assert generation is not None
    assert generation.group is not None
    if generation.graph is not None:
        generation.graph.tear_down(10.0)
    handles, size = generation.group.handles, config.tensor_parallel_size
    ray.get([handle.__ray_call__.remote(_use_rays_channels) for handle in handles], timeout=60)
    with InputNode() as request:
        values: list[Any] = [request] * size
        for stage in range(config.pipeline_parallel_size):
            stage_handles = handles[stage * size : (stage + 1) * size]
            values = [h.__ray_call__.bind(_bare, v) for h, v in zip(stage_handles, values, strict=True)]
        dag = MultiOutputNode(values).experimental_compile(_max_inflight_executions=config.inflight_limit)

    def step(value: Any) -> Any:
        outputs = [reference.get(timeout=30) for reference in dag.execute((value, None))]
        return outputs[0]

    try:
        step(0)
        yield step
    finally:
        dag.teardown()


@contextmanager
def own_graph(executor: ResilientExecutor, parking: bool = True) -> Iterator[Step]:
    """The executor's steps, over a graph compiled anew; without ``parking`` over Ray's channels, whose readers spin."""
    generation, recovery = executor._lifecycle.serving, executor._recovery
    assert generation is not None
    assert generation.group is not None
    assert recovery is not None
    if generation.graph is not None:
        generation.graph.tear_down(10.0)
    recovery._config = generation.group.config = replace(generation.group.config, parking=parking, wires=parking)
    recovery.compile(generation, executor._overseer, None, time.monotonic() + 60)

    def step(value: Any) -> Any:
        executor.execute_model(value)
        return executor.sample_tokens(None)

    yield step


_ARMS: Final[dict[str, Callable[[ResilientExecutor], Any]]] = {
    "raw": raw_graph,
    "executor": own_graph,
    "spinning": lambda executor: own_graph(executor, parking=False),
}


def measure_step(
    configure: Callable[..., ExecutorConfig], rounds: int, steps: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Median step of each arm in turns, for each length of work; then calls, over calls of Ray's actors.

    Args:
        configure: makes the settings for a worker.
        rounds: of all arms.
        steps: that do nothing, in one arm of a round; fewer of those that work.
        progress: is told of each figure.
    """
    work = {ms: Burn(blocks_of(ms)) if ms else 0 for ms in WORK_MS}
    medians: dict[tuple[str, int], list[float]] = {(arm, ms): [] for arm in _ARMS for ms in WORK_MS}
    quick: dict[tuple[str, int], list[float]] = {key: [] for key in medians}
    order = list(_ARMS)
    with ResilientExecutor(configure(WorkerSpec(EchoWorker))) as executor:
        for number in range(rounds):
            for arm in order[number % 3 :] + order[: number % 3]:
                with _ARMS[arm](executor) as step:
                    for ms, value in work.items():
                        samples = samples_us(step, value, max(10, steps // _FEWER) if ms else steps)
                        medians[arm, ms].append(statistics.median(samples))
                        quick[arm, ms].append(sorted(samples)[len(samples) // 10])
            for ms in WORK_MS:
                times = ", ".join(f"{arm} {medians[arm, ms][-1]:.0f} us" for arm in _ARMS)
                progress(f"steps, round {number + 1} of {rounds}, {ms} ms of work: {times}")
        calls = _measure_calls(executor, rounds)
    results: dict[str, Any] = {}
    for ms in WORK_MS:
        label = f"_{ms}ms" if ms else ""
        results |= {f"step_{arm}{label}_us": statistics.median(medians[arm, ms]) for arm in _ARMS}
        for name, over in (("step_overhead_ratio", "raw"), ("parking_ratio", "spinning")):
            results |= _spread(name + label, medians["executor", ms], medians[over, ms])
            # The quickest tenth has met the least of what else this machine does.
            results |= _spread(f"{name}{label}_p10", quick["executor", ms], quick[over, ms])
    return {**results, **calls}


def _spread(name: str, ones: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    return {name: statistics.median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}


def _measure_calls(executor: ResilientExecutor, rounds: int) -> dict[str, float]:
    generation = executor._lifecycle.serving
    assert generation is not None
    assert generation.group is not None
    handles = generation.group.handles
    rpc_us, actor_us = [], []
    for _ in range(rounds):
        actor_us.append(median_us(lambda _: ray.get([h.free_port.remote() for h in handles], timeout=60), None, 50))
        rpc_us.append(median_us(lambda _: executor.collective_rpc("nothing"), None, 50))
    return {"rpc_us": statistics.median(rpc_us), "rpc_raw_actor_calls_us": statistics.median(actor_us)}


def median_us(step: Step, value: Any, steps: int) -> float:
    """The median of so many steps, after a tenth as many that do not count."""
    return statistics.median(samples_us(step, value, steps))


def samples_us(step: Step, value: Any, steps: int) -> list[float]:
    """So many steps, after a tenth as many that do not count."""
    for _ in range(steps // 10):
        step(value)
    samples = []
    for _ in range(steps):
        began = time.perf_counter()
        step(value)
        samples.append((time.perf_counter() - began) * 1e6)
    return samples
