"""Promises of client_protocol.py: what a request looks like, and which frames answer it."""

import array
import os
import socket

import pytest

from kvstore.protocol.errors import Full, ProtocolError, TooManyConnections
from kvstore.protocol.frames import ACCEPTS_TRACES, HEADER, VERSION, FrameHeader, unpack_header
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import SERVER_NODE, Count, Failure, Flags, Hello, Trace, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.client.client_protocol import MAX_REQUEST_ID, ClientProtocol, is_closed_by_peer, read_refusal, take_descriptors
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_reader import FrameReader
from tests.rpc.traced import sampled
from tests.rpc.wires import frame

EXISTS = Exists([b"key"])


@pytest.fixture
def protocol() -> ClientProtocol:
    """One that has asked its first request, of id 1."""
    protocol = ClientProtocol(Address(unix="/the/peer"))
    protocol.request(EXISTS, Deadline(10))
    return protocol


def arrived(message: Message, request_id: int = 1, payload_bytes: int = 0) -> tuple[FrameHeader, memoryview]:
    body = message.pack()
    return FrameHeader(message.TYPE, request_id, 0, len(body), payload_bytes), memoryview(body)


def test_a_packed_request_of_a_sampled_call_is_traced() -> None:
    with sampled() as call:
        asked = {takes: greeted(takes).packed_request(Exists.TYPE, EXISTS.pack(), 5, Deadline(10)) for takes in (0, ACCEPTS_TRACES)}
    assert asked[ACCEPTS_TRACES].startswith(call.frame)
    assert asked[ACCEPTS_TRACES][len(call.frame) :] == asked[0]
    assert call.requests == 4


def test_flag_reads_one_flag_and_leaves_others_to_answer(protocol: ClientProtocol) -> None:
    body = Flags(b"\7").pack()

    def flag(
        body: bytes = body,
        kind: int = Flags.TYPE,
        request_id: int = 1,
        payload_bytes: int = 0,
        magic: bytes = b"kV",
        version: int = VERSION,
    ) -> int | None:
        data = HEADER.pack(magic, version, kind, request_id, 0, len(body), payload_bytes) + body
        return protocol.flag(memoryview(data + b"what lies behind"), len(data))

    assert flag() == 7
    others = [flag(Flags(b"\7\7").pack()), flag(Flags(b"").pack()), flag(b"\2\0\0\0\7"), flag(kind=Failure.TYPE), flag(request_id=2)]
    others += [flag(payload_bytes=1), flag(magic=b"HT"), flag(version=VERSION - 1), flag(version=VERSION + 1)]
    assert others == [None] * len(others)
    cut = HEADER.pack(b"kV", VERSION, Flags.TYPE, 1, 0, 4, 0) + body
    assert protocol.flag(memoryview(cut), len(cut)) is None, "the body is to be a byte shorter, and another message follows"


def greeted(takes: int) -> ClientProtocol:
    """One whose peer has said in its Welcome what it takes."""
    protocol = ClientProtocol(Address(unix="/the/peer"))
    protocol.request(Hello(1), Deadline(10))
    body = Welcome(SERVER_NODE, "n").pack()
    protocol.answer(FrameHeader(Welcome.TYPE, 1, takes, len(body), 0), memoryview(body), Welcome)
    return protocol


@pytest.mark.promise("tracing-free")
def test_sampled_call_sends_trace_only_to_accepting_peer() -> None:
    with sampled() as call:
        asked = {takes: b"".join(greeted(takes).request(EXISTS, Deadline(10), [b"value"])) for takes in (0, 2, ACCEPTS_TRACES)}
    assert unpack_header(asked[0]).type == unpack_header(asked[2]).type == Exists.TYPE
    assert asked[ACCEPTS_TRACES].startswith(call.frame)
    assert unpack_header(call.frame).type == Trace.TYPE
    assert unpack_header(asked[ACCEPTS_TRACES], len(call.frame)).type == Exists.TYPE
    assert len(asked[ACCEPTS_TRACES]) == len(asked[0]) + len(call.frame)
    assert call.requests == 6, "three times a Hello and a question"
    assert unpack_header(b"".join(greeted(ACCEPTS_TRACES).request(EXISTS, Deadline(10)))).type == Exists.TYPE, "the call is over"


def test_ids_wrap_without_zero(protocol: ClientProtocol) -> None:
    protocol._request_id = MAX_REQUEST_ID - 1
    ids = [unpack_header(protocol.request(EXISTS, Deadline(10))[0]).request_id for _ in range(3)]
    assert ids == [MAX_REQUEST_ID, 1, 2]


def test_the_error_of_a_peer_that_hangs_up_is_raised(protocol: ClientProtocol) -> None:
    with pytest.raises(Full, match="too many"):
        protocol.answer(*arrived(Failure(Full.code, "too many"), 0), Flags)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (arrived(Count(1)), "unix:/the/peer sent a message of type 6 instead of Flags"),
        (arrived(Flags(b"\1"), 2), "type 5 instead of Flags"),
        (arrived(Flags(b"\1"), 0), "type 5 instead of Flags"),
        (arrived(Failure(Full.code, "another's"), 9), "type 3 instead of Flags"),
        (arrived(Failure(Full.code, "with values"), 1, 5), "type 3 instead of Flags"),
        ((FrameHeader(Flags.TYPE, 1, 0, 2, 0), memoryview(b"ab")), "is too short"),
        ((FrameHeader(Failure.TYPE, 1, 0, 1, 0), memoryview(b"x")), "is too short"),
    ],
)
def test_any_other_frame_is_a_protocol_error(protocol: ClientProtocol, frame: tuple[FrameHeader, memoryview], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        protocol.answer(*frame, Flags)


def test_payload_must_be_read_before_the_next_request(protocol: ClientProtocol) -> None:
    protocol.answer(*arrived(Flags(b""), payload_bytes=5), Flags)
    assert protocol.payload_left == 5
    with pytest.raises(ProtocolError, match="payload was not read"):
        protocol.request(EXISTS, Deadline(10))
    protocol.payload_left -= 5
    protocol.request(EXISTS, Deadline(10))


def test_descriptors_are_taken_from_truncated_ancillary_data() -> None:
    fds = array.array("i")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [b"x"], [ours.fileno(), theirs.fileno()])
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_LEN(2 * fds.itemsize))
        take_descriptors(ancillary, fds)
    assert len(fds) == 2
    for fd in fds:
        os.close(fd)
    take_descriptors([(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [7]).tobytes() + b"\1\2")], fds)
    assert fds[2:].tolist() == [7]


def test_is_closed_by_peer_reads_nothing() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert not is_closed_by_peer(here)
        there.send(b"x")
        assert not is_closed_by_peer(here)
        assert here.recv(2) == b"x"
        there.close()
        assert is_closed_by_peer(here)
    assert is_closed_by_peer(here), "nor can a closed one be asked"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (frame(Failure(TooManyConnections.code, "16 are in use"), 0), TooManyConnections),
        (frame(Failure(TooManyConnections.code, "of a request"), 1), None),
        (frame(Count(1), 0), None),
        (frame(Failure(TooManyConnections.code, "cut"), 0)[:-1], None),
        (b"no frame of ours at all, of 24 bytes", None),
    ],
)
def test_the_refusal_of_a_peer_that_has_closed_is_read(data: bytes, kind: type[TooManyConnections] | None) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        assert read_refusal(ours, FrameReader()) is None, "nothing has come"
        with theirs:
            theirs.sendall(data)
        found = read_refusal(ours, FrameReader())
        assert type(found) is (kind or type(None))
