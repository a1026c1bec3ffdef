"""Promises of `run_gathered` in driver.py, with operations written for the tests.

Peers are played by the tests over real sockets; transfer engines are real.
"""

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvstore.client.core.effects import (
    GatherEffect,
    Operation,
    ReadPayloadEffect,
    RequestEffect,
    RunInThreadEffect,
    SendEffect,
    SendOneWayEffect,
    TransferEffect,
)
from kvstore.client.driver import run_gathered
from kvstore.protocol.errors import Full, KVStoreError
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.node_messages import ReadBlocks, ReadBlocksReply
from kvstore.protocol.session_messages import Failure, Flags
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail
from kvstore.transfer.description import AgentInfo, EngineInfo, pack_engine, pack_region
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import RemoteRegion
from kvstore.transfer.memory.signal_safety import Shield
from kvstore.transfer.paths.batch import Span
from kvstore.transfer.paths.peer import PeerRegion
from kvstore.transfer.paths.transfers import Transfer
from tests.rpc.raw_peers import RawAnswerer
from tests.rpc.wires import frame, read_frame
from tests.store.engines import LOOPBACK

SOON_S = 0.1
"""The deadline of what is to miss it."""
LONG_S = 60.0
EXISTS = Exists([b"key"])
READ = ReadBlocks([b"key"], [0], 1 << 20, 0)
SIZE = 1 << 20


class Line:
    """A channel, and its peer's end of the socket."""

    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        self.peer.settimeout(LONG_S)
        self.channel = Channel(Address(unix="/the/peer"), mine)

    def answer(self, flag: int) -> None:
        """To the first question, as if it had been asked."""
        self.peer.sendall(frame(Flags(bytes([flag]))))

    def close(self) -> None:
        self.channel.close()
        self.peer.close()


@pytest.fixture
def one() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


@pytest.fixture
def other() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(settings=LOOPBACK, serves=False) as engine:
        yield engine


