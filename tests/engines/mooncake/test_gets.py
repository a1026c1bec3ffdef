"""What was put is got in every form, and what is not there is told as Mooncake tells it."""

import os

from kvstore.engines.mooncake.store import MooncakeDistributedStore
from tests.engines.mooncake.memory import Room


def test_objects_go_to_addresses_and_parts(store: MooncakeDistributedStore) -> None:
    value = os.urandom(100_000)
    store.put_batch(["a", "b"], [value, b"small"])
    room, other = Room(100_000), Room(10)
    assert store.get_into("a", room.at, 100_000) == 100_000
    assert room.bytes() == value
    assert store.batch_get_into(["b", "nowhere", "a"], [other.at, other.at, other.at], [10, 10, 10]) == [5, -704, -600]
    assert other.bytes()[:5] == b"small"
    room.array.fill(0)
    parts = [[room.at, room.at + 3, room.at + 50_000], [other.at]]
    assert store.batch_get_into_multi_buffers(["a", "b"], parts, [[3, 49_997, 50_000], [4]]) == [100_000, -600]
    assert room.bytes() == value
    assert store.batch_get_into(["a"], [], []) == [-600]
    assert store.batch_get_into_multi_buffers(["a"], [], []) == [-600]
    assert store.batch_get_into_multi_buffers(["a"], [[0]], [[1]]) == [-600]


def test_a_buffer_is_the_callers_own(store: MooncakeDistributedStore) -> None:
    store.put("key", b"value")
    buffer, none = store.batch_get_buffer(["key", "nowhere"])
    assert none is None
    assert buffer is not None
    assert (bytes(buffer), buffer.size(), len(buffer)) == (b"value", 5, 5)
    room = Room(5)
    assert store.put_from("again", buffer.ptr(), 5) == 0
    assert (store.get_into("again", room.at, 5), room.bytes()) == (5, b"value")
    store.remove("key", force=True)
    assert bytes(buffer) == b"value"


def test_misses_are_empty_or_codes(store: MooncakeDistributedStore) -> None:
    assert (store.get("nowhere"), store.get_batch(["nowhere"]), store.get_buffer("nowhere")) == (b"", [b""], None)
    assert (store.get_size("nowhere"), store.is_exist("nowhere"), store.batch_is_exist([])) == (-704, 0, [])
    store.put("key", b"value")
    assert (store.get_size("key"), store.is_exist("key"), store.batch_is_exist(["key", "nowhere"])) == (5, 1, [1, 0])


def test_ranges_go_to_offsets_of_registered_buffers(store: MooncakeDistributedStore) -> None:
    store.put_batch(["a", "b"], [b"0123456789", b"abcdefghij"])
    one, two = Room(20, fill=ord("_")), Room(20, fill=ord("_"))
    for room in (one, two):
        store.register_buffer(room.at, 20)
    got = store.get_into_ranges(
        [one.at, two.at], [["a", "b"], ["b"]], [[[0, 10], [5]], [[18]]], [[[2, 0], [9]], [[8]]], [[[3, 2], [1]], [[2]]]
    )
    assert got == [[[3, 2], [1]], [[2]]]
    assert (one.bytes(), two.bytes()) == (b"234__j____01" + b"_" * 8, b"_" * 18 + b"ij")


def test_ranges_outside_are_refused_each_for_itself(store: MooncakeDistributedStore) -> None:
    store.put("a", b"0123456789")
    room, stranger = Room(10), Room(10)
    store.register_buffer(room.at, 10)
    got = store.get_into_ranges(
        [room.at, stranger.at],
        [["a", "nowhere", "a"], ["a"]],
        [[[0, 8, 0], [0], [0]], [[0]]],
        [[[8, 0, 0], [0], [0, 1]], [[0]]],
        [[[3, 3, 1], [1], [1]], [[1]]],
    )
    assert got == [[[-600, -600, 1], [-704], [-600, -600]], [[-600]]]
