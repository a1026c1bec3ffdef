"""Promises of one_put.py: the bytes are those of the message Put, and what is no Put of one unreserved block is left to that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol import one_put as module
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, Put
from kvstore.protocol.one_put import OnePut, OnePutForm

U64 = st.integers(0, 2**64 - 1)
PUTS = st.builds(
    OnePut,
    st.sampled_from((ACK_CLUSTER, ACK_NODE)),
    st.text(max_size=20),
    st.binary(min_size=1, max_size=255),
    U64,
    U64,
    st.binary(max_size=255),
)


def as_message(put: OnePut, generation: int = 0) -> bytes:
    return Put(put.namespace, [put.key], [put.size_bytes], [generation], [put.checksum], [put.parent], put.ack).pack()


@given(PUTS)
def test_the_body_is_that_of_the_message_and_says_the_same(put: OnePut) -> None:
    form = OnePutForm()
    body = form.pack(*put)
    assert body == as_message(put)
    assert form.unpack(body) == form.unpack(memoryview(body)) == put


@pytest.mark.parametrize(
    "put",
    [
        OnePut(1, "n" * 256, b"key", 1, 1, b""),
        OnePut(1, "\ud800", b"key", 1, 1, b""),
        OnePut(1, "", b"", 1, 1, b""),
        OnePut(1, "", b"k" * 256, 1, 1, b""),
        OnePut(1, "", b"key", 1, 1, b"p" * 256),
    ],
)
def test_what_fits_into_no_field_is_left_to_the_message(put: OnePut) -> None:
    assert OnePutForm().pack(*put) is None


@given(PUTS, st.integers(0, 200), st.integers(0, 255))
def test_of_any_bytes_it_reads_what_the_message_reads_or_nothing(put: OnePut, at: int, byte: int) -> None:
    """One byte of a good body is another."""
    body = bytearray(as_message(put))
    body[at % len(body)] = byte
    found = OnePutForm().unpack(body)
    try:
        message = Put.unpack(body)
    except ProtocolError:
        assert found is None
        return
    if found is not None:
        assert as_message(found) == bytes(body)
        assert list(message.generations) == [0]
        assert message.keys == [found.key]


@given(st.binary(max_size=120))
def test_no_bytes_raise_anything(body: bytes) -> None:
    assert OnePutForm().unpack(body) is None or Put.unpack(body).keys


def test_several_blocks_and_reserved_ones_are_left_to_the_message() -> None:
    several = Put("ns", [b"a", b"b"], [1, 1], [0, 0], [1, 1], [b"", b""]).pack()
    assert OnePutForm().unpack(several) is None
    one = OnePut(1, "ns", b"key", 1, 1, b"")
    assert OnePutForm().unpack(as_message(one, generation=7)) is None
    assert OnePutForm().unpack(as_message(one)) == one
    assert OnePutForm().unpack(as_message(one)[:41]) is None
    no_text = bytearray(as_message(one))
    no_text[5] = 0xFF
    assert OnePutForm().unpack(no_text) is None
    two_parents = bytearray(as_message(one))
    two_parents[-6] = 2
    assert OnePutForm().unpack(two_parents) is None
    long_text = bytearray(as_message(one))
    long_text[2] = 1
    assert OnePutForm().unpack(long_text) is None
    no_key = bytearray(as_message(one))
    no_key[11:13] = b"\0\0"
    assert OnePutForm().unpack(no_key) is None


def test_peers_who_choose_ever_other_lengths_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LAYOUTS", 3)
    form = OnePutForm()
    for length in (1, 2, 3, 4, 1, 2):
        put = OnePut(1, "ns", b"k" * length, 1, 1, b"")
        assert form.unpack(as_message(put)) == put
        assert len(form._layouts) <= 3
