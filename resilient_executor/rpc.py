"""Collective RPCs: the control plane, with a policy for calls whose epoch dies under them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import cloudpickle
from ray.exceptions import RayError

from resilient_executor import protocol
from resilient_executor.config import ExecutorConfig
from resilient_executor.errors import RpcLost, RpcTimeout, StateError
from resilient_executor.journal import Journal, JournalEntry, RpcPolicy
from resilient_executor.lifecycle import Generation, Lifecycle, RpcInHand
from resilient_executor.overseer import Overseer
from resilient_executor.pipeline import VERDICT_GRACE_S
from resilient_executor.worker_group import first_line

if TYPE_CHECKING:
    from resilient_executor.telemetry.calls import CallTrace
    from resilient_executor.telemetry.recorder import Telemetry


class CollectiveRpc:
    """Sends calls to the serving generation, and repeats or records them as their policy says. Safe for threads."""

    def __init__(
        self,
        config: ExecutorConfig,
        lifecycle: Lifecycle,
        overseer: Overseer,
        journal: Journal,
        telemetry: Telemetry | None,
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._lifecycle = lifecycle
        self._overseer = overseer
        self._journal = journal
        self._journal_lock = threading.Lock()
        self._order = _Order()

    def entry(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        per_rank_args: Sequence[Sequence[Any]] | None,
        key: str | None,
    ) -> JournalEntry:
        """Pickle a call once, for all its attempts and replays.

        Raises:
            StateError: ``per_rank_args`` does not fit the number of ranks.
        """
        if per_rank_args is not None and len(per_rank_args) != self._config.world_size:
            raise StateError(f"per_rank_args has {len(per_rank_args)} entries for {self._config.world_size} ranks")
        per_rank = None
        if per_rank_args is not None:
            per_rank = tuple(protocol.dumps((tuple(own), kwargs)) for own in per_rank_args)
        return JournalEntry(
            method=method if isinstance(method, str) else cloudpickle.dumps(method),
            name=method if isinstance(method, str) else getattr(method, "__name__", "a callable"),
            arguments=protocol.dumps((tuple(args), kwargs)),
            per_rank=per_rank,
            key=key,
        )

    def policy_of(self, name: str) -> RpcPolicy:
        """The policy of a method where the call names none."""
        return self._config.rpc_policies.get(name, RpcPolicy.ONCE)

    def submit(self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float) -> Future[list[Any]]:
        """The same as :meth:`call`, in another thread; a daemon, since the interpreter waits for all others to end.

        Its place in the order of calls is this one.
        """
        future: Future[list[Any]] = Future()
        future.set_running_or_notify_cancel()
        trace = self._begin(entry, policy)  # here, where the caller's span is the current one
        number = self._order.join()

        def run() -> None:
            try:
                future.set_result(self._traced(entry, policy, timeout_s, trace, number))
            except Exception as error:  # noqa: BLE001 - a future holds all of its call's errors
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="resilient-executor-rpc", daemon=True).start()
        except BaseException:
            self._order.leave(number)
            raise
        return future

    def call(self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float) -> list[Any]:
        """Make the call, on as many epochs as its policy and ``timeout_s`` allow; see ``collective_rpc``."""
        return self._traced(entry, policy, timeout_s, self._begin(entry, policy), self._order.join())

    def _begin(self, entry: JournalEntry, policy: RpcPolicy) -> CallTrace | None:
        return self._telemetry.begin_call(entry.name, policy.value) if self._telemetry is not None else None

    def _traced(
        self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float, trace: CallTrace | None, number: int
    ) -> list[Any]:
        try:
            results = self._call(entry, policy, timeout_s, trace, number)
        except BaseException as error:
            if trace is not None:
                trace.ended(error)
            raise
        if trace is not None:
            trace.ended(None)
        return results

    def _call(
        self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float, trace: CallTrace | None, number: int
    ) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                remaining = deadline - time.monotonic()
                generation = self._lifecycle.await_serving(max(0.0, min(remaining, self._config.recovery_timeout_s)))
                results, error = self._call_once(generation, entry, deadline, trace, number)
            finally:
                self._order.leave(number)
            if error is None:
                with self._journal_lock:
                    if not generation.condemned:
                        if policy is RpcPolicy.JOURNAL:
                            self._journal.record(entry)
                        return results
            elif not generation.condemned:
                raise RpcTimeout(entry.name, timeout_s, error.ranks) if isinstance(error, RpcTimeout) else error
            # The epoch is dying. If nothing of the call can be repeated, the caller must know that it was lost.
            if policy is RpcPolicy.ONCE and error is None:
                return results
            if policy is RpcPolicy.ONCE:
                raise RpcLost(entry.name, generation.epoch, self._lifecycle.last_incident(generation.epoch)) from error
            number = self._order.join()

    def _call_once(
        self, generation: Generation, entry: JournalEntry, deadline: float, trace: CallTrace | None, number: int
    ) -> tuple[list[Any], Exception | None]:
        """One attempt. When it returns an error, the generation is condemned or the error is the worker's own."""
        group = generation.group
        assert group is not None
        call = RpcInHand(number, entry.name, time.monotonic())
        try:
            # One call after the other, whole: workers that got two of them in different orders would wait in the
            # collectives of both, for ever.
            if not self._order.await_turn(number, deadline):
                raise RpcTimeout(entry.name, deadline - call.began, tuple(range(self._config.world_size)))
            generation.rpcs.append(call)
            call.references = group.call(entry, trace)
            self._order.leave(number)
            results = group.results(entry.name, call.references, max(0.0, deadline - time.monotonic()), trace)
            self._await_calm(generation, call)
            if generation.unsettled:
                return [], RuntimeError(
                    "a worker raised in an earlier call, and the ranks may have met in the wrong ones"
                )
            return results, None
        except RpcTimeout as error:
            return [], error
        except RayError as error:
            self._overseer.rpc_broken(generation, first_line(error))
            return [], error
        except Exception as error:  # noqa: BLE001 - the worker's own
            if call.references:
                self._overseer.rpc_raised(generation, call)
            else:  # it may have been sent to some
                self._overseer.rpc_broken(generation, first_line(error))
            return [], error
        finally:
            call.ended.set()
            with contextlib.suppress(ValueError):  # its turn has not come
                generation.rpcs.remove(call)

    def _await_calm(self, generation: Generation, call: RpcInHand) -> None:
        """Wait until it is known whether a worker raised in an earlier call, and what this one has suffered by it.

        The earlier calls have all been answered, since workers take one after the other.
        """
        config = self._config
        deadline = time.monotonic() + config.settle_timeout_s + config.check_health_timeout_s + VERDICT_GRACE_S
        for other in generation.rpcs.copy():
            if other.number < call.number:
                other.ended.wait(max(0.0, deadline - time.monotonic()))
        generation.calm.wait(max(0.0, deadline - time.monotonic()))

    def forget(self, key: str) -> bool:
        """Take the journalled call with this key out of the replay; returns whether there was one."""
        with self._journal_lock:
            return self._journal.forget(key)


class _Order:
    """Calls are sent in the order in which they were made, though each is sent by a thread of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: list[int] = []

    def join(self) -> int:
        """Take the next number; :meth:`leave` must follow, whatever happens."""
        with self._changed:
            number = next(self._numbers)
            self._waiting.append(number)
            return number

    def leave(self, number: int) -> None:
        """Whoever comes after this number need not wait for it any more."""
        with self._changed:
            if number in self._waiting:
                self._waiting.remove(number)
                self._changed.notify_all()

    def await_turn(self, number: int, deadline: float) -> bool:
        """Wait until all before it have left, at most until ``deadline``; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting[0] == number, max(0.0, deadline - time.monotonic()))
