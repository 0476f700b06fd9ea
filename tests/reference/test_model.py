"""The sharded model computes what the whole model computes: real processes, real gloo collectives."""

from __future__ import annotations

import multiprocessing
import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from resilient_executor.protocol import RankAssignment
from resilient_executor.reference import (
    CacheExhausted,
    CollectiveFailed,
    Draw,
    InvalidConfiguration,
    ModelConfig,
    ModelOutput,
    ReferenceWorker,
    ScheduledRequest,
    SchedulerOutput,
    StaleCache,
    resolve_checkpoint,
)
from resilient_executor.reference.messages import BLOCK_TOKENS, blocks_for

CAPACITY = 512
PROMPTS = {"a": (0, *range(300, 330)), "b": (0, 17, 900), "c": (0, *range(40, 90, 7))}
STEPS = 12


def assignment(rank: int, tp_size: int, pp_size: int, port: int = 0) -> RankAssignment:
    pp_rank, tp_rank = divmod(rank, tp_size)
    return RankAssignment(
        rank=rank,
        world_size=tp_size * pp_size,
        local_rank=rank,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        epoch=1,
        is_output_rank=pp_rank == pp_size - 1 and tp_rank == 0,
        wants_output=pp_rank == pp_size - 1 and tp_rank == 0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )


def start(rank: int = 0, tp_size: int = 1, pp_size: int = 1, port: int = 0, **settings: Any) -> ReferenceWorker:
    worker = ReferenceWorker(assignment(rank, tp_size, pp_size, port), kv_capacity_tokens=CAPACITY, **settings)
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(worker.determine_kv_capacity())
    return worker


def blocks_of(name: str) -> tuple[int, ...]:
    first = sorted(PROMPTS).index(name) * 8
    return tuple(range(first, first + 8))


def next_step(step_id: int, known: dict[str, list[int]], done: dict[str, int], chunk: int) -> SchedulerOutput:
    """All prompts, ``chunk`` tokens at a time, then token by token."""
    requests = []
    for name, tokens in known.items():
        piece = tuple(tokens[done[name] : done[name] + chunk])
        last = done[name] + len(piece) == len(tokens)
        draw = Draw(len(tokens) - len(PROMPTS[name]), 0.8 if name == "c" else 0.0, 0, 0.9, 11) if last else None
        requests.append(ScheduledRequest(name, piece, done[name], blocks_of(name), draw))
        done[name] += len(piece)
    return SchedulerOutput(step_id, tuple(requests))


def run_rank(rank: int, tp_size: int, pp_size: int, port: int, pipes: list[Any], results: Any) -> None:
    """One rank's process: hidden states travel through queues, sampled tokens come back to the first stage."""
    torch.set_num_threads(1)
    worker = start(rank, tp_size, pp_size, port)
    known = {name: list(tokens) for name, tokens in PROMPTS.items()}
    done = dict.fromkeys(PROMPTS, 0)
    world = tp_size * pp_size
    for step_id in range(STEPS):
        step = next_step(step_id, known, done, chunk=20)
        intermediate = pipes[rank].get(timeout=60) if rank >= tp_size else None
        out = worker.execute_stage(step, None, intermediate)
        if rank + tp_size < world:
            pipes[rank + tp_size].put({name: tensor.clone() for name, tensor in out.items()})  # type: ignore[union-attr]
        elif worker._assignment.is_output_rank:
            for target in range(world):
                pipes[world + target].put(out)
        else:
            assert out is None
        result: ModelOutput = pipes[world + rank].get(timeout=60)
        for name, token in result.tokens.items():
            known[name].append(token)
    results.put((rank, known, worker.num_parameters()))
    worker.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_world(tp_size: int, pp_size: int) -> list[tuple[dict[str, list[int]], int]]:
    """Tokens and number of parameters of each rank."""
    context = multiprocessing.get_context("spawn")
    world, port = tp_size * pp_size, free_port()
    pipes, results = [context.Queue() for _ in range(2 * world)], context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, tp_size, pp_size, port, pipes, results)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        got = sorted((results.get(timeout=60) for _ in ranks), key=lambda item: int(item[0]))
    except queue.Empty:
        pytest.fail(f"exit codes of the ranks: {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return [(known, parameters) for _, known, parameters in got]


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, list[int]], int]:
    """What the unsharded model answers."""
    worker = start()
    known = {name: list(tokens) for name, tokens in PROMPTS.items()}
    done = dict.fromkeys(PROMPTS, 0)
    for step_id in range(STEPS):
        out = worker.execute_stage(next_step(step_id, known, done, chunk=20), None, None)
        assert isinstance(out, ModelOutput)
        for name, token in out.tokens.items():
            known[name].append(token)
    return known, worker.num_parameters()


@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    [pytest.param(2, 1, marks=pytest.mark.long), pytest.param(1, 2, marks=pytest.mark.long), (2, 2)],
)
def test_sharded_model_gives_the_same_tokens(
    tp_size: int, pp_size: int, whole: tuple[dict[str, list[int]], int]
) -> None:
    tokens, parameters = whole
    ranks = run_world(tp_size, pp_size)
    for known, held in ranks:
        assert known == tokens
        assert held < 0.7 * parameters, "a rank holds its shard only"