class Driver:
    """Carries out what waits for no peer; `log` has what was posted. A Work is called."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def __call__(self, effect: Any) -> Any:
        match effect:
            case RunInThreadEffect():
                return effect.function()
            case GatherEffect():
                return run_gathered(effect.operations, self)
            case SendEffect():
                cast(Channel, effect.channel).ask(effect.message, effect.deadline)
            case SendOneWayEffect():
                self.log.append(effect.message)
        return None


def together(*operations: Operation[Any]) -> list[Any]:
    return run_gathered(operations, Driver())


def asks(line: Line, timeout_s: float = LONG_S) -> Operation[int]:
    flags: Flags = yield RequestEffect(line.channel, EXISTS, Flags, Deadline(timeout_s))
    return flags.flags[0]


class Ended:
    """An operation that says whether it was ended."""

    def __init__(self, inner: Operation[Any]) -> None:
        self.is_so = False
        self.error: BaseException | None = None
        self.operation = self._run(inner)

    def _run(self, inner: Operation[Any]) -> Operation[Any]:
        try:
            return (yield from inner)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.is_so = True


def blocks(size: int) -> ReadBlocksReply:
    return ReadBlocksReply(0, 0, 0, b"\1", [size], [0], b"\2", [0], [0])


def test_all_are_asked_before_any_answer_is_needed(one: Line, other: Line) -> None:
    """The second peer answers for both once it has been asked: were the first waited for alone, nothing would ever come."""

    def second() -> Operation[int]:
        result = yield from asks(other)
        one.answer(1)
        return result

    other.answer(2)
    assert together(asks(one), second()) == [1, 2]
    assert isinstance(read_frame(one.peer)[1], Exists)


def test_gather_reads_values_as_they_arrive(one: Line, other: Line) -> None:
    """The first peer stops within its value; the second one's is whole, and only then does the first go on."""
    order: list[str] = []

    def reads(line: Line, name: str) -> Operation[bytes]:
        value = bytearray(SIZE)
        yield RequestEffect(line.channel, READ, ReadBlocksReply, Deadline(LONG_S))
        yield ReadPayloadEffect(line.channel, [memoryview(value)[: SIZE // 2], memoryview(value)[SIZE // 2 :]], Deadline(LONG_S))
        order.append(name)
        if name == "other":
            one.peer.sendall(whole[-5:])
        return bytes(value)

    whole = frame(blocks(SIZE), payload=b"v" * SIZE)
    one.peer.sendall(whole[:1000])

    def send() -> None:
        one.peer.sendall(whole[1000:-5])
        other.peer.sendall(whole)

    sender = threading.Thread(target=send)
    sender.start()
    assert together(reads(one, "one"), reads(other, "other")) == [b"v" * SIZE] * 2
    sender.join()
    assert order == ["other", "one"]


def test_gather_accepts_a_reply_polled_late(one: Line, other: Line) -> None:
    """Both deadlines are over when the first is looked at again."""

    def slow() -> Operation[int]:
        yield RunInThreadEffect(lambda: threading.Event().wait(2 * SOON_S), 0)
        return (yield from asks(one))

    def quick() -> Operation[int]:
        flags: Flags = yield RequestEffect(other.channel, EXISTS, Flags, deadline)
        return flags.flags[0]

    deadline = Deadline(SOON_S)
    one.answer(1)
    other.answer(2)
    assert together(quick(), slow()) == [2, 1]


@pytest.mark.parametrize("ends_by", ["the peer's error", "a broken connection", "nonsense"])
def test_the_first_error_ends_the_others_and_is_raised(one: Line, other: Line, ends_by: str) -> None:
    waits = Ended(asks(one))
    if ends_by == "the peer's error":
        other.peer.sendall(frame(Failure(Full.code, "no room")))
    elif ends_by == "nonsense":
        other.peer.sendall(b"x" * 100)
    else:
        other.peer.close()
    with pytest.raises(KVStoreError):
        together(waits.operation, asks(other))
    assert waits.is_so
    assert isinstance(waits.error, GeneratorExit)
    assert other.channel.is_open == (ends_by == "the peer's error")


def test_what_a_signal_handler_raises_ends_all_of_them(one: Line, other: Line) -> None:
    class Struck(BaseException):
        pass

    def strike(*_: object) -> None:
        raise Struck

    def is_struck() -> Operation[None]:
        yield from asks(other)
        yield RunInThreadEffect(lambda: signal.raise_signal(signal.SIGUSR1), 0)
        yield from asks(one)

    waits = Ended(asks(one))
    other.answer(1)
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(Struck):
            together(waits.operation, is_struck())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert waits.is_so


def test_copies_of_several_go_on_at_once_and_beside_questions(engine: TransferEngine, one: Line) -> None:
    """The last to be waited for is what the others depend on."""
    with TransferEngine("far", LOOPBACK) as far:
        source = bytes(range(256)) * (SIZE // 256)
        region = far.register(bytearray(source))
        shown = engine.import_region(engine.connect(far.describe()), far.export(region))
        found = [bytearray(SIZE), bytearray(SIZE)]

        def moves(into: bytearray) -> Operation[None]:
            yield TransferEffect(engine, [(Span(shown), into, SIZE)], Deadline(LONG_S))
            if into is found[1]:
                one.answer(1)

        assert together(asks(one), moves(found[0]), moves(found[1])) == [1, None, None]
        assert found == [source, source]
        region.close()


@pytest.fixture
def silent(engine: TransferEngine) -> Iterator[PeerRegion]:
    """A region of a peer that takes requests and answers none."""

    def play(sock: socket.socket) -> None:
        while sock.recv(65_536):
            pass

    with RawAnswerer(play) as peer:
        info = EngineInfo("silent", "there", (AgentInfo("tcp", Rail("lo"), peer.metadata),), {})
        yield engine.import_region(engine.connect(pack_engine(info)), pack_region(RemoteRegion(1, SIZE, 1, {"tcp": b""}, "cpu:0")))
        engine.close()


def test_copies_have_ended_when_the_error_of_another_is_raised(engine: TransferEngine, silent: PeerRegion, other: Line) -> None:
    def moves() -> Operation[None]:
        yield TransferEffect(engine, [(Span(silent), bytearray(SIZE), SIZE)], Deadline(LONG_S))

    def fails() -> Operation[None]:
        yield from asks(other)
        assert under_way()
        other.peer.sendall(frame(Failure(Full.code, "no room"), request_id=2))
        yield from asks(other)

    def under_way() -> int:
        return sum(state.in_flight_slices for state in silent.peer.chooser.states.values())

    other.answer(1)
    with pytest.raises(Full):
        together(moves(), fails())
    assert not under_way()


def test_gather_ends_all_copies_on_a_second_signal(
    engine: TransferEngine, silent: PeerRegion, other: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Struck(BaseException):
        pass

    def strike(*_: object) -> None:
        raise Struck

    transfers: list[Transfer] = []
    abandon = Transfer.abandon

    def struck(transfer: Transfer) -> None:
        with Shield():
            transfers.append(transfer)
            abandon(transfer)
            signal.raise_signal(signal.SIGUSR1)

    def moves() -> Operation[None]:
        yield TransferEffect(engine, [(Span(silent), bytearray(SIZE), SIZE)], Deadline(LONG_S))

    def fails() -> Operation[None]:
        yield from asks(other)
        other.peer.sendall(frame(Failure(Full.code, "no room"), request_id=2))
        yield from asks(other)

    monkeypatch.setattr(Transfer, "abandon", struck)
    other.answer(1)

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(Struck):
            together(moves(), moves(), fails())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [transfer.is_over for transfer in transfers] == [True, True]
