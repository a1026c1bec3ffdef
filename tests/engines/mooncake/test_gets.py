"""Gets of objects in every form, and Mooncake's own results for missing objects."""

import os

import numpy as np
import pytest

from kvstore.engines.mooncake.store import MooncakeDistributedStore
from kvstore.testing.transfer.awaited import eventually
from tests.engines.mooncake.conftest import Opened
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
    assert got == [[[-600, -600, 1], [-704], [-600]], [[-600]]]


def test_ranges_go_to_any_address_of_a_buffer(store: MooncakeDistributedStore) -> None:
    store.put("a", b"0123456789")
    room = Room(20)
    store.register_buffer(room.at, 20)
    assert store.get_into_ranges([room.at + 5], [["a"]], [[[2]]], [[[1]]], [[[4]]]) == [[[4]]]
    assert room.bytes() == bytes(7) + b"1234" + bytes(9)
    assert store.get_into_ranges([room.at + 15], [["a", "a"]], [[[0], [0]]], [[[0], [0]]], [[[6], [0]]]) == [[[-600], [0]]]


def test_range_lists_of_unequal_length_are_refused(store: MooncakeDistributedStore) -> None:
    store.put("a", b"0123456789")
    room = Room(20)
    store.register_buffer(room.at, 20)
    assert store.get_into_ranges([room.at] * 2, [["a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]], [[-600]]]
    assert store.get_into_ranges([room.at], [["a", "a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600], [-600]]]


def test_numpy_integers_are_pointers_and_sizes(store: MooncakeDistributedStore) -> None:
    room = Room.of(b"0123456789")
    pointers, sizes = np.array([room.at, room.at + 5]), np.array([5, 5], np.uint32)
    assert store.batch_put_from(["a", "b"], pointers, sizes) == [0, 0]  # type: ignore[arg-type]
    assert store.get_into("b", np.uint64(room.at), np.int16(10)) == 5  # type: ignore[arg-type]
    assert room.bytes() == b"5678956789"


def test_what_was_found_has_a_lease_for_as_long_as_it_is_set(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MOONCAKE_LEASE_S", "0.5")
    store = opened()
    store.put_batch(["a", "b", "c"], [b"1", b"2", b"3"])
    assert (store.is_exist("a"), store.is_exist("nowhere"), store.batch_is_exist(["b", "nowhere"])) == (1, 0, [1, 0])
    assert (store.batch_remove(["a", "b", "c"]), store.remove_all()) == ([-706, -706, 0], 0)
    for key in "ab":
        eventually(lambda key=key: store.remove(key) == 0, "the lease to end")  # type: ignore[misc]
    store.put("a", b"1")
    assert (store.is_exist("a"), store.remove("a", force=True)) == (1, 0)


def test_without_a_lease_what_was_found_can_be_removed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MOONCAKE_LEASE_S", "0")
    store = opened()
    store.put("a", b"1")
    assert (store.is_exist("a"), store.remove("a")) == (1, 0)


def test_found_object_survives_a_full_store(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MOONCAKE_LEASE_S", "60")
    store = opened()
    found = [f"found {number}" for number in range(8)]
    fillers = [[f"filler {number} {part}" for part in range(4)] for number in range(64)]
    store.put_batch(found, [bytes([1]) * (512 << 10)] * 8)
    assert store.batch_is_exist(found) == [1] * 8
    for keys in fillers:
        store.put_batch(keys, [bytes(512 << 10)] * 4)
    assert store.batch_is_exist(found) == [1] * 8
    assert sum(sum(store.batch_is_exist(keys)) for keys in fillers) < 128, "twice as much was put as there is memory"
