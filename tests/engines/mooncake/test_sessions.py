"""Objects that are read and written a few ranges at a time.

Leases of Mooncake's API: one hold for what is found at about the same time, and what get sessions hold until their end.
"""

import pytest

from kvstore.client.holds import new_hold
from kvstore.engines.mooncake import sessions as module
from kvstore.engines.mooncake.arguments import ReplicateConfig
from kvstore.engines.mooncake.link import WINDOWS, LookupLease
from kvstore.engines.mooncake.sessions import RENEW_NS, GetSessions
from kvstore.engines.mooncake.store import MooncakeDistributedStore
from kvstore.testing.transfer.awaited import eventually
from tests.engines.mooncake.memory import Room


def test_a_get_session_reads_ranges_of_what_was_there(store: MooncakeDistributedStore) -> None:
    store.put_batch(["a", "b"], [b"0123456789", b"abcdefghij"])
    room = Room(10)
    assert store.batch_get_session_start(["a", "nowhere"]) == [0, -704]
    got = store.batch_get_into_multi_buffer_ranges(
        ["a", "b", "nowhere"], [[room.at, room.at + 5], [room.at], [room.at]], [[2, 3], [1], [1]], [[8, 0], [0], [0]]
    )
    assert got == [5, -600, -600]
    assert room.bytes()[:8] == b"89\0\0\x00012"
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[room.at]], [[2]], [[9]]) == [-600]
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[room.at]], [[2]], [[]]) == [-600]
    assert store.batch_get_into_multi_buffer_ranges(["a"], [], [], []) == [-600]
    store.remove("a", force=True)
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[room.at]], [[2]], [[0]]) == [-704]
    assert store.batch_get_session_end(["a"]) == 0
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[room.at]], [[2]], [[0]]) == [-600]


def test_what_a_get_session_reads_stays_until_its_end(store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_NS", 0)
    store.put_batch(["a", "b"], [b"0123456789", b"abcdefghij"])
    assert store.batch_get_session_start(["a", "nowhere"]) == [0, -704]
    assert store.batch_get_session_start(["b"]) == [0]
    assert store.batch_get_session_start(["a"]) == [0]
    assert store.batch_get_session_start(["nowhere"]) == [-704]
    room = Room(10)
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[room.at]], [[2]], [[8]]) == [2]
    assert store.batch_remove(["a", "b"]) == [-706, -706]
    assert store.batch_get_session_end(["a"]) == 0
    eventually(lambda: store.remove("a") == 0, "the node to know that the session is over")
    assert store.remove("b") == -706
    assert store.batch_get_session_end(["b", "nowhere"]) == 0
    eventually(lambda: store.remove("b") == 0, "the node to know that the other one is over, too")


def test_a_put_session_stores_the_whole_at_its_end(store: MooncakeDistributedStore) -> None:
    room, config = Room.of(b"0123456789"), ReplicateConfig()
    config.group_ids = ["g", "h"]
    assert store.batch_put_session_start(["a", "b"], [6, 2], config) == [0, 0]
    assert store.batch_put_session_start(["a", "c"], [6, 0]) == [-600, -600]
    assert store.batch_put_from_multi_buffer_ranges(["a", "b"], [[room.at + 4, room.at], [room.at]], [[3, 3], [2]], [[3, 0], [0]]) == [6, 2]
    assert store.batch_is_exist(["a", "b"]) == [0, 0]
    assert store.batch_put_session_end(["a", "nowhere"]) == [0, -600]
    assert store.batch_put_session_revoke(["b", "b"]) == [0, -600]
    assert store.get_batch(["a", "b"]) == [b"012456", b""]


def test_ranges_outside_a_put_session_write_nothing(store: MooncakeDistributedStore) -> None:
    room = Room.of(b"0123456789")
    store.batch_put_session_start(["a"], [4])
    for pointers, sizes, offsets in (([room.at], [2], [3]), ([room.at] * 2, [2, 2], [0, 3]), ([0], [1], [0]), ([room.at], [1], [])):
        assert store.batch_put_from_multi_buffer_ranges(["a"], [pointers], [sizes], [offsets]) == [-600]
    assert store.batch_put_from_multi_buffer_ranges(["nowhere"], [[room.at]], [[1]], [[0]]) == [-600]
    assert store.batch_put_from_multi_buffer_ranges(["a"], [], [], []) == [-600]
    assert store.batch_put_session_end(["a"]) == [0]
    assert store.get("a") == bytes(4)
    assert store.batch_put_session_start(["x"], []) == [-600]


def test_sessions_end_with_the_store(store: MooncakeDistributedStore) -> None:
    store.batch_put_session_start(["a"], [4])
    store.close()
    assert store.batch_put_session_end(["a"]) == [-600]
    assert store.batch_put_session_start(["a"], [4]) == [-600]


S = 10**9


def test_lookups_of_a_part_of_the_lease_share_a_hold() -> None:
    lease = LookupLease(WINDOWS)
    first = lease.hold(5 * S)
    assert first is not None
    assert first.duration_ms == WINDOWS * 1000
    assert lease.hold(6 * S - 1) is first
    second = lease.hold(6 * S)
    assert second is not None
    assert second.number != first.number


def test_sessions_that_last_are_held_on() -> None:
    sessions, first, second = GetSessions(), new_hold(1), new_hold(1)
    sessions.begin(first, ["b", "a"], 0)
    sessions.begin(second, ["c"], 1)
    assert sessions.due(["a", "b", "c", "x"], RENEW_NS - 1) == []
    assert sessions.due(["a", "b", "c", "x"], RENEW_NS) == [(first, ["a", "b"])]
    assert sessions.due(["a", "c"], RENEW_NS + 1) == [(second, ["c"])]
    assert sessions.due(["a"], 2 * RENEW_NS) == [(first, ["a", "b"])]
