"""Collective RPCs: the control plane, with a policy for calls whose epoch dies under them."""

from __future__ import annotations

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
from resilient_executor.lifecycle import Generation, Lifecycle
from resilient_executor.overseer import Overseer
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
        """The same as :meth:`call`, in another thread; a daemon, since the interpreter waits for all others to end."""
        future: Future[list[Any]] = Future()
        future.set_running_or_notify_cancel()
        trace = self._begin(entry, policy)  # here, where the caller's span is the current one

        def run() -> None:
            try:
                future.set_result(self._traced(entry, policy, timeout_s, trace))
            except Exception as error:  # noqa: BLE001 - a future holds all of its call's errors
                future.set_exception(error)

        threading.Thread(target=run, name="resilient-executor-rpc", daemon=True).start()
        return future

    def call(self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float) -> list[Any]:
        """Make the call, on as many epochs as its policy and ``timeout_s`` allow; see ``collective_rpc``."""
        return self._traced(entry, policy, timeout_s, self._begin(entry, policy))

    def _begin(self, entry: JournalEntry, policy: RpcPolicy) -> CallTrace | None:
        return self._telemetry.begin_call(entry.name, policy.value) if self._telemetry is not None else None

    def _traced(self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float, trace: CallTrace | None) -> list[Any]:
        try:
            results = self._call(entry, policy, timeout_s, trace)
        except BaseException as error:
            if trace is not None:
                trace.ended(error)
            raise
        if trace is not None:
            trace.ended(None)
        return results

    def _call(self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float, trace: CallTrace | None) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            generation = self._lifecycle.await_serving(max(0.0, min(remaining, self._config.recovery_timeout_s)))
            results, error = self._call_once(generation, entry, max(0.0, deadline - time.monotonic()), trace)
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

    def _call_once(
        self, generation: Generation, entry: JournalEntry, timeout_s: float, trace: CallTrace | None
    ) -> tuple[list[Any], Exception | None]:
        """One attempt. When it returns an error, the generation is condemned or the error is the worker's own."""
        group = generation.group
        assert group is not None
        call = (entry.name, time.monotonic())
        generation.rpcs.append(call)
        try:
            return group.results(entry.name, group.call(entry, trace), timeout_s, trace), None
        except RpcTimeout as error:
            return [], error
        except RayError as error:
            self._overseer.rpc_broken(generation, first_line(error))
            return [], error
        except Exception as error:  # noqa: BLE001 - the worker's own
            self._overseer.rpc_raised(generation)
            return [], error
        finally:
            generation.rpcs.remove(call)

    def forget(self, key: str) -> bool:
        """Take the journalled call with this key out of the replay; returns whether there was one."""
        with self._journal_lock:
            return self._journal.forget(key)
