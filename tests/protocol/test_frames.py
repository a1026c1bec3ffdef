"""Promises of frames.py: what a header says, and which headers are refused."""

import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.frames import (
    HEADER_BYTES,
    MAX_BATCH,
    MAX_BODY_BYTES,
    MAX_DEADLINE_MS,
    MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES,
    TLS_MAGIC,
    VERSION,
    FrameHeader,
    check_key,
    kind_of,
    pack_header,
    unpack_header,
)

U8, U32 = st.integers(0, 255), st.integers(0, 2**32 - 1)


def test_the_header_is_24_bytes_in_this_order() -> None:
    packed = pack_header(7, 0x01020304, 5, 6, 8)
    assert packed == b"kV" + bytes([VERSION, 7]) + b"\x04\x03\x02\x01" + b"\x08\0\0\0" + b"\x05\0\0\0" + b"\x06\0\0\0\0\0\0\0"
    assert len(packed) == HEADER_BYTES == 24


@given(U8, U32, st.integers(0, MAX_DEADLINE_MS), st.integers(0, MAX_BODY_BYTES), st.integers(0, MAX_PAYLOAD_BYTES), st.binary(max_size=9))
def test_a_header_round_trips_wherever_it_lies(kind: int, request: int, deadline: int, body: int, payload: int, before: bytes) -> None:
    packed = before + pack_header(kind, request, body, payload, deadline)
    assert unpack_header(memoryview(packed), len(before)) == FrameHeader(kind, request, deadline, body, payload)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_refused_as_not_a_frame(garbage: bytes) -> None:
    if not garbage.startswith((b"kV", TLS_MAGIC)):
        with pytest.raises(ProtocolError, match="not a kvstore frame"):
            unpack_header(garbage)


@pytest.mark.parametrize(
    ("answer", "whose"), [(b"HTTP/1.1 400 Bad Request\r\n", "HTTP"), (b"\0\0\x18\4" + bytes(24), "gRPC")], ids=["http", "grpc"]
)
def test_what_another_of_our_ports_answers_is_told_from_garbage(answer: bytes, whose: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^not a kvstore frame, but {whose}: that is the port of .*; clients connect to"):
        unpack_header(answer)


def test_a_tls_handshake_is_told_from_garbage() -> None:
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(received, sent, server_hostname="node").do_handshake()
    with pytest.raises(ProtocolError, match=r"^the peer uses TLS and this port does not: set tls_cert and tls_key here"):
        unpack_header(sent.read())


@given(st.binary(min_size=HEADER_BYTES - 3, max_size=HEADER_BYTES - 3))
def test_any_header_is_within_limits_or_refused(rest: bytes) -> None:
    try:
        header = unpack_header(b"kV" + bytes([VERSION]) + rest)
    except ProtocolError:
        return
    assert header.body_bytes <= MAX_BODY_BYTES
    assert header.payload_bytes <= MAX_PAYLOAD_BYTES
    assert header.deadline_ms <= MAX_DEADLINE_MS


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, 99])
def test_frame_of_another_version_is_refused(version: int) -> None:
    frame = bytearray(pack_header(1, 1, 0))
    frame[2] = version
    with pytest.raises(ProtocolError, match=f"version {version}, this side {VERSION}: run the same release on both"):
        unpack_header(frame)


@pytest.mark.parametrize(("body", "payload", "what"), [(MAX_BODY_BYTES + 1, 0, "body"), (0, MAX_PAYLOAD_BYTES + 1, "payload")])
def test_a_length_over_its_limit_is_refused(body: int, payload: int, what: str) -> None:
    with pytest.raises(ProtocolError, match=f"a {what} of .* over the limit"):
        unpack_header(pack_header(1, 1, body, payload))


def test_a_deadline_further_than_an_hour_is_cut() -> None:
    assert unpack_header(pack_header(1, 1, 0, 0, 2**32 - 1)).deadline_ms == MAX_DEADLINE_MS


def test_header_field_out_of_range_is_a_callers_error() -> None:
    with pytest.raises(struct.error):
        pack_header(1, 2**32, 0)


def test_a_full_batch_of_the_widest_message_fits_a_body() -> None:
    publish_columns = 1 + 4 + 4 + 8 + 8 + 8 + 1
    assert MAX_BATCH * (2 * (MAX_KEY_BYTES + 1) + publish_columns) + 4096 <= MAX_BODY_BYTES


@pytest.mark.parametrize("key", [b"k", b"k" * 255])
def test_keys_of_1_to_255_bytes_are_fine(key: bytes) -> None:
    check_key(key)


@pytest.mark.parametrize(("key", "why"), [(b"", "not 0"), (b"k" * 256, "not 256"), ("text", "not str"), (bytearray(b"k"), "not bytearray")])
def test_any_other_key_is_misuse(key: bytes, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        check_key(key)


def test_the_type_of_a_frame_is_known_before_it_is_read() -> None:
    frame = memoryview(pack_header(41, 1, 0))
    assert kind_of(frame) == 41
    assert kind_of(frame[:3]) == 0
