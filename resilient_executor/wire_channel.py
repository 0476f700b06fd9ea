"""The channels of a graph between processes, over wires instead of Ray's shared memory and Ray's daemons.

Ray has its node daemons (raylets) carry these messages. The one at the reader's node puts each into the reader's
buffer, in its main thread, and waits without a bound until the message before has been read. There is one buffer a
channel, whatever the number of steps in flight; so a reader that is killed in the middle of its work leaves a raylet
behind that waits for ever: it starts no worker, gives back no bundle, and answers all health checks. A late message for
a reader that is gone aborts it. And a thread spins at each writer, idle or not. A connection has none of this.

Within a node Ray's channels are buffers in shared memory that are never given back while the driver lives, with two
named semaphores each that outlive whoever is killed. And whoever waits there spins, or has to be rung.

Everything else of the graph is Ray's: its loops, its order of steps, what goes between accelerators.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import ray
from ray import cloudpickle
from ray.exceptions import RayChannelError, RayChannelTimeoutError
from ray.experimental.channel.common import ChannelContext, ChannelInterface
from ray.experimental.channel.shared_memory_channel import BufferedSharedMemoryChannel, Channel, CompositeChannel
from ray.experimental.channel.torch_tensor_accelerator_channel import TorchTensorAcceleratorChannel

from resilient_executor.local_wire import LocalInlet, LocalOutlet
from resilient_executor.wire import Address, Inlet, Outlet

logger = logging.getLogger(__name__)

#: Kinds of messages: a step's bytes as they are, and whatever else Ray sends, pickled.
_RAW: Final = 0
_PICKLED: Final = 1
#: For a reader to connect, in seconds: the writer has been listening since before the reader knew of it.
_CONNECT_S: Final = 10.0

#: This process's ends, by token. Channels are copied from process to process, and within one; the ends are not.
_outlets: dict[bytes, Outlet] = {}
_inlets: dict[bytes, Inlet] = {}
#: Tokens of channels that were closed here, by whichever copy: no other copy connects again.
_ended: set[bytes] = set()


@dataclass(frozen=True)
class Pickled:
    """A value that has been pickled already."""

    payload: bytes

    @classmethod
    def of(cls, value: Any) -> Pickled:
        """Pickle a value."""
        return cls(cloudpickle.dumps(value, protocol=5))


def writes() -> bool:
    """Whether somebody reads by a wire what this process writes; for a worker, that is who reads all of it."""
    return bool(_outlets)


class WireChannel(ChannelInterface):  # type: ignore[misc]  # Ray has no types
    """Made by its writer, pickled to its readers. One message at a time, in order."""

    def __init__(self, address: Address, token: bytes) -> None:
        self._address, self._token = address, token

    def __reduce__(self) -> tuple[Any, ...]:
        return WireChannel, (self._address, self._token)

    def ensure_registered_as_writer(self) -> None:
        """Nothing to do: the writer has made it."""

    def ensure_registered_as_reader(self) -> None:
        """Nothing to do: who reads connects. Ray calls this in processes that do not read this one, too."""

    def fileno(self) -> int:
        """For ``poll``, connected.

        Raises:
            RayChannelError: the writer cannot be reached, or the channel is closed.
        """
        descriptor = (_inlets.get(self._token) or self._connect()).fileno()
        if descriptor < 0:
            raise RayChannelError("Channel closed.")
        return descriptor

    def write(self, value: Any, timeout: float | None = None) -> None:
        """Send a value; see :meth:`Outlet.send`.

        Raises:
            RayChannelTimeoutError: not within ``timeout`` seconds.
            RayChannelError: a reader is gone, or the channel is closed.
            OSError: this process or node lacks something, descriptors for instance.
        """
        outlet = _outlets.get(self._token)
        if outlet is None:
            raise RayChannelError("Channel closed.")
        if type(value) is bytes:
            kind, payload = _RAW, value
        else:
            kind, payload = _PICKLED, (value if isinstance(value, Pickled) else Pickled.of(value)).payload
        try:
            outlet.send(kind, payload, timeout)
        except TimeoutError as error:
            raise RayChannelTimeoutError(f"cannot write to a reader: {error}") from error
        except ConnectionError as error:
            raise RayChannelError(f"Channel closed: {error}") from error
        except OSError:  # whoever runs the graph must hear that it is not one that was closed
            logger.exception("cannot write to a reader")
            raise

    def read(self, timeout: float | None = None) -> Any:
        """The next value; see :meth:`Inlet.receive`.

        Raises:
            RayChannelTimeoutError: none within ``timeout`` seconds.
            RayChannelError: the writer is gone, or the channel is closed.
            OSError: this process or node lacks something, descriptors for instance.
        """
        inlet = _inlets.get(self._token) or self._connect()
        try:
            kind, payload = inlet.receive(timeout)
        except TimeoutError as error:
            raise RayChannelTimeoutError("no message") from error
        except ConnectionError as error:
            raise RayChannelError(f"Channel closed: {error}") from error
        except OSError:
            logger.exception("cannot read from a writer")
            raise
        return bytes(payload) if kind == _RAW else cloudpickle.loads(payload)

    def _connect(self) -> Inlet:
        if self._token in _ended:
            raise RayChannelError("Channel closed.")
        try:
            kind = LocalInlet if isinstance(self._address, bytes) else Inlet
            inlet = _inlets[self._token] = kind(self._address, self._token, _CONNECT_S)
        except (ConnectionError, TimeoutError) as error:
            raise RayChannelError(f"Channel closed: no connection to its writer: {error}") from error
        if self._token in _ended:  # meanwhile, by another thread, which has not seen it
            self.close()
            raise RayChannelError("Channel closed.")
        return inlet

    def release_buffer(self, timeout: float | None = None) -> None:
        """Drop the next value."""
        self.read(timeout)

    def close(self) -> None:
        """Close this process's ends; whoever waits for them is released."""
        _ended.add(self._token)
        for end in (_outlets.pop(self._token, None), _inlets.pop(self._token, None)):
            if end is not None:
                end.close()


