"""Promises of one_put.py, against the message Put: the same bytes, and nothing is read that Put would refuse or mean otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, Put
from kvstore.protocol.one_put import ArrivedPut, OnePut, unpack_one_put

KEYS = st.binary(min_size=1, max_size=255)
U64 = st.integers(0, 2**64 - 1)
NAMESPACES = st.text(max_size=60)


def columns(
    *keys: bytes, namespace: str = "ns", size: int = 4, checksum: int = 5, parent: bytes = b"", generation: int = 0, ack: int = ACK_NODE
) -> bytes:
    many = len(keys)
    return Put(namespace, list(keys), [size] * many, [generation] * many, [checksum] * many, [parent] * many, ack).pack()


def test_one_that_waits_for_the_cluster_is_the_message_put_too() -> None:
    body = OnePut(b"ns", b"key", 4, 5, b"", ACK_CLUSTER).pack()
    assert body == columns(b"key", ack=ACK_CLUSTER)
    assert unpack_one_put(memoryview(body)) is None


@given(NAMESPACES, KEYS, U64, U64, st.binary(max_size=255))
def test_it_is_the_message_put_of_one_block(namespace: str, key: bytes, size: int, checksum: int, parent: bytes) -> None:
    body = OnePut(namespace.encode(), key, size, checksum, parent).pack()
    assert body == columns(key, namespace=namespace, size=size, checksum=checksum, parent=parent)
    assert unpack_one_put(memoryview(body)) == ArrivedPut(namespace, key, size, checksum, parent)
    assert OnePut.TYPE == Put.TYPE


@pytest.mark.parametrize(
    "body",
    [
        columns(),
        columns(b"a", b"b"),
        columns(b"a", b"longer"),
        columns(b"a", ack=ACK_CLUSTER),
        columns(b"a", generation=1),
        columns(b"a", namespace="x" * 256),
        columns(b"a") + b"x",
        columns(b"a").replace(b"ns", b"\xff\xff"),
        OnePut(b"", b"k" * 256, 1, 1, b"").pack(),
        OnePut(b"", b"", 1, 1, b"").pack(),
        OnePut(b"", b"k", 1, 1, b"p" * 256).pack(),
    ],
)
def test_what_is_anything_else_is_left_to_put(body: bytes) -> None:
    assert unpack_one_put(memoryview(body)) is None


def test_two_parents_are_none_of_one_block() -> None:
    body = bytearray(OnePut(b"", b"k", 1, 1, b"").pack())
    body[-6] = 2
    assert unpack_one_put(memoryview(body)) is None


def test_a_message_cut_anywhere_is_left_to_put() -> None:
    body = columns(b"some key", parent=b"parent")
    assert all(unpack_one_put(memoryview(body)[:size]) is None for size in range(len(body)))


@given(st.binary(max_size=120))
def test_no_bytes_disturb_it(body: bytes) -> None:
    found = unpack_one_put(memoryview(body))
    if found is not None:
        put = Put.unpack(body)
        assert (put.namespace, put.keys, list(put.sizes), put.ack) == (found.namespace, [found.key], [found.size_bytes], ACK_NODE)
