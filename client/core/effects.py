"""What an operation wants done: the client's own vocabulary of I/O, as plain values.

An operation is a generator. It yields effects; whoever drives it (`drive` below, async_driver.py, together.py) carries each one out and
sends the result back, or throws the typed error in. Operations so know neither sockets nor threads nor an event loop.
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
    """What operations see of a channel, blocking or not; its I/O goes through effects."""

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
    """Lend a channel to `address`: a Loan. `hello` is what a new one says; None: what masters are told."""

    address: Address
    deadline: Deadline
    hello: Hello | None = None


@dataclass(slots=True)
class RequestEffect:
    """Send `message` with the values of `payload`; the answer, a message of type `answer`."""

    channel: AnyChannel
    message: Message
    answer: type[Message]
    deadline: Deadline
    payload: Sequence[memoryview] = ()


@dataclass(slots=True)
class SendEffect:
    """Send `message` and go on: `ReceiveEffect` follows."""

    channel: AnyChannel
    message: Message
    deadline: Deadline


@dataclass(slots=True)
class ReceiveEffect:
    """The answer to what was sent, a message of type `answer`; None if it has not come by `until`, and can be awaited further."""

    channel: AnyChannel
    answer: type[Message]
    until: Deadline


@dataclass(slots=True)
class RequestFdsEffect:
    """Send `message`; (SlabFds, descriptors), which the operation closes."""

    channel: AnyChannel
    message: MapSlabs | OpenIndex
    deadline: Deadline


@dataclass(slots=True)
class ReadPayloadEffect:
    """Read the last answer's payload, or its next part, into `destinations`."""

    channel: AnyChannel
    destinations: Sequence[memoryview]
    deadline: Deadline


@dataclass(slots=True)
class SendOneWayEffect:
    """Send `message`, which has no answer."""

    channel: AnyChannel
    message: Message


@dataclass(slots=True)
class RunInThreadEffect:
    """Run `function`, which touches about `size_bytes` of memory or waits for a thread: its result. Much must not stop an event loop."""

    function: Callable[[], Any]
    size_bytes: int


@dataclass(slots=True)
class TransferEffect:
    """Have the transfer engine make these copies from or to another host. Raises as TransferEngine.transfer."""

    engine: "TransferEngine"
    copies: "Sequence[Copy]"
    deadline: Deadline


@dataclass(slots=True)
class SpawnEffect:
    """Carry out an operation in the background, beside this one; nobody waits for it. It raises no KVStoreError."""

    operation: "Operation[None]"


@dataclass(slots=True)
class SleepEffect:
    seconds: float


@dataclass(slots=True)
class GatherEffect:
    """Carry out these operations at once: a list of their results. The first error ends all of them, and is raised once they have ended."""

    operations: "Sequence[Operation[Any]]"


SMALL_WORK_BYTES: Final = 16 << 10
"""Up to this size the way to the driver and back takes longer than the work."""

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
AnyLoan = ConnectionLease[AnyChannel]


def work(function: Callable[[], T], size_bytes: int) -> Operation[T]:
    """The result of `function`, which touches about `size_bytes` of memory: run here when that is little."""
    if size_bytes <= SMALL_WORK_BYTES:
        return function()
    result: T = yield RunInThreadEffect(function, size_bytes)
    return result


def drive(operation: Generator[E, Any, T], do: Callable[[E], Any]) -> T:
    """The result of `operation`, whose effects `do` carries out one after another: what it returns is sent in, what it raises thrown in.

    Raises what the operation does not catch. It is closed by then, so that nothing it has borrowed lives as long as a traceback does.
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
