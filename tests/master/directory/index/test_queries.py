"""Tests of queries.py, asked of a directory with nodes."""

import pytest

from kvstore.master.directory.index.holders import ABSENT, CONFIRMED, HINTED
from kvstore.master.directory.index.key_index import SMALL_BATCH
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.protocol.catalog_messages import EVENT_REMOVED, PHASE_SYNC, PHASE_SYNC_BEGIN
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, die, one_node


def test_a_prefix_ends_at_its_first_gap() -> None:
    master, _ = one_node(b"a", b"b", b"d")
    assert master.directory.queries.match_prefix(TENANT, [b"a", b"b", b"c", b"d"]) == 2
    assert master.directory.queries.match_prefix(TENANT, [b"a", b"b"]) == 2
    assert master.directory.queries.match_prefix(TENANT, [b"c"]) == 0
    assert master.directory.queries.match_prefix(TENANT, []) == 0


def test_hinted_block_counts_as_confirmed_after_the_inventory() -> None:
    master, node = one_node(b"a", b"b")
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    master.publish(node, Event(b"b"), phase=PHASE_SYNC)
    for keys in ([b"a", b"b", b"c"], [b"a", b"b", b"c"] * SMALL_BATCH):
        assert master.directory.queries.presence(TENANT, keys) == bytes([HINTED, CONFIRMED, ABSENT]) * (len(keys) // 3)
        assert master.directory.queries.exists(TENANT, keys) == b"\1\1\0" * (len(keys) // 3)


def test_the_prefixes_are_those_of_each_node() -> None:
    master, node = one_node(b"a", b"b", b"d")
    other = master.register("b")
    master.sync(other, Event(b"a"))
    found = master.directory.queries.prefixes(TENANT, [b"a", b"b", b"c", b"d"])
    assert (found.blocks, found.block_bytes) == ({node.node_id: 2, other.node_id: 1}, 100)


def test_lookup_returns_metadata_and_zeros_for_a_miss() -> None:
    master, node = one_node()
    other = master.register("b")
    event = Event(b"a", 9, size=50, checksum=3, tiers=NVME)
    master.publish(node, event)
    master.publish(other, event, Event(b"dead"))
    die(master, other)
    found = master.directory.queries.lookup(TENANT, [b"none", b"a", b"dead"])
    assert found.replicas == b"\0\1\0"
    assert (list(found.sizes), list(found.checksums), list(found.generations)) == ([0, 50, 0], [0, 3, 0], [0, 9, 0])
    assert (list(found.nodes), found.tiers) == ([1], bytes([NVME]))


def test_blocks_outside_a_nodes_dram_are_listed_in_order() -> None:
    master, node = one_node()
    other = master.register("b")
    master.sync(node, Event(b"a", tiers=DRAM), Event(b"b", tiers=NVME), Event(b"c", tiers=DRAM | NVME))
    master.sync(other, Event(b"a", tiers=NVME), Event(b"b", tiers=DRAM))
    outside = master.directory.queries.outside_dram
    assert outside(TENANT, [b"c", b"b", b"absent", b"a"], node.node_id) == [b"b", b"absent"]
    assert outside(TENANT, [b"c", b"b", b"a"], other.node_id) == [b"c", b"a"]
    assert outside("other", [b"a"], node.node_id) == [b"a"]
    assert outside(TENANT, [], node.node_id) == []


def test_avoided_nodes_only_copies_are_misses() -> None:
    master, node = one_node(b"mine")
    other = master.register("b")
    master.publish(node, Event(b"both"))
    master.publish(other, Event(b"both"), Event(b"theirs"))
    found = master.directory.queries.lookup(TENANT, [b"mine", b"both", b"theirs"], avoid=1)
    assert found.replicas == b"\0\1\1"
    assert list(found.nodes) == [2, 2]
    assert (list(found.sizes), found.tiers) == ([0, 100, 100], bytes([DRAM, DRAM]))


@pytest.mark.promise("tenant-isolation")
def test_tenants_do_not_see_one_another() -> None:
    master, _ = one_node(b"a")
    assert master.exists(b"a", tenant="blue") == [0]
    assert master.directory.queries.lookup("blue", [b"a"]).replicas == b"\0"
    assert list(master.directory.queries.list_keys("blue")) == []
    assert list(master.directory.removing.plan("blue", [b"a"], force=True).flags) == [0]
    assert master.directory.pins.pin("blue", [b"a"], pinned=True).flags == b"\0"
    assert master.exists(b"a") == [1]


def test_list_keys_is_consistent_while_the_directory_changes() -> None:
    master, node = one_node()
    master.publish(node, *(Event(bytes([n]), namespace="even" if n % 2 == 0 else "odd") for n in range(10)), Event(b"x", tenant="blue"))
    slices = master.directory.queries.list_keys(TENANT, "even", slice_rows=3)
    first = next(slices)
    master.publish(node, Event(b"\0", 1, EVENT_REMOVED), Event(b"\x08", 1, EVENT_REMOVED))
    rest = [entry for listed in slices for entry in listed]
    assert first == [(b"\0", 100, "even")]
    assert [key for key, _size, _namespace in rest] == [b"\x02", b"\x04", b"\x06"]
    assert len([entry for listed in master.directory.queries.list_keys(TENANT) for entry in listed]) == 8


def test_a_listing_ends_when_its_tenant_does() -> None:
    master, node = one_node(b"a", b"b")
    slices = master.directory.queries.list_keys(TENANT, slice_rows=2)
    next(slices)
    master.publish(node, Event(b"a", 1, EVENT_REMOVED), Event(b"b", 1, EVENT_REMOVED))
    master.directory.run_due(0)
    assert list(slices) == []


def test_held_keys_match_at_live_and_dead_nodes() -> None:
    master = Master()
    a, b = master.register("a"), master.register("b")
    master.sync(a, Event(b"chat-1"), Event(b"chat-2", namespace="other"), Event(b"x"), Event(b"chat-9", tenant="blue"))
    master.sync(b, Event(b"chat-\xc3\xa9", parent=b"gone"), Event(b"chat-\xff"))
    die(master, b)

    def held(namespace: str | None, pattern: str, slice_rows: int = 2) -> list[bytes]:
        return sorted(key for part in master.directory.queries.held_keys(TENANT, namespace, pattern, slice_rows=slice_rows) for key in part)

    assert held(None, "*") == [b"chat-1", b"chat-2", b"chat-\xc3\xa9", b"chat-\xff", b"x"]
    assert held(None, "chat-?") == [b"chat-1", b"chat-2", b"chat-\xff"]
    assert held("ns", "chat-[!9]") == [b"chat-1", b"chat-\xff"]
    assert held(None, "chat-\xe9") == [b"chat-\xc3\xa9"]
    assert held("other", "*") == [b"chat-2"]
    assert held(None, "chat") == held("nowhere", "*") == []
    assert list(master.directory.queries.held_keys("nobody", None, "*", slice_rows=2)) == []


def test_many_keys_are_told_of_as_few_are() -> None:
    keys = [b"key %d" % number for number in range(2 * SMALL_BATCH)]
    master, _ = one_node(*keys[::2])
    assert master.directory.queries.exists(TENANT, keys) == bytes([1, 0] * SMALL_BATCH)
    assert master.directory.queries.exists("blue", keys) == bytes(2 * SMALL_BATCH)


def test_rows_of_returns_rows_in_order_and_no_row_for_misses() -> None:
    master, _node = one_node(b"a", b"b")
    rows = master.directory.queries.rows_of(TENANT, [b"b", b"none", b"a"])
    assert list(map(master.directory.columns()[0].keys.__getitem__, (rows[0], rows[2]))) == [b"b", b"a"]
    assert rows[1] == NO_ROW
