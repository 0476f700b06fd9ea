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
from resilient_executor.settling import CallSettling, Outcome
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
        self._sent = itertools.count()

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
        place = self._order.join()

        def run() -> None:
            try:
                future.set_result(self._traced(entry, policy, timeout_s, trace, place))
            except Exception as error:  # noqa: BLE001 - a future holds all of its call's errors
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="resilient-executor-rpc", daemon=True).start()
        except BaseException:
            self._order.leave(place)
            raise
        return future

    def call(self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float) -> list[Any]:
        """Make the call, on as many epochs as its policy and ``timeout_s`` allow; see ``collective_rpc``."""
        return self._traced(entry, policy, timeout_s, self._begin(entry, policy), None)

    def _begin(self, entry: JournalEntry, policy: RpcPolicy) -> CallTrace | None:
        return self._telemetry.begin_call(entry.name, policy.value) if self._telemetry is not None else None

    def _traced(
        self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float, trace: CallTrace | None, place: int | None
    ) -> list[Any]:
        try:
            results = self._call(entry, policy, timeout_s, trace, place)
        except BaseException as error:
            if trace is not None:
                trace.ended(error)
            raise
        if trace is not None:
            trace.ended(None)
        return results

    def _call(
        self, entry: JournalEntry, policy: RpcPolicy, timeout_s: float, trace: CallTrace | None, place: int | None
    ) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                place = self._order.join(place)
                generation, call, error = self._send(entry, deadline, trace, place)
                try:
                    if error is None:
                        results, error = self._results(generation, call, deadline, trace)
                    if error is None:
                        with self._journal_lock:
                            if not generation.condemned:
                                if policy is RpcPolicy.JOURNAL:
                                    self._journal.record(entry)
                                return results
                finally:
                    call.ended.set()
                    generation.rpcs.remove(call)
                if error is not None and not generation.condemned:
                    raise RpcTimeout(entry.name, timeout_s, error.ranks) if isinstance(error, RpcTimeout) else error
                # The epoch is dying. If nothing of the call can be repeated, the caller must know that it was lost.
                if policy is RpcPolicy.ONCE and error is None:
                    return results
                if policy is RpcPolicy.ONCE:
                    incident = self._lifecycle.last_incident(generation.epoch)
                    raise RpcLost(entry.name, generation.epoch, incident) from error
        finally:
            self._order.leave(place)

    def _send(
        self, entry: JournalEntry, deadline: float, trace: CallTrace | None, place: int
    ) -> tuple[Generation, RpcInHand, Exception | None]:
        """Send a call when its turn has come and there is somebody to send it to.

        One call after the other, whole: workers that got two of them in different orders would wait in the collectives
        of both, for ever. When it returns an error, the generation is condemned.
        """
        began = time.monotonic()
        while True:
            in_turn = self._order.await_turn(place, deadline)
            if not in_turn and self._lifecycle.serving is not None:
                raise RpcTimeout(entry.name, deadline - began, tuple(range(self._config.world_size)))
            left_s = deadline - time.monotonic()
            generation = self._lifecycle.await_serving(max(0.0, min(left_s, self._config.recovery_timeout_s)))
            # Looked at once more: an earlier call may have been lost meanwhile, and have to be sent before this one.
            if in_turn and self._order.await_turn(place, 0.0):
                break
        assert generation.group is not None
        call = RpcInHand(next(self._sent), entry.name, time.monotonic())
        generation.rpcs.append(call)
        try:
            call.references = generation.group.call(entry, trace)
        except BaseException as error:
            # It may have been sent to some.
            self._overseer.rpc_broken(generation, first_line(error))
            if not isinstance(error, Exception):
                generation.rpcs.remove(call)
                raise
            return generation, call, error
        finally:
            self._order.sent(place, generation)
        return generation, call, None

    def _results(
        self, generation: Generation, call: RpcInHand, deadline: float, trace: CallTrace | None
    ) -> tuple[list[Any], Exception | None]:
        """What a call has come to. When it returns an error, the generation is condemned or it is the worker's own."""
        assert generation.group is not None
        try:
            left_s = max(0.0, deadline - time.monotonic())
            results = generation.group.results(call.name, call.references, left_s, trace)
        except RpcTimeout as error:
            generation.given_up.append(call)
            return [], error
        except RayError as error:
            self._overseer.rpc_broken(generation, first_line(error))
            return [], error
        except Exception as error:  # noqa: BLE001 - the worker's own
            self._overseer.rpc_raised(generation, call)
            return [], error
        except BaseException:  # Ctrl-C
            generation.given_up.append(call)
            raise
        return results, self._doubt(generation, call)

    def _doubt(self, generation: Generation, call: RpcInHand) -> Exception | None:
        """Wait until it is known whether a worker raised in an earlier call, and what this one has suffered by it.

        The earlier calls have all been answered, since workers take one after the other.

        Returns:
            why the results cannot be believed; the generation is condemned then.
        """
        config = self._config
        deadline = time.monotonic() + config.settle_timeout_s + config.check_health_timeout_s + VERDICT_GRACE_S
        known = all(
            other.ended.wait(max(0.0, deadline - time.monotonic()))
            for other in generation.rpcs.copy()
            if other.number < call.number
        )
        # Only now: whoever gives a call up says so before the call has ended.
        for other in generation.given_up.copy():
            if other.number < call.number:
                if Outcome.RAISED in CallSettling(other.name, other.references).outcomes({}):
                    self._overseer.rpc_raised(generation, other)
                with contextlib.suppress(ValueError):  # another thread has
                    generation.given_up.remove(other)
        if not (known and generation.calm.wait(max(0.0, deadline - time.monotonic()))):
            text = f"a worker raised before {call.name}, and nobody has found out whether its peers kept step"
            self._overseer.rpc_broken(generation, text)
            return RuntimeError(text)
        if generation.condemned and generation.unsettled:
            return RuntimeError("a worker raised in an earlier call, and the ranks may have met in the wrong ones")
        return None

    def forget(self, key: str) -> bool:
        """Take the journalled call with this key out of the replay; returns whether there was one."""
        with self._journal_lock:
            return self._journal.forget(key)


class _Order:
    """Calls are sent in the order in which they were made, though each is sent by a thread of its own."""

    def __init__(self) -> None:
        self._places = itertools.count()
        self._changed = threading.Condition()
        #: The calls that have not ended, by place: to whom each was sent, or None.
        self._sent_to: dict[int, Generation | None] = {}

    def join(self, place: int | None = None) -> int:
        """Take a place, or wait in it once more; :meth:`leave` must follow, whatever happens."""
        with self._changed:
            place = next(self._places) if place is None else place
            self._sent_to[place] = None
            return place

    def await_turn(self, place: int, deadline: float) -> bool:
        """Wait until no earlier call is still to be sent, at most until ``deadline``; returns whether that is so.

        One that was sent to a condemned generation may have to be sent once more.
        """

        def first() -> bool:
            earlier = [to for other, to in self._sent_to.items() if other < place]
            return all(to is not None and not to.condemned for to in earlier)

        with self._changed:
            return self._changed.wait_for(first, max(0.0, deadline - time.monotonic()))

    def sent(self, place: int, to: Generation) -> None:
        """It has been sent, so the next one may be."""
        with self._changed:
            self._sent_to[place] = to
            self._changed.notify_all()

    def leave(self, place: int | None) -> None:
        """It has ended."""
        with self._changed:
            if place in self._sent_to:
                del self._sent_to[place]
                self._changed.notify_all()
