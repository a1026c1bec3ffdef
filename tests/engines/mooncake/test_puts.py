"""Puts of objects in every form: each object is stored, once."""

import os
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.engines.mooncake.arguments import ReplicateConfig, SoftPinAction
from kvstore.engines.mooncake.store import MooncakeDistributedStore
from kvstore.protocol.retention import Retention
from tests.client.processes import Cluster
from tests.engines.mooncake.memory import Room


def test_objects_come_from_buffers_parts_and_addresses(store: MooncakeDistributedStore) -> None:
    value = os.urandom(100_000)
    room, head = Room.of(value), Room.of(b"head")
    assert store.put("buffer", bytearray(value)) == 0
    assert store.put_parts("parts", value[:7], b"", value[7:]) == 0
    assert store.put_from("address", room.at, len(value)) == 0
    assert store.put_from_with_metadata("metadata", room.at, head.at, len(value), 4) == 0
    assert store.put_batch(["one", "two"], [value, b"2"]) == 0
    assert store.batch_put_from(["a", "b"], [room.at, room.at + 10], [10, 20]) == [0, 0]
    assert store.batch_put_from_multi_buffers(["c", "d"], [[room.at, head.at], [head.at]], [[3, 4], [2]]) == [0, 0]
    assert store.get_batch(["buffer", "parts", "address", "one"]) == [value] * 4
    assert store.get_batch(["metadata", "two", "a", "b"]) == [b"head" + value, b"2", value[:10], value[10:30]]
    assert store.get_batch(["c", "d"]) == [value[:3] + b"head", b"he"]


def test_what_is_there_stays_and_is_a_success(store: MooncakeDistributedStore) -> None:
    assert (store.put("key", b"first"), store.put("key", b"second")) == (0, 0)
    assert store.get("key") == b"first"


def test_upserts_replace_whoever_holds_it(store: MooncakeDistributedStore) -> None:
    room, config = Room.of(b"from address"), ReplicateConfig()
    config.with_hard_pin = True
    assert store.put("key", b"first", config) == 0
    assert store.remove("key") == -706
    for upsert, value in (
        (partial(store.upsert, "key", b"second"), b"second"),
        (partial(store.upsert_parts, "key", b"th", b"ird"), b"third"),
        (partial(store.upsert_from, "key", room.at, 4), b"from"),
        (partial(store.upsert_batch, ["key", "new"], [b"fourth", b"new"]), b"fourth"),
        (partial(store.upsert, "key", b"pinned", config), b"pinned"),
    ):
        assert upsert() == 0
        assert store.get("key") == value
    assert store.remove("key") == -706
    assert store.remove("key", force=True) == 0


def test_one_bad_key_of_a_batch_is_not_the_others(store: MooncakeDistributedStore) -> None:
    room = Room.of(b"value")
    assert store.batch_put_from(["a", "b", "c"], [room.at, 0, room.at], [5, 5, 0]) == [0, -600, -600]
    assert store.batch_put_from_multi_buffers(["d", "e"], [[room.at], [room.at, room.at]], [[5], [5]]) == [-600, -600]
    assert store.get_batch(["a", "d"]) == [b"value", b""]


def test_lists_that_do_not_match_are_refused(store: MooncakeDistributedStore) -> None:
    room, config = Room(1), ReplicateConfig()
    assert store.batch_put_from(["a", "b"], [room.at], [1]) == [-600] * 2
    assert store.batch_upsert_from(["a", "b"], [room.at], [1]) == [-600] * 2
    assert store.batch_put_from_multi_buffers(["a"], [], []) == [-600]
    assert store.put_batch(["a", "b"], [b"1"]) == -600
    assert store.upsert_batch(["a", "b"], [b"1"]) == -600
    config.group_ids = ["g"]
    assert store.batch_put_from(["a", "b"], [room.at] * 2, [1, 1], config) == [-600] * 2
    assert store.batch_put_from([], [], []) == []


def test_soft_pin_without_enable_cannot_have_a_ttl(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig()
    config.soft_pin_ttl_ms = 1000
    assert (store.put("key", b"value", config), store.upsert("key", b"value", config)) == (-600, -600)
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("key", b"value", config) == 0
    assert store.remove("key") == 0


class HintClient(Client):
    """Client that records the hints of its calls."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.hints: list[tuple[list[bytes], Retention | None]] = []

    def put_batch_from(self, keys: Any, values: Any, **more: Any) -> Any:
        self.hints.append((list(keys), more["retention"]))
        return super().put_batch_from(keys, values, **more)

    def retain(self, keys: Any, retention: Retention, **more: Any) -> int:
        self.hints.append((list(keys), retention))
        return super().retain(keys, retention, **more)


def test_soft_pins_are_hints_of_puts_and_upserts(
    running: Cluster, store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, room = ReplicateConfig(), Room.of(b"value")
    config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.ENABLE, 60_000
    hint = Retention(90, 60.0)
    with closing(HintClient(running.address)) as client:
        monkeypatch.setattr(store, "_client", client)
        assert (store.put("put", b"value", config), store.upsert("put", b"other", config)) == (0, 0)
        assert (store.batch_put_from(["a", "b"], [room.at] * 2, [5, 5]), store.upsert("a", b"again")) == ([0, 0], 0)
        monkeypatch.undo()
    assert client.hints == [([b"put"], hint), ([b"put"], hint), ([b"a", b"b"], None)]
    assert store.get_batch(["put", "a"]) == [b"other", b"again"]


def test_without_a_local_buffer_only_addresses_are_put(running: Cluster) -> None:
    store, room = MooncakeDistributedStore(), Room.of(b"value")
    assert store.setup("me", "", 0, 0, "tcp", "", running.address) == 0
    assert (store.put("key", b"value"), store.is_exist("key")) == (-600, 0)
    assert (store.put_from("key", room.at, 5), store.is_exist("key")) == (0, 1)
    store.remove_all(force=True)
    store.close()


def test_a_value_that_fits_nowhere_is_a_code(store: MooncakeDistributedStore) -> None:
    room = Room(100 << 20)
    assert store.put_from("huge", room.at, 100 << 20) in (-200, -600)
    assert store.is_exist("huge") == 0


def test_nothing_is_stored_of_nothing(store: MooncakeDistributedStore) -> None:
    room = Room(1)
    assert (store.put_parts("a", b""), store.upsert_parts("a"), store.put_from("a", room.at, 0), store.upsert_from("a", room.at, 0)) == (
        0,
        0,
        0,
        0,
    )
    assert (store.put_from_with_metadata("a", room.at, room.at, 0, 0), store.put("a", b""), store.upsert("a", b"")) == (0, -600, -600)
    assert store.is_exist("a") == 0


def test_bad_key_of_an_upsert_is_not_the_others(store: MooncakeDistributedStore) -> None:
    room = Room.of(b"value")
    assert store.batch_upsert_from(["a", "b", "", "c"], [room.at] * 4, [5, 0, 5, 2**63]) == [0, -600, -600, -600]
    assert store.batch_put_from(["d", ""], [room.at] * 2, [5, 5]) == [0, -600]
    assert store.batch_upsert_from(["a", "a"], [room.at, room.at], [2, 3]) == [0, 0]
    assert store.get_batch(["a", "d"]) == [b"va", b"value"]


def test_values_are_buffers(store: MooncakeDistributedStore) -> None:
    for value in ("text", None, 5):
        for call in (store.put, store.upsert, store.put_parts):
            with pytest.raises(TypeError):
                call("key", value)
