"""Promises of channel.py, against peers that the tests play on the other end of a real socket.

Most answers lie in the socket before they are asked for: a channel's request ids count from 1, so no second thread is
needed.
"""

import array
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.errors import DeadlineExceeded, Full, ProtocolError, Unauthorized, Unavailable
from kvstore.protocol.frames import HEADER_BYTES
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import MapSlabs, MapSlabsReply, Put, ReleaseLeases
from kvstore.protocol.session_messages import SERVER_NODE, Failure, Flags, Hello, Ok, Welcome
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import MAX_VECTORS
from kvstore.testing.transfer.awaited import eventually
from tests.rpc.encrypted_pair import tls_pair
from tests.rpc.wires import Looks, frame, read_frame

SOON_S = 0.2
"""The deadline of what is to miss it."""
BRIEF_S = 0.5
"""The deadline of what is there already."""
EXISTS = Exists([b"key"])


class Line:
    def __init__(
        self, busy_poll: BusyPoll | None = None, ends: "Callable[[], tuple[socket.socket, socket.socket]]" = socket.socketpair
    ) -> None:
        mine, self.peer = ends()
        self.peer.settimeout(10)
        self.channel = Channel(Address(unix="/the/peer"), mine, busy_poll)

    def exists(self, timeout_s: float = 10) -> Flags:
        return self.channel.call(EXISTS, Flags, Deadline(timeout_s))

    def close(self) -> None:
        self.channel.close()
        self.peer.close()


@pytest.fixture(params=["sleeps", "looks", "tls"])
def either(request: pytest.FixtureRequest) -> Iterator[Line]:
    """For what the way of waiting, or TLS, could break."""
    looks = Looks(1000, is_on=True) if request.param == "looks" else None
    line = Line(looks, tls_pair if request.param == "tls" else socket.socketpair)
    yield line
    line.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