def test_layers_and_heads_are_counted_right() -> None:
    config = ModelConfig.load(resolve_checkpoint(None))
    whole = start()
    assert whole._model is not None
    total = sum(tensor.numel() for tensor in whole._model.layers[0].attention.weights)
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    assert total == heads * config.head_dim * config.hidden_size
    assert [list(config.stage_layers(stage, 3)) for stage in range(3)] == [[0, 1], [2], [3]]


def logits_of(worker: ReferenceWorker, tokens: tuple[int, ...], chunks: list[int]) -> torch.Tensor:
    """Logits after the last token, with the prompt run in pieces of the given sizes."""
    model, cache = worker._model, worker._cache
    assert model is not None
    assert cache is not None
    cache.reset()
    done = 0
    for size in chunks:
        blocks = tuple(range(blocks_for(len(tokens))))
        step = SchedulerOutput(0, (ScheduledRequest("x", tokens[done : done + size], done, blocks, None),))
        layout = cache.prepare(step)
        hidden = model.forward(torch.tensor(step.requests[0].token_ids), layout, cache)
        cache.commit(step)
        done += size
    assert done == len(tokens)
    logits = model.logits(hidden[-1:])
    assert logits is not None
    return logits[0]


def test_chunks_do_not_change_the_logits() -> None:
    tokens = (0, *range(100, 163))
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-3)):
        worker = start(dtype=dtype)
        at_once = logits_of(worker, tokens, [64])
        for chunks in ([1] * 64, [31, 33], [16, 16, 16, 16], [63, 1]):
            assert torch.allclose(at_once, logits_of(worker, tokens, chunks), atol=tolerance, rtol=0)


# --- The cache and the checks before a step --------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[ReferenceWorker]:
    worker = start()
    yield worker
    worker.shutdown()
    worker.shutdown()  # a second time does no harm


def step(*requests: ScheduledRequest, released: tuple[str, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(0, requests, released)


def one(start: int = 0, tokens: tuple[int, ...] = (0, 5, 6), blocks: tuple[int, ...] = (3,)) -> ScheduledRequest:
    return ScheduledRequest("x", tokens, start, blocks, None)


def test_a_step_for_other_workers_is_refused(worker: ReferenceWorker) -> None:
    with pytest.raises(StaleCache, match="goes on at position 3, but 0"):
        worker.execute_stage(step(one(start=3)), None, None)
    worker.execute_stage(step(one()), None, None)
    worker.execute_stage(step(one(start=3)), None, None)
    with pytest.raises(StaleCache, match="position 3, but 6"):
        worker.execute_stage(step(one(start=3)), None, None)
    with pytest.raises(StaleCache, match="but 0"):
        worker.execute_stage(step(one(start=6), released=("x",)), None, None)


def test_reset_forgets_everything(worker: ReferenceWorker) -> None:
    worker.execute_stage(step(one()), None, None)
    worker.reset_cache()
    assert worker._cache is not None
    assert bool(worker._cache.keys.isnan().all())
    with pytest.raises(StaleCache):
        worker.execute_stage(step(one(start=3)), None, None)


@pytest.mark.parametrize("blocks", [(), (CAPACITY // BLOCK_TOKENS,), (-1,)])
def test_blocks_must_exist_and_suffice(worker: ReferenceWorker, blocks: tuple[int, ...]) -> None:
    with pytest.raises(CacheExhausted, match="needs 1 cache blocks"):
        worker.execute_stage(step(one(blocks=blocks)), None, None)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (one(tokens=(0, 2048)), "outside the vocabulary"),
        (one(tokens=()), "has no tokens"),
        (one(tokens=(0,) * 1025, blocks=tuple(range(65))), "beyond the model's 1024 positions"),
    ],
)
def test_bad_steps_are_refused_and_change_nothing(
    worker: ReferenceWorker, request_: ScheduledRequest, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        worker.execute_stage(step(request_), None, None)
    with pytest.raises(ValueError, match="has no requests"):
        worker.execute_stage(step(), None, None)
    with pytest.raises(ValueError, match="takes no intermediate"):
        worker.execute_stage(step(one()), None, {"hidden_states": torch.zeros(3, 256)})
    worker.execute_stage(step(one()), None, None)


def test_calls_out_of_order_say_so() -> None:
    fresh = ReferenceWorker(assignment(0, 1, 1))
    with pytest.raises(RuntimeError, match="before init_device"):
        fresh.load_model()
    with pytest.raises(RuntimeError, match="before load_model"):
        fresh.initialize_kv_cache(64)
    with pytest.raises(RuntimeError, match="before load_model and initialize_kv_cache"):
        fresh.execute_stage(step(one()), None, None)
    assert fresh.num_parameters() == 0


def test_topologies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="does not divide the attention heads 8"):
        ReferenceWorker(assignment(0, 3, 1))
    with pytest.raises(InvalidConfiguration, match="more than the 4 layers"):
        ReferenceWorker(assignment(0, 1, 5))
    with pytest.raises(InvalidConfiguration, match="dtype is 'int8'"):
        ReferenceWorker(assignment(0, 1, 1), dtype="int8")
    with pytest.raises(InvalidConfiguration, match="holds no config"):
        ReferenceWorker(assignment(0, 1, 1), checkpoint="/nowhere")


def test_a_rank_that_never_comes_is_an_error_in_bounded_time() -> None:
    lonely = ReferenceWorker(assignment(0, 2, 1, free_port()), collective_timeout_s=1.0)
    with pytest.raises(CollectiveFailed, match="rendezvous"):
        lonely.init_device()