class _Scope(threading.local):
    """Whether the channels that this thread makes are for a graph of ours.

    Attributes:
        process: those of all threads are.
        made: in this thread, while it compiles; None otherwise.
    """

    process: ClassVar[bool] = False
    made: list[bytes] | None = None

    def wired(self) -> bool:
        """Whether a channel that is made now, in this thread, is to be a wire."""
        return _Scope.process or self.made is not None


_scope = _Scope()


def _new_channel(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes what ``Channel(...)`` gives: a wire where the channel of a graph of ours goes to other nodes."""
    if cls is Channel and len(args) == 2 and not kwargs and _scope.wired():
        here, readers = ray.get_runtime_context().get_node_id(), args[1]
        if all(node_id != here for _, node_id in readers):
            return _made(Outlet(ray.util.get_node_ip_address(), len(readers)))
    return object.__new__(cls)


def _new_buffered(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for ``BufferedSharedMemoryChannel(...)``, whose readers are all on this node."""
    if cls is BufferedSharedMemoryChannel and len(args) == 3 and not kwargs and _scope.wired():
        return _made(LocalOutlet(len(args[1])))
    return object.__new__(cls)


def _made(outlet: Outlet) -> WireChannel:
    _outlets[outlet.token] = outlet
    if _scope.made is not None:
        _scope.made.append(outlet.token)
    return WireChannel(outlet.address, outlet.token)


class _PicklingWorker:
    """Stands for Ray's worker where the channel of an accelerator asks it to serialise what is not the accelerator's.

    Ray's own way makes something that only shared memory takes. What replaces tensors by placeholders is known to
    ``cloudpickle``, too.
    """

    serialize = staticmethod(Pickled.of)

    def get_serialization_context(self) -> _PicklingWorker:
        """Itself."""
        return self


def _adapt_accelerators() -> None:
    """Let the channels of accelerators send their small part over a wire."""
    init = TorchTensorAcceleratorChannel.__init__

    @functools.wraps(init)
    def adapted_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        parts = getattr(self._cpu_data_channel, "_channels", ())
        if any(isinstance(part, WireChannel) for part in parts):
            self._worker = _PicklingWorker()

    TorchTensorAcceleratorChannel.__init__ = adapted_init
    read_whole_messages()


def read_whole_messages() -> None:
    """Have nobody in this process read half of a message of an accelerator's channel, whatever the rest goes by."""
    receive = getattr(TorchTensorAcceleratorChannel, "_recv_cpu_and_gpu_data", None)
    if receive is None or hasattr(receive, "__wrapped__"):
        return

    @functools.wraps(receive)
    def patient_receive(self: Any, tensors: Any, timeout: float | None = None) -> Any:
        # The first half has been taken: to give up now would pair the second with the next step's first.
        return receive(self, tensors, None)

    TorchTensorAcceleratorChannel._recv_cpu_and_gpu_data = patient_receive


def install() -> bool:
    """Put wires where Ray makes its channels. Returns whether they are there; otherwise Ray carries the messages."""
    if getattr(CompositeChannel, "_resilient_executor_wires", False):
        return True
    try:
        made = inspect.getsource(CompositeChannel.__init__)
        known = "= Channel(self._writer, readers_different_node)" in made
        known = known and "= BufferedSharedMemoryChannel(\n                self._writer, readers_same_node" in made
        accelerator = inspect.getsource(TorchTensorAcceleratorChannel)
        known = known and "self._worker.get_serialization_context().serialize(value)" in accelerator
        known = known and "def _recv_cpu_and_gpu_data" in accelerator and "self._cpu_data_channel" in accelerator
    except (OSError, TypeError):
        known = False
    if not known or os.environ.get("RAY_USE_TLS", "0") == "1":
        why = "is told to encrypt (RAY_USE_TLS)" if known else f"{ray.__version__} makes its channels in another way"
        logger.warning(
            "Ray %s: its own channels carry the messages; between nodes, a worker's death may cost its node", why
        )
        return False
    # The classes stay: Ray pickles its own channels by their names, and makes them without arguments then.
    Channel.__new__ = staticmethod(_new_channel)
    BufferedSharedMemoryChannel.__new__ = staticmethod(_new_buffered)
    _adapt_accelerators()
    CompositeChannel._resilient_executor_wires = True
    return True


def cross_nodes(tokens: Sequence[bytes]) -> bool:
    """Whether one of these channels of this process goes to another node."""
    return any(not isinstance(_outlets.get(token), LocalOutlet) for token in tokens)


def serve_worker(wires: bool, bytes_only: bool) -> None:
    """From now on all channels of this process are wires, or none; what an earlier graph has left is closed.

    Around every read and every write Ray enters torch's device, and imports torch for that. Where only bytes go from
    stage to stage no device is needed; and a worker whose engine has no torch comes up in a fraction of the time.
    """
    _Scope.process = wires and install()
    if hasattr(context := ChannelContext.get_current(), "_torch_available"):
        context._torch_available = False if bytes_only else None  # None: Ray will see
    for token in [*_outlets, *_inlets]:
        WireChannel(b"", token).close()
    _ended.clear()


@contextlib.contextmanager
def wired(wires: bool) -> Iterator[list[bytes]]:
    """The driver's channels that are made meanwhile, in this thread, are wires, or not. If it fails, they go.

    Yields the tokens of those that are made.
    """
    made: list[bytes] = []
    if not (wires and install()):
        yield made
        return
    _scope.made = made
    if not _outlets and not _inlets:
        _ended.clear()  # all graphs before have ended: nobody is left who might connect again
    try:
        yield made
    except BaseException:
        for token in made:
            WireChannel(b"", token).close()
        raise
    finally:
        _scope.made = None
