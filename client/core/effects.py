"""Effects: the I/O requests of sans-I/O operations, as plain values.

An operation is a generator that yields effects. Its driver (`drive` below, driver.py, async_driver.py) runs each effect
and sends the result back, or throws the typed error in. Operations know no sockets, threads or event loops.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import MapSlabs, OpenIndex
from kvstore.protocol.session_messages import Hello, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.client.connection_pool import ConnectionLease
from kvstore.rpc.deadline import Deadline

if TYPE_CHECKING:
    from kvstore.transfer.engine import TransferEngine
    from kvstore.transfer.paths.batch import Copy

T = TypeVar("T")
E = TypeVar("E")


class AnyChannel(Protocol):
    """View of a channel, blocking or asynchronous, that operations may use directly; its I/O goes through effects."""

    address: Address
    is_open: bool
    welcome: Welcome

    @property
    def is_settled(self) -> bool: ...
    @property
    def makes_hot_copies(self) -> bool: ...

    def is_closed_by_peer(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class AcquireConnectionEffect:
    """Acquire a pooled connection to `address`: a ConnectionLease. `hello` opens a new one; None: the Hello for
    masters."""

    address: Address
    deadline: Deadline
    hello: Hello | None = None


@dataclass(slots=True)
class RequestEffect:
    """Send `message` with the values of `payload`: the reply, a message of type `answer`."""

    channel: AnyChannel
    message: Message
    answer: type[Message]
    deadline: Deadline
    payload: Sequence[memoryview] = ()


@dataclass(slots=True)
class SendEffect:
    """Send `message` without waiting; `ReceiveEffect` follows."""

    channel: AnyChannel
    message: Message
    deadline: Deadline


@dataclass(slots=True)
class ReceiveEffect:
    """The reply to a `SendEffect`, a message of type `answer`; None if it has not arrived by `until`, and can be
    awaited again."""

    channel: AnyChannel
    answer: type[Message]
    until: Deadline


@dataclass(slots=True)
class RequestFdsEffect:
    """Send `message`: (reply, descriptors), which the operation closes."""

    channel: AnyChannel
    message: MapSlabs | OpenIndex
    deadline: Deadline


@dataclass(slots=True)
class ReadPayloadEffect:
    """Read the last reply's payload, or its next part, into `destinations`."""

    channel: AnyChannel
    destinations: Sequence[memoryview]
    deadline: Deadline


@dataclass(slots=True)
class SendOneWayEffect:
    """Send `message`, which has no reply."""

    channel: AnyChannel
    message: Message


@dataclass(slots=True)
class RunInThreadEffect:
    """Run `function`: its result. An event loop uses a thread if `size_bytes`, the memory it touches, is large."""

    function: Callable[[], Any]
    size_bytes: int


@dataclass(slots=True)
class TransferEffect:
    """Run copies from or to another host on the transfer engine. Raises as `TransferEngine.transfer`."""

    engine: "TransferEngine"
    copies: "Sequence[Copy]"
    deadline: Deadline


@dataclass(slots=True)
class SpawnEffect:
    """Run an operation in the background, unawaited. It raises no KVStoreError."""

    operation: "Operation[None]"


@dataclass(slots=True)
class SleepEffect:
    """Sleep."""

    seconds: float


@dataclass(slots=True)
class GatherEffect:
    """Run operations concurrently: the list of their results. The first error ends all of them, and is raised once they
    have ended."""

    operations: "Sequence[Operation[Any]]"


SMALL_WORK_BYTES: Final = 16 << 10
"""Work up to this size is cheaper than a round trip to the driver."""

Effect = (
    AcquireConnectionEffect
    | RequestEffect
    | SendEffect
    | ReceiveEffect
    | RequestFdsEffect
    | ReadPayloadEffect
    | SendOneWayEffect
    | RunInThreadEffect
    | TransferEffect
    | SpawnEffect
    | SleepEffect
    | GatherEffect
)
Operation = Generator[Effect, Any, T]
AnyConnectionLease = ConnectionLease[AnyChannel]


def work(function: Callable[[], T], size_bytes: int) -> Operation[T]:
    """Result of `function`, which touches about `size_bytes` of memory: run inline if small, else by the driver."""
    if size_bytes <= SMALL_WORK_BYTES:
        return function()
    result: T = yield RunInThreadEffect(function, size_bytes)
    return result


def drive(operation: Generator[E, Any, T], do: Callable[[E], Any]) -> T:
    """Run `operation` to its end with `do` for each effect: its result.

    The result of `do` is sent in, its exception thrown in. Raises what the operation does not catch; the operation is
    closed by then, so that the traceback keeps no connection alive.
    """
    try:
        effect = next(operation)
        while True:
            try:
                result = do(effect)
            except BaseException as error:
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as end:
        return cast(T, end.value)
    finally:
        operation.close()
