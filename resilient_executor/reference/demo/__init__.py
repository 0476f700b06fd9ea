"""The demo: prompts are answered while the workers that answer them are killed, and every token is checked.

An undisturbed run gives the answers that are right. Then the same prompts are answered again, round after round, while
a thread kills workers with SIGKILL at the moments of a plan that was drawn from the seed. At the end a judge compares
all that the client got with the undisturbed run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Final

from resilient_executor import ExecutorConfig, ResilientExecutor, ResilientExecutorError, RpcPolicy, WorkerSpec, cluster
from resilient_executor.lifecycle import ExecutorState
from resilient_executor.reference import WORKER, ModelConfig, ReferenceEngine, describe_step, resolve_checkpoint
from resilient_executor.reference.demo.display import Display, can_draw, logs_in, make_console
from resilient_executor.reference.demo.interrupts import Interrupts
from resilient_executor.reference.demo.leftovers import family, survivors
from resilient_executor.reference.demo.plan import SAMPLINGS, DemoOptions, draw_kills, draw_requests
from resilient_executor.reference.demo.report import Outcome, print_report, write_json
from resilient_executor.reference.demo.story import Story
from resilient_executor.reference.demo.verdict import compare, reasons
from resilient_executor.reference.demo.victims import Killer
from resilient_executor.reference.errors import InvalidConfiguration

if TYPE_CHECKING:
    from rich.console import Console

    from resilient_executor.protocol import ProcessIdentity, WorkerInfo

__all__ = ["SAMPLINGS", "DemoOptions", "run"]

#: Tokens of the longest prompt, with room to spare.
_PROMPT_TOKENS: Final = 24
#: For processes to be gone after the shutdown has returned.
_GONE_S: Final = 10.0
#: Rounds for one kill, and rounds without one: a plan that needs more will not come to its end.
_ROUNDS_PER_KILL: Final = 4
_FREE_ROUNDS: Final = 3


def run(options: DemoOptions) -> int:
    """Run the demo.

    Returns:
        the exit code: 0 when every token was right, every kill was delivered and nothing is left; 1 when not; 128 and
        the signal's number when it was interrupted, after everything that was started has been ended.

    Raises:
        ResilientExecutorError: it could not be started; nothing is left behind.
        BrokenPipeError: nobody reads the output any more; nothing is left behind.
    """
    config = _config(options)
    console = make_console(plain=options.plain)
    demo = _Demo(options, config, console)
    with Interrupts(demo.story.say) as interrupts:
        try:
            outcome = demo.run(interrupts)
        except KeyboardInterrupt:  # Ray makes a plain one of ours
            left = f"left behind: {', '.join(demo.left_behind)}" if demo.left_behind else "nothing is left behind"
            console.print(f"interrupted; {left}", soft_wrap=True)
            return 128 + interrupts.come
        print_report(console, outcome)
        if options.json_path is not None:
            write_json(options.json_path, outcome)
    return 1 if outcome.reasons else 0


def _config(options: DemoOptions) -> ExecutorConfig:
    """The executor's settings.

    Raises:
        InvalidConfiguration, ConfigError: the message says what to change. Nothing has been started.
    """
    model = ModelConfig.load(resolve_checkpoint(None))
    model.check_topology(options.tensor_parallel_size, options.pipeline_parallel_size)
    most = model.max_position_embeddings - _PROMPT_TOKENS
    if options.max_tokens > most:
        raise InvalidConfiguration(f"the demo's model answers with at most {most} tokens, not {options.max_tokens}")
    return ExecutorConfig(
        worker=WorkerSpec(WORKER),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        # The engine's start-up calls: a new generation of workers gets them again.
        rpc_policies=dict.fromkeys(("determine_kv_capacity", "initialize_kv_cache"), RpcPolicy.JOURNAL),
        describe_step=describe_step,
        address=options.address,
        name="demo",
        # These kills are on purpose: none of them is a reason to give up.
        max_restarts=10 * options.kills + 10,
        backoff_initial_s=0.01,
        backoff_max_s=0.05,
        start_timeout_s=120.0,
        step_timeout_s=60.0,
        recovery_timeout_s=240.0,
    )


class _Demo:
    """One run. ``left_behind`` is known when it has ended."""

    def __init__(self, options: DemoOptions, config: ExecutorConfig, console: Console) -> None:
        self._options = options
        self._config = config
        self._console = console
        self.story = Story(options, draw_requests(options), lambda: self._node_id)
        self._node_id = ""
        self._executor: ResilientExecutor | None = None
        self._seen: set[ProcessIdentity] = set()
        self._seen_lock = threading.Lock()
        self._start_s = self._undisturbed_s = 0.0
        self.left_behind: list[str] = []

    def run(self, interrupts: Interrupts) -> Outcome:
        """Run it from the first line to the end of the shutdown; after that, nothing is raised by a signal.

        Raises:
            KeyboardInterrupt, ResilientExecutorError, BrokenPipeError: see :func:`run`.
        """
        options, story = self._options, self.story
        began = time.monotonic()
        for line in _announcement(options):
            self._console.print(line, soft_wrap=not self._console.is_terminal)
        live = can_draw(self._console, plain=options.plain)
        with logs_in(story), Display(self._console, story, self._workers, live=live) as display:
            with _Service(self, interrupts) as executor:
                self._start_s = time.monotonic() - began
                self._serve(executor, interrupts, display)
            incidents = executor.incidents
        if display.broken:
            raise BrokenPipeError
        comparison = compare(story.expected, story.rounds)
        delivered = sum(kill.delivered for kill in story.kills)
        why = reasons(
            comparison,
            kills_planned=options.kills,
            kills_delivered=delivered,
            left_behind=self.left_behind,
            trouble=story.trouble,
        )
        seconds = time.monotonic() - began
        return Outcome(
            options, story, incidents, comparison, self._start_s, self._undisturbed_s, self.left_behind, why, seconds
        )

    def _workers(self) -> Sequence[WorkerInfo]:
        executor = self._executor
        workers = executor.workers if executor is not None else ()
        with self._seen_lock:
            self._seen.update(worker.process for worker in workers)
        return workers

    def _serve(self, executor: ResilientExecutor, interrupts: Interrupts, display: Display) -> None:
        """The undisturbed run, then the disturbed one."""
        story = self.story
        engine = ReferenceEngine(executor)
        story.enter("undisturbed run")
        self._undisturbed_s = self._round(engine, interrupts, display, disturbed=False)
        tokens = sum(len(answer.token_ids) for answer in story.expected)
        rate = tokens / self._undisturbed_s
        story.say(f"undisturbed run: {tokens} tokens in {self._undisturbed_s:.1f} s, {rate:.0f} tokens/s")
        story.enter("disturbed run")
        story.begin_disturbed_run()
        killer = Killer(draw_kills(self._options), story, self._workers, self._node_id)
        killer.start()
        try:
            limit = _FREE_ROUNDS + _ROUNDS_PER_KILL * self._options.kills
            while not (story.rounds and not killer.is_alive() and story.settled) and len(story.rounds) < limit:
                self._round(engine, interrupts, display, disturbed=True)
                if story.state is ExecutorState.FAILED:
                    break
        except ResilientExecutorError as error:
            story.trouble = story.trouble or f"{type(error).__name__}: {error}"
        finally:
            killer.stop()

    def _round(self, engine: ReferenceEngine, interrupts: Interrupts, display: Display, *, disturbed: bool) -> float:
        """Answer every prompt once; returns how long that took, in seconds."""
        began = time.monotonic()
        answers = self.story.begin_round(disturbed=disturbed)
        of_id = {
            engine.add_request(request.prompt, request.params): answer
            for request, answer in zip(self.story.requests, answers, strict=True)
        }
        for event in engine.stream():
            self.story.token(of_id[event.request_id], event)
            interrupts.check()
            if display.broken:
                raise BrokenPipeError
        return time.monotonic() - began

    # -- what runs under it -----------------------------------------------------------------------------------------

    def start(self, interrupts: Interrupts) -> ResilientExecutor:
        """Start Ray, where it must be, and the executor."""
        import ray

        options, story, config = self._options, self.story, self._config
        embedded = options.address == "local"
        story.enter("starting Ray" if embedded else "joining Ray")
        # An exception while processes are being started would leave some of which nobody knows.
        with interrupts.deferred() if embedded else nullcontext():
            cluster.connect(config)
            interrupts.claim()
        self._node_id = ray.get_runtime_context().get_node_id()
        story.say(f"{'an embedded Ray runs' if embedded else 'joined the cluster at ' + options.address}")
        story.enter("starting workers")
        self._executor = executor = ResilientExecutor(config)
        interrupts.check()
        executor.add_listener(story.on_event)
        story.executor_started(executor.state, executor.epoch)
        story.say(f"{options.world_size} workers serve; they were up in {executor.start_seconds:.1f} s", "good")
        return executor

    def end(self) -> None:
        """End all of it, and see whether it has ended."""
        import ray

        self.story.enter("shutting down")
        self._workers()
        processes = family() | self._seen_here()
        with ExitStack() as stack:
            stack.callback(cluster.disconnect)
            if self._executor is not None and ray.is_initialized():
                stack.callback(self._executor.shutdown)
        self.left_behind = survivors(processes, _GONE_S)
        if processes and not self.left_behind:
            self.story.say(f"shut down; all {len(processes)} processes are gone", "good")

    def _seen_here(self) -> set[ProcessIdentity]:
        """Every worker that was ever seen on this machine."""
        with self._seen_lock:
            return {one for one in self._seen if one.node_id == self._node_id}


class _Service:
    """The executor of a demo as a context: whatever happens in it, all is ended after it."""

    def __init__(self, demo: _Demo, interrupts: Interrupts) -> None:
        self._demo = demo
        self._interrupts = interrupts

    def __enter__(self) -> ResilientExecutor:
        try:
            return self._demo.start(self._interrupts)
        except BaseException:
            self._end()
            raise

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._interrupts.close()
        self._demo.end()


def _announcement(options: DemoOptions) -> list[str]:
    kills = f"kills {options.kills} of them with SIGKILL" if options.kills else "kills none of them"
    requests = f"{options.requests} prompt{'s' * (options.requests != 1)}"
    workers = f"{options.world_size} worker process{'es' * (options.world_size != 1)}"
    return [
        f"Answers {requests} with {workers} ({options.pipeline_parallel_size} pipeline stages x "
        f"{options.tensor_parallel_size} tensor-parallel ranks), {kills} meanwhile, and compares every token with an "
        "undisturbed run.",
        f"The plan is drawn from seed {options.seed}. Ctrl-C stops it at any time.",
    ]