@pytest.fixture
def background() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Runs what the peer does meanwhile; it has ended when the test has."""
    threads: list[threading.Thread] = []

    def start(function: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=function))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- asking ---


def test_who_looks_for_an_answer_finds_it_or_sleeps_after_all(background: Callable[[Callable[[], object]], None]) -> None:
    looks = Looks(1000)
    line = Line(looks)
    line.peer.sendall(frame(Flags(b""), 1) + frame(Flags(b""), 2))
    line.exists()
    assert looks.told == ["slept"]
    line.exists()
    assert looks.told == ["slept"], "what has come already is not waited for"
    looks.is_on = True
    line.peer.sendall(frame(Flags(b""), 3))
    line.exists()
    assert looks.told == ["slept", "found"]

    def answer_late() -> None:
        eventually(lambda: looks.told[2:] == ["missed"], "a look in vain")
        line.peer.sendall(frame(Flags(b""), 4))

    background(answer_late)
    line.exists()
    assert looks.told == ["slept", "found", "missed", "slept"]
    line.close()


def test_call_sends_one_frame_with_deadline_and_returns_answer(either: Line) -> None:
    line = either
    line.peer.sendall(frame(Flags(b"\1"), 1))
    assert line.exists(1000) == Flags(b"\1")
    header, message, _ = read_frame(line.peer)
    assert (header.request_id, message) == (1, EXISTS)
    assert 980_000 < header.deadline_ms <= 1_000_001


# --- asking for one flag ---


def ask_for_flag(line: Line, value: bytes = b"value", timeout_s: float = 10) -> int | None:
    return line.channel.call_for_flag(EXISTS.TYPE, EXISTS.pack(), value, Deadline(timeout_s))


def test_one_flag_is_asked_for_as_the_message_is_and_returned(line: Line) -> None:
    line.peer.sendall(frame(Flags(b"\1"), 1) + frame(Flags(b"\0"), 2))
    assert ask_for_flag(line) == 1
    header, message, value = read_frame(line.peer)
    assert (header.request_id, message, value) == (1, EXISTS, b"value")
    assert ask_for_flag(line) == 0, "which had come along with the first"
    assert line.channel.is_settled


def test_one_flag_may_come_byte_by_byte(either: Line, background: Callable[[Callable[[], object]], None]) -> None:
    line = either

    def drip() -> None:
        for byte in frame(Flags(b"\1"), 1):
            line.peer.sendall(bytes([byte]))

    background(drip)
    assert ask_for_flag(line) == 1


def test_call_sends_whole_value_despite_partial_sends(either: Line, background: Callable[[Callable[[], object]], None]) -> None:
    line = either
    value, got = os.urandom(4 << 20), bytearray()

    def read() -> None:
        got.extend(read_frame(line.peer)[2])
        line.peer.sendall(frame(Flags(b"\1"), 1))

    background(read)
    assert ask_for_flag(line, value) == 1
    assert got == value


def test_a_flag_that_does_not_come_ends_the_channel(either: Line) -> None:
    line = either
    with pytest.raises(DeadlineExceeded):
        ask_for_flag(line, timeout_s=SOON_S)
    assert not line.channel.is_open


def test_call_raises_peers_error_and_channel_stays_usable(line: Line) -> None:
    line.peer.sendall(frame(Failure(Full.code, "no room"), 1) + frame(Flags(b"\0"), 2))
    with pytest.raises(Full, match="no room"):
        line.exists()
    assert line.exists() == Flags(b"\0")


def test_answers_of_any_size_one_after_another_are_read_whole(either: Line, background: Callable[[Callable[[], object]], None]) -> None:
    line = either
    keys = bytes(65_536) * 16
    background(lambda: line.peer.sendall(frame(Flags(keys), 1) + frame(Flags(b""), 2)))
    assert line.exists().flags == keys
    assert line.exists() == Flags(b"")


def test_call_sends_values_from_many_buffers(either: Line, background: Callable[[Callable[[], object]], None]) -> None:
    line = either
    parts = [os.urandom(10_000) for _ in range(MAX_VECTORS // 2)] + [b"", b"end"] + [b"x"] * MAX_VECTORS
    value = b"".join(parts)
    received: list[tuple[Message, bytes]] = []

    def serve() -> None:
        received.append(read_frame(line.peer)[1:])
        line.peer.sendall(frame(Flags(b"\1"), 1))

    background(serve)
    put = Put("", [b"k"], [len(value)], [0], [0], [b""])
    assert line.channel.call(put, Flags, Deadline(10), [memoryview(part) for part in parts]) == Flags(b"\1")
    assert received[0][1] == value


def test_post_to_a_dead_peer_closes_the_channel(line: Line) -> None:
    line.peer.close()
    line.channel.post(ReleaseLeases([3]))
    assert not line.channel.is_open
    line.channel.post(ReleaseLeases([3]))


# --- values of an answer ---


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.lists(st.integers(1, 1_500), max_size=4))
@settings(max_examples=40)
def test_values_arrive_in_their_views_however_the_bytes_come(sizes: list[int], cuts: list[int]) -> None:
    line = Line()
    value = bytes(index % 251 for index in range(sum(sizes)))
    data = frame(Ok(), 1, value) + frame(Flags(b""), 2)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]

    def serve() -> None:
        for start, end in itertools.pairwise(edges):
            line.peer.sendall(data[start:end])

    peer = threading.Thread(target=serve)
    peer.start()
    deadline = Deadline(10)
    line.channel.call(EXISTS, Ok, deadline)
    memory = bytearray(len(value))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(memory)[at : at + size])
        at += size
    line.channel.read_into(views[:1], deadline)
    line.channel.read_into(views[1:], deadline)
    assert memory == value
    assert line.exists() == Flags(b"")
    peer.join()
    line.close()


# --- deadlines ---


def test_call_after_deadline_sends_nothing_and_stays_usable(line: Line) -> None:
    with pytest.raises(DeadlineExceeded, match="within the deadline of 0 s"):
        line.exists(0)
    assert line.channel.is_open
    line.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        line.peer.recv(1)


@pytest.mark.parametrize("sent", [0, 5, HEADER_BYTES + 2])
def test_call_ends_at_deadline_within_an_answer(line: Line, sent: int) -> None:
    line.peer.sendall(frame(Flags(bytes(9)), 1)[:sent])
    with pytest.raises(DeadlineExceeded, match=r"^\S+: no answer within the deadline of 0\.2 s$"):
        line.exists(SOON_S)
    assert not line.channel.is_open


def test_a_peer_that_does_not_read_is_left_at_the_deadline(either: Line) -> None:
    line = either
    with pytest.raises(DeadlineExceeded):
        line.channel.call(EXISTS, Flags, Deadline(SOON_S), [bytes(8 << 20)])
    assert not line.channel.is_open


def test_call_for_fds_ends_at_deadline_without_descriptors(line: Line) -> None:
    with pytest.raises(DeadlineExceeded):
        line.channel.call_for_fds(MapSlabs([1]), Deadline(SOON_S))
    assert not line.channel.is_open


def test_a_short_deadline_does_not_shorten_a_later_long_one(line: Line, background: Callable[[Callable[[], object]], None]) -> None:
    line.peer.sendall(frame(Flags(b"\1"), 1))
    line.exists(BRIEF_S)
    late = threading.Event()
    background(lambda: (late.wait(1.2 * BRIEF_S), line.peer.send(frame(Flags(b"\2"), 2))))
    assert line.exists(10) == Flags(b"\2")


def test_a_short_deadline_does_not_cut_off_a_later_large_request(line: Line, background: Callable[[Callable[[], object]], None]) -> None:
    line.peer.sendall(frame(Flags(b"\1"), 1))
    line.exists(BRIEF_S)
    value, late, received = os.urandom(2 << 20), threading.Event(), bytearray()

    def read_late() -> None:
        late.wait(1.2 * BRIEF_S)
        read_frame(line.peer)
        received.extend(read_frame(line.peer)[2])
        line.peer.sendall(frame(Flags(b"\2"), 2))

    background(read_late)
    assert line.channel.call(EXISTS, Flags, Deadline(10), [value]) == Flags(b"\2")
    assert received == value


# --- peers that break or lie ---


@pytest.mark.parametrize("sent", range(0, HEADER_BYTES + 4 + 1 + 5, 3))
def test_a_peer_that_closes_within_its_answer_is_unavailable(line: Line, sent: int) -> None:
    line.peer.sendall(frame(Flags(b"\1"), 1, b"value")[:sent])
    line.peer.shutdown(socket.SHUT_WR)
    with pytest.raises(Unavailable, match="the connection to unix:/the/peer broke: the peer closed the connection"):
        line.exists()
        line.channel.read_into([memoryview(bytearray(5))], Deadline(10))
    assert not line.channel.is_open


@given(st.binary(min_size=1, max_size=100))
@settings(max_examples=50)
def test_no_bytes_of_a_peer_raise_anything_but_our_errors(garbage: bytes) -> None:
    line = Line()
    line.peer.sendall(garbage)
    line.peer.shutdown(socket.SHUT_WR)
    with pytest.raises((ProtocolError, Unavailable)):
        line.exists()
    line.close()


# --- descriptors ---


def send_slabs(line: Line, sizes: list[int], fds: list[int], request_id: int = 1) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    line.peer.sendmsg([frame(MapSlabsReply(sizes), request_id)], ancillary)


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "slab").write_bytes(b"slab")
    fd = os.open(tmp_path / "slab", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_descriptors_come_with_their_answer(line: Line, slab: int) -> None:
    send_slabs(line, [4, 0, 4], [slab, slab])
    answer, fds = line.channel.call_for_fds(MapSlabs([1, 2, 3]), Deadline(10))
    assert list(answer.sizes) == [4, 0, 4]
    assert [os.pread(fd, 9, 0) for fd in fds] == [b"slab", b"slab"]
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("sizes", [[], [4, 4]])
def test_call_for_fds_refuses_wrong_count_without_leak(line: Line, slab: int, sizes: list[int]) -> None:
    before = open_descriptors()
    send_slabs(line, sizes, [slab])
    with pytest.raises(ProtocolError, match="1 descriptors for slabs of"):
        line.channel.call_for_fds(MapSlabs([1]), Deadline(10))
    assert open_descriptors() == before - 1, "the channel's own socket is closed too"


def test_descriptors_of_a_malformed_answer_do_not_leak(line: Line, slab: int) -> None:
    before = open_descriptors()
    send_slabs(line, [4], [slab], request_id=77)
    with pytest.raises(ProtocolError):
        line.channel.call_for_fds(MapSlabs([1]), Deadline(10))
    assert open_descriptors() == before - 1


# --- giving the connection away ---


def test_a_connection_can_be_given_away_between_calls(either: Line) -> None:
    line = either
    line.peer.sendall(frame(Flags(b"\1"), 1))
    line.exists()
    with line.channel.detach() as sock:
        assert not line.channel.is_open
        line.channel.close()
        sock.sendall(b"still open")
        came = b""
        while not came.endswith(b"still open"):
            came += line.peer.recv(100)


def test_a_connection_whose_peer_spoke_unasked_is_not_given_away(line: Line) -> None:
    line.peer.sendall(frame(Flags(b"\1"), 1) + frame(EXISTS, 1))
    line.exists()
    with pytest.raises(Unavailable, match="sent bytes without a request"):
        line.channel.detach()
    assert not line.channel.is_open


# --- between calls ---


def test_a_channel_between_calls_is_quiet(line: Line) -> None:
    line.peer.sendall(frame(Flags(b"\1"), 1))
    line.exists()
    assert line.channel.is_quiet()
    line.peer.sendall(frame(Flags(b"\1"), 2))
    assert line.exists() == Flags(b"\1")  # looking took nothing from the stream


def test_a_peer_that_speaks_unasked_is_not_quiet(line: Line) -> None:
    line.peer.sendall(b"x")
    assert not line.channel.is_quiet()


# --- opening ---


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def answering(listener: socket.socket, answer: bytes) -> Callable[[], None]:
    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            read_frame(sock)
            sock.sendall(answer)
            sock.recv(1)

    return serve


def test_opening_introduces_and_keeps_who_answered(listener: socket.socket, background: Callable[[Callable[[], object]], None]) -> None:
    background(answering(listener, frame(Welcome(SERVER_NODE, "node-1"), 1)))
    channel = Channel.open(parse_address(f"127.0.0.1:{listener.getsockname()[1]}"), Hello(1), Deadline(10))
    assert channel.welcome == Welcome(SERVER_NODE, "node-1")
    channel.close()


def test_a_refusal_is_raised_and_leaves_no_descriptor(listener: socket.socket, background: Callable[[Callable[[], object]], None]) -> None:
    background(answering(listener, frame(Failure(Unauthorized.code, "wrong token"), 1)))
    with pytest.raises(Unauthorized, match="wrong token"):
        Channel.open(Address(*listener.getsockname()), Hello(1), Deadline(10))


def test_nobody_there_is_unavailable_by_name(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(Unavailable, match=f"cannot connect to unix:{tmp_path}/absent: No such file"):
        Channel.open(Address(unix=str(tmp_path / "absent")), Hello(1), Deadline(10))
    assert open_descriptors() == before


def test_open_ends_at_the_deadline() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()), pytest.raises(DeadlineExceeded):
            Channel.open(Address(*full.getsockname()), Hello(1), Deadline(SOON_S))


def test_a_peer_that_does_not_welcome_is_left_at_the_deadline(listener: socket.socket) -> None:
    before = open_descriptors()
    with pytest.raises(DeadlineExceeded):
        Channel.open(Address(*listener.getsockname()), Hello(1), Deadline(SOON_S))
    assert open_descriptors() == before


# --- in steps ---


def test_steps_take_answer_and_values_as_they_arrive(either: Line) -> None:
    line = either
    line.channel.ask(EXISTS, Deadline(10))
    assert line.channel.take_answer(Flags) is None
    whole = frame(Flags(b"\1"), payload=b"values")
    line.peer.sendall(whole[:10])
    assert line.channel.take_answer(Flags) is None
    line.peer.sendall(whole[10:-4])
    assert line.channel.take_answer(Flags) == Flags(b"\1")
    found = bytearray(6)
    pending = line.channel.values_into([memoryview(found)[:3], memoryview(found)[3:]])
    assert not line.channel.take_values(pending)
    assert not line.channel.is_settled
    line.peer.sendall(whole[-4:])
    assert line.channel.take_values(pending)
    assert found == b"values"
    assert line.channel.is_settled


@pytest.mark.parametrize("sent", [b"", frame(Ok()), frame(Flags(b"\1"), payload=b"val")], ids=["nothing", "nonsense", "too few values"])
def test_in_steps_what_breaks_a_channel_closes_it(line: Line, sent: bytes) -> None:
    line.channel.ask(EXISTS, Deadline(10))
    line.peer.sendall(sent)
    line.peer.close()
    with pytest.raises((Unavailable, ProtocolError)):
        line.channel.take_answer(Flags)
        while not line.channel.take_values(line.channel.values_into([memoryview(bytearray(3))])):
            pass
        line.channel.values_into([memoryview(bytearray(1))])
    assert not line.channel.is_open


def test_in_steps_an_answer_may_be_awaited_further(line: Line) -> None:
    line.channel.ask(EXISTS, Deadline(10))
    assert line.channel.await_answer(Flags, Deadline(0.001)) is None
    whole = frame(Flags(b"\1"))
    line.peer.sendall(whole[:-1])
    assert line.channel.await_answer(Flags, Deadline(0.001)) is None
    assert not line.channel.is_settled
    line.peer.sendall(whole[-1:])
    assert line.channel.await_answer(Flags, Deadline(10)) == Flags(b"\1")
    assert line.channel.is_settled
