"""Peers that die, stall, lie about lengths, or speak another protocol: a typed error within the deadline, and everything healthy after.

Over raw sockets, both ways: faulty targets of our agent, and faulty clients of our target.
"""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvstore.protocol.errors import (
    DeadlineExceeded,
    Denied,
    Fenced,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.frames import HEADER, MAGIC, MAX_PAYLOAD_BYTES, VERSION
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import (
    MAX_PIECE_BYTES,
    MAX_TRANSFER_BODY_BYTES,
    Fence,
    JoinEngine,
    JoinReply,
    Notice,
    ReadRegions,
    WriteRegions,
)
from kvstore.testing.transfer.awaited import eventually, within
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.region import Exports, Piece, Region
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.target import Target
from tests.rpc.raw_peers import (
    PATIENCE_S,
    RawAnswerer,
    RawAsker,
    a_target,
    an_agent,
    fetch,
    frame,
    make_region,
    outcome,
    read_request,
    reset,
    shown,
    store,
    submit,
    welcome,
)

STALL_S = 1.0
"""Longer than a busy machine keeps a good peer waiting."""
SIZE = 256 << 10
TOO_LONG = bytes(MAX_TRANSFER_BODY_BYTES + 1)
NOT_UTF8 = bytes([44, 1, 0, 0, 1, 0, 0, 0, 255])
"""A Failure of code 300, whose text is one byte."""
Play = Callable[[socket.socket], None]


# --- bad targets ---


@pytest.fixture
def asker() -> Iterator[ConnectionAgent]:
    with an_agent(stall_timeout_s=STALL_S, connect_timeout_s=STALL_S, tcp_streams=1) as agent:
        yield agent


def silent(sock: socket.socket) -> None:
    while sock.recv(65_536):
        pass


def answer_join(make: Callable[[int], bytes]) -> Play:
    """Answers Join with these bytes, made from its request id, and is silent from then on."""

    def play(sock: socket.socket) -> None:
        sock.sendall(make(read_request(sock).request_id))
        silent(sock)

    return play


BAD_AT_JOIN: list[tuple[str, Play, type[KVStoreError]]] = [
    ("never answers", silent, Unreachable),
    ("hangs up", lambda sock: None, Unreachable),
    ("half a header", answer_join(lambda number: frame(JoinReply("x"), number)[:10]), Unreachable),
    ("another version", answer_join(lambda number: frame(JoinReply("x"), number, version=VERSION + 1)), ProtocolError),
    ("another request", answer_join(lambda number: frame(JoinReply("x"), number + 1)), ProtocolError),
    (
        "a body over the limit",
        answer_join(lambda number: frame(JoinReply("x"), number, body=TOO_LONG)),
        ProtocolError,
    ),
    ("a refusal", answer_join(lambda number: frame(Failure(Unavailable.code, "full"), 0)), Unavailable),
    ("closed, which it is not", answer_join(lambda number: frame(Failure(605, ""), number)), ProtocolError),
]


def answer_request(make: Callable[[int], bytes], after: Play = silent) -> Play:
    """Joins, answers the first request with these bytes, and ends with `after`."""

    def play(sock: socket.socket) -> None:
        welcome(sock)
        sock.sendall(make(read_request(sock).request_id))
        after(sock)

    return play


def hang_up(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def deaf(sock: socket.socket) -> None:
    """Joins, and never reads again, until the test ends it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    welcome(sock)
    ended = select.poll()
    ended.register(sock, 0)  # nothing but a hang-up
    ended.poll(PATIENCE_S * 1000)


def whole(number: int) -> bytes:
    return frame(Ok(), number, payload=bytes(SIZE))


BAD_AT_READING: list[tuple[str, Play, type[KVStoreError]]] = [
    ("stalls in the middle", answer_request(lambda number: whole(number)[:100_000]), Unreachable),
    ("resets in the middle", answer_request(lambda number: whole(number)[:100_000], reset), Unreachable),
    ("announces more", answer_request(lambda number: frame(Ok(), number, payload=bytes(SIZE + 1))), ProtocolError),
    ("announces too much", answer_request(lambda number: frame(Ok(), number, payload_bytes=MAX_PAYLOAD_BYTES + 1)), ProtocolError),
    ("a body", answer_request(lambda number: frame(Ok(), number, body=b"x", payload=bytes(SIZE))), ProtocolError),
    ("another type", answer_request(lambda number: frame(JoinReply("x"), number)), ProtocolError),
    ("another request", answer_request(lambda number: whole(number + 1)), ProtocolError),
    ("a failure of unknown code", answer_request(lambda number: frame(Failure(399, "?"), number)), Fenced),
    (
        "a failure not in UTF-8",
        answer_request(lambda number: frame(Failure(300, ""), number, body=NOT_UTF8)),
        ProtocolError,
    ),
    ("closed, which it is not", answer_request(lambda number: frame(Failure(605, ""), number)), ProtocolError),
]

BAD_AT_WRITING: list[tuple[str, Play, type[KVStoreError]]] = [
    ("never answers", answer_request(lambda number: b""), Unreachable),
    ("resets", answer_request(lambda number: b"", reset), Unreachable),
    ("never reads", deaf, Unreachable),
    ("another request", answer_request(lambda number: frame(Ok(), number - 1)), ProtocolError),
]


def name(value: object) -> str:
    return value.replace(" ", "-") if isinstance(value, str) else ""


def check_bad_target(asker: ConnectionAgent, play: Play, expected: type[KVStoreError], direction: Direction) -> None:
    """The request fails as expected, long before its deadline, and a good peer is served afterwards; nothing is held or open then."""
    size = SIZE * (32 if direction is Direction.WRITE else 1)
    ours, theirs = make_region(size), make_region(size, b"theirs")
    with RawAnswerer(play) as bad, an_agent("good") as good:
        good.export(theirs)
        request = submit(asker, direction, asker.load_remote(bad.metadata), [Piece(ours, 0, shown(theirs), 0, size)])
        with within(STALL_S * 3):
            error = outcome(request)
        assert type(error) is expected or (expected is Unreachable and isinstance(error, Unreachable)), repr(error)
        eventually(lambda: ours.users == 0, "the region is released")
        eventually(lambda: asker._pool.open_count == 0 or expected in (Fenced, KVStoreError), "the bad connection is closed")
        again = submit(asker, Direction.READ, asker.load_remote(good.metadata()), [Piece(ours, 0, shown(theirs), 0, size)])
        assert outcome(again) is None
        assert ours.memory == theirs.memory
    asker._pool.check_integrity()


@pytest.mark.parametrize(("_", "play", "expected"), BAD_AT_JOIN, ids=name)
def test_a_target_that_does_not_join_as_it_should(asker: ConnectionAgent, _: str, play: Play, expected: type[KVStoreError]) -> None:
    check_bad_target(asker, play, expected, Direction.READ)


@pytest.mark.parametrize(("_", "play", "expected"), BAD_AT_READING, ids=name)
def test_a_target_that_does_not_send_as_it_should(asker: ConnectionAgent, _: str, play: Play, expected: type[KVStoreError]) -> None:
    check_bad_target(asker, play, expected, Direction.READ)


@pytest.mark.parametrize(("_", "play", "expected"), BAD_AT_WRITING, ids=name)
def test_a_target_that_does_not_receive_as_it_should(asker: ConnectionAgent, _: str, play: Play, expected: type[KVStoreError]) -> None:
    check_bad_target(asker, play, expected, Direction.WRITE)


def test_surplus_bytes_are_detected_by_the_next_request(asker: ConnectionAgent) -> None:
    ours, theirs = make_region(SIZE), make_region(SIZE)
    with RawAnswerer(answer_request(lambda number: whole(number) + bytes(100))) as bad:
        remote = asker.load_remote(bad.metadata)
        pieces = [Piece(ours, 0, shown(theirs), 0, SIZE)]
        assert outcome(submit(asker, Direction.READ, remote, pieces)) is None
        assert isinstance(outcome(submit(asker, Direction.READ, remote, pieces)), ProtocolError)


def test_the_deadline_ends_what_has_not_stalled_yet(asker: ConnectionAgent) -> None:
    """A target that sends a byte now and then makes progress, but does not outlast the deadline."""
    hold = threading.Event()

    def drip(sock: socket.socket) -> None:
        welcome(sock)
        data = whole(read_request(sock).request_id)
        for at in range(len(data)):
            sock.sendall(data[at : at + 1])
            if hold.wait(STALL_S / 6):
                return

    ours, theirs = make_region(SIZE), make_region(SIZE)
    with RawAnswerer(drip) as bad:
        with within(STALL_S * 3):
            request = submit(
                asker, Direction.READ, asker.load_remote(bad.metadata), [Piece(ours, 0, shown(theirs), 0, SIZE)], timeout_s=STALL_S * 3
            )
            assert isinstance(outcome(request), DeadlineExceeded)
        hold.set()
    eventually(lambda: ours.users == 0, "the region is released")


# --- bad askers ---


@pytest.fixture
def exports() -> Exports:
    return Exports()


@pytest.fixture
def region(exports: Exports) -> Region:
    region = make_region(SIZE, b"ours")
    exports.add(region)
    return region


@pytest.fixture
def served(exports: Exports, region: Region) -> Iterator[tuple[Target, bytes]]:
    """With one thread only: a peer that occupies it blocks all others. All is well at the end."""
    with a_target(exports, serve_threads=1, stall_timeout_s=STALL_S, max_connections=8) as (target, metadata):
        yield target, metadata
        with RawAsker(metadata) as good:
            good.join("good", 99)
            assert good.works()
        eventually(lambda: target.connections == 0, "nobody is connected")
        eventually(lambda: region.users == 0, "the region is released")


@pytest.fixture
def metadata(served: tuple[Target, bytes]) -> bytes:
    return served[1]


@pytest.fixture
def raw(metadata: bytes) -> Iterator[RawAsker]:
    with RawAsker(metadata) as raw:
        yield raw


def header(
    *, magic: bytes = MAGIC, version: int = VERSION, kind: int = JoinEngine.TYPE, body_bytes: int = 0, payload_bytes: int = 0
) -> bytes:
    return HEADER.pack(magic, version, kind, 7, 0, body_bytes, payload_bytes)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        header(version=VERSION + 1),
        header(body_bytes=MAX_TRANSFER_BODY_BYTES + 1),
        header(payload_bytes=MAX_PAYLOAD_BYTES + 1),
    ],
    ids=["http", "version", "body", "payload"],
)
def test_a_header_that_cannot_be_read_is_refused(raw: RawAsker, data: bytes) -> None:
    raw.socket.sendall(data)
    answer, body = raw.answer()
    assert (answer.type, answer.request_id, Failure.unpack(body).code) == (Failure.TYPE, 0, ProtocolError.code)
    assert raw.is_refused()


@pytest.mark.parametrize("data", [b"kV", header(body_bytes=100) + b"x" * 99], ids=["header", "body"])
@pytest.mark.parametrize("leave", [hang_up, reset])
def test_an_asker_that_leaves_in_the_middle_of_a_request(raw: RawAsker, data: bytes, leave: Play) -> None:
    raw.socket.sendall(data)
    leave(raw.socket)


def test_a_header_that_comes_in_drops_does_not_keep_the_thread(raw: RawAsker, metadata: bytes) -> None:
    """Each byte is progress, but a header must still arrive within the stall timeout."""
    enough = threading.Event()
    raw.join()

    def drip() -> None:
        data = header(kind=Notice.TYPE)
        for at in range(len(data)):
            try:
                raw.socket.sendall(data[at : at + 1])
            except OSError:
                return
            enough.wait(STALL_S / 2)

    dripping = threading.Thread(target=drip)
    dripping.start()
    with RawAsker(metadata) as good, within(STALL_S):
        good.join(number=2)
        assert good.works()
        assert raw.is_refused()
    enough.set()
    dripping.join()


def test_a_name_and_number_that_are_taken_are_refused(raw: RawAsker, metadata: bytes, served: tuple[Target, bytes]) -> None:
    raw.join("same", 5)
    with RawAsker(metadata) as other:
        other.send(JoinEngine("same", 5))
        assert isinstance(other.failure(), ProtocolError)
        assert other.is_refused()
    assert raw.works()
    raw.socket.close()
    eventually(lambda: served[0].connections == 0, "both have left")
    with RawAsker(metadata) as third:
        third.join("same", 5)


@pytest.mark.parametrize("agent_name", ["", "x" * 256], ids=["none", "long"])
def test_a_name_that_is_none_is_refused(raw: RawAsker, agent_name: str) -> None:
    raw.send(JoinEngine(agent_name, 1))
    assert isinstance(raw.failure(), ProtocolError)
    assert raw.is_refused()


@pytest.mark.parametrize("kind", [ReadRegions, WriteRegions])
def test_a_body_that_is_no_request_is_refused(raw: RawAsker, kind: type[ReadRegions | WriteRegions]) -> None:
    raw.join()
    raw.socket.sendall(header(kind=kind.TYPE, body_bytes=5) + b"\xff" * 5)
    assert isinstance(raw.failure(), ProtocolError)
    assert raw.is_refused()


@pytest.mark.parametrize("kind", [ReadRegions, WriteRegions])
@pytest.mark.parametrize("sizes", [[MAX_PIECE_BYTES + 1], [MAX_PIECE_BYTES] * 5], ids=["one", "together"])
def test_pieces_too_large_are_refused(raw: RawAsker, region: Region, kind: type[ReadRegions | WriteRegions], sizes: list[int]) -> None:
    raw.join()
    count = len(sizes)
    raw.send(kind([region.region_id] * count, [region.write_key] * count, [0] * count, sizes))
    assert isinstance(raw.failure(), ProtocolError)
    assert raw.is_refused()


@pytest.mark.parametrize("announced", [9, 11])
def test_a_payload_that_does_not_add_up_is_refused(raw: RawAsker, region: Region, announced: int) -> None:
    raw.join()
    raw.send(store([(shown(region), 0, 6), (shown(region), 6, 4)]), payload_bytes=announced)
    assert isinstance(raw.failure(), ProtocolError)
    assert raw.is_refused()
    assert region.memory == make_region(SIZE, b"ours").memory


@pytest.mark.parametrize("leave", [hang_up, reset])
def test_an_asker_that_leaves_in_the_middle_of_its_payload(raw: RawAsker, region: Region, leave: Play) -> None:
    raw.join()
    raw.send(store([(shown(region), 0, SIZE)]), b"x" * 1000, payload_bytes=SIZE)
    leave(raw.socket)
    eventually(lambda: region.users == 0, "the region is released")
    assert bytes(region.memory[1000:]) == bytes(make_region(SIZE, b"ours").memory[1000:])


def test_a_client_that_stalls_in_its_payload_is_dropped(raw: RawAsker, region: Region) -> None:
    raw.join()
    raw.send(store([(shown(region), 0, SIZE)]), b"x" * 1000, payload_bytes=SIZE)
    eventually(lambda: region.users == 1, "the region is held")
    with within(STALL_S):
        assert raw.is_refused()
    eventually(lambda: region.users == 0, "the region is released")


def test_an_asker_that_asks_for_much_and_never_reads_is_given_up(metadata: bytes, region: Region) -> None:
    with RawAsker(metadata) as greedy, RawAsker(metadata) as good:
        greedy.join("greedy")
        greedy.send(fetch([(shown(region), 0, SIZE)] * 1000))
        eventually(lambda: region.users == 1, "the region is held")
        with within(STALL_S):
            good.join("good")
            assert good.works()
        eventually(lambda: region.users == 0, "the region is released")


DENIED = [("read", "key"), ("read", "place"), ("write", "region"), ("write", "key"), ("write", "read key")]


@pytest.mark.parametrize(("kind", "fault"), DENIED)
def test_what_is_not_allowed_fails_alone(raw: RawAsker, region: Region, kind: str, fault: str) -> None:
    """The connection stays usable, also after a discarded payload."""
    right = shown(region, writable=kind == "write")
    wrong = {
        "region": right._replace(region_id=10**9),
        "key": right._replace(key=right.key ^ 1),
        "place": right,
        "read key": shown(region, writable=False),
    }[fault]
    columns = [(right, 0, 10), (wrong, SIZE - 9 if fault == "place" else 0, 10), (right, 0, 0)]
    raw.join()
    if kind == "read":
        raw.send(fetch(columns))
    else:
        raw.send(store(columns), b"x" * 20)
    assert type(raw.failure()) is {"region": StaleHandle, "place": InvalidArgument}.get(fault, Denied)
    assert raw.works()
    assert region.memory == make_region(SIZE, b"ours").memory


def test_an_agent_fences_its_own_connections_only(raw: RawAsker, metadata: bytes) -> None:
    raw.join("raw", 1)
    with RawAsker(metadata) as other:
        other.join("other", 2)
        other.send(Fence([1]))
        assert other.answer()[0].type == Ok.TYPE
    assert raw.works()


@contextmanager
def a_crowd(metadata: bytes, count: int) -> Iterator[list[RawAsker]]:
    """So many who have joined."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(RawAsker(metadata)) for _ in range(count)]
        for number, asker in enumerate(crowd):
            asker.join("crowd", number)
        yield crowd


def test_connections_beyond_the_limit_are_refused(metadata: bytes, served: tuple[Target, bytes]) -> None:
    with a_crowd(metadata, 8) as crowd:
        with RawAsker(metadata) as refused:
            refused.send(JoinEngine("refused", 1))
            assert type(refused.failure()) is Unavailable
            assert refused.is_refused()
        assert all(asker.works() for asker in crowd)
    eventually(lambda: served[0].connections == 0, "the crowd has left")


def test_an_agent_that_is_refused_says_so(asker: ConnectionAgent, metadata: bytes, region: Region, served: tuple[Target, bytes]) -> None:
    remote = asker.load_remote(b"kvagent1 tcp " + metadata)
    pieces = [Piece(make_region(10), 0, shown(region), 0, 10)]
    with a_crowd(metadata, 8):
        assert isinstance(outcome(submit(asker, Direction.READ, remote, pieces)), Unavailable)
    eventually(lambda: served[0].connections == 0, "the crowd has left")
    assert outcome(submit(asker, Direction.READ, remote, pieces)) is None
    asker.close()


def test_idle_askers_cost_no_thread(metadata: bytes) -> None:
    """One thread serves them all."""
    with a_crowd(metadata, 7) as crowd:
        assert all(asker.works() for asker in crowd * 3)
