"""Tests of record_policy.py: which blocks have a record under which setting, and that none of a former setting is left behind."""

import pytest

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.key_index import SMALL_BATCH
from kvstore.master.directory.writes.record_policy import ALL, MEMBERSHIP, OUTLIVING
from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED, CopyResult
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, die, publish

KEYS = [b"%03d" % number for number in range(2 * SMALL_BATCH)]


def recorded(master: Master) -> list[bytes]:
    assert master.directory.record_policy.count() == sum(isinstance(record, BlockPuts) for record in master.catalog.values())
    return sorted(record.keys[0] for record in master.catalog.values() if isinstance(record, BlockPuts))


def pin(master: Master, *keys: bytes, pinned: bool = True) -> None:
    master.commit(master.directory.pins.pin(TENANT, keys, pinned=pinned).ops)


@pytest.mark.parametrize("count", [1, len(KEYS)])
@pytest.mark.parametrize(
    ("choice", "tiers", "is_recorded"), [(ALL, DRAM, 1), (OUTLIVING, DRAM, 0), (OUTLIVING, NVME, 1), (MEMBERSHIP, NVME, 0)]
)
def test_what_is_put_has_a_record_as_the_setting_says(choice: str, tiers: int, is_recorded: int, count: int) -> None:
    master = Master(recorded=choice)
    node = master.register("a")
    master.publish(node, *(Event(key, 5, tiers=tiers) for key in KEYS[:count]))
    assert master.exists(*KEYS[:count]) == [1] * count
    assert recorded(master) == KEYS[: count * is_recorded]
    master.publish(node, *(Event(key, 5, EVENT_REMOVED) for key in KEYS[:count]))
    assert master.exists(*KEYS[:count]) == [0] * count
    assert not recorded(master)


@pytest.mark.promise("records-durable")
def test_block_gains_and_loses_its_record_with_its_tier() -> None:
    master = Master(recorded=OUTLIVING)
    node = master.register("a")
    master.publish(node, Event(b"k", 5))
    master.publish(node, Event(b"k", 5, EVENT_MOVED, tiers=DRAM | NVME))
    assert (recorded(master), master.block(b"k").generations) == ([b"k"], [5])
    master.publish(node, Event(b"k", 5, EVENT_MOVED, tiers=DRAM))
    assert not recorded(master)


def test_a_pinned_block_has_a_record_for_as_long_as_it_is_pinned() -> None:
    master = Master(recorded=OUTLIVING)
    node = master.register("a")
    master.publish(node, Event(b"k"), Event(b"other"))
    pin(master, b"k")
    assert recorded(master) == [b"k"]
    master.commit(master.directory.pins.pin_for(TENANT, [b"other"], ttl_ns=10, now_ns=0).ops)
    assert recorded(master) == [b"k", b"other"]
    master.commit(master.directory.pins.expire(11).ops)
    pin(master, b"k", pinned=False)
    assert not recorded(master)


def test_replicated_block_has_a_record_of_both_holders() -> None:
    master = Master(recorded=OUTLIVING)
    first, second = master.register("a"), master.register("b")
    master.publish(first, Event(b"k", 5))
    master.directory.replication.plan(TENANT, [b"k"], node_id=2, source_node_id=1, now_ns=0)
    master.commit(master.directory.replication.enter(2, CopyResult(second.epoch, TENANT, [b"k"], [5], b"\1")).ops)
    assert (recorded(master), master.block(b"k").holders) == ([b"k"], [(1, 2)])
    master.publish(first, Event(b"k", 5, EVENT_REMOVED))
    assert (recorded(master), master.exists(b"k")) == ([], [1])


def test_a_newer_version_takes_the_record_of_the_older_one_along() -> None:
    master = Master(recorded=OUTLIVING)
    node = master.register("a")
    master.publish(node, Event(b"k", 5, tiers=NVME))
    master.publish(node, Event(b"k", 6, checksum=8))
    assert (recorded(master), master.exists(b"k")) == ([], [1])
    master.publish(node, Event(b"k", 7, checksum=9, tiers=NVME))
    assert master.block(b"k").generations == [7]


def test_what_only_forgotten_nodes_had_has_no_record() -> None:
    master = Master(recorded=OUTLIVING)
    node = master.register("a")
    master.publish(node, Event(b"k", tiers=NVME), Event(b"dram"))
    die(master, node)
    master.forget("a")
    master.delete_unheld()
    assert not recorded(master)


@pytest.mark.parametrize("choice", [OUTLIVING, MEMBERSHIP])
def test_records_of_a_former_setting_are_deleted(choice: str) -> None:
    former = Master()
    events = [Event(b"dram", 5), Event(b"nvme", 5, tiers=NVME)]
    former.publish(former.register("a"), *events)
    master = Master(2, former.catalog, recorded=choice)
    assert recorded(master) == [b"dram", b"nvme"]
    master.sync(master.register("a"), *events)
    assert recorded(master) == ([b"nvme"] if choice == OUTLIVING else [])
    again = master.restart()
    assert again.exists(b"dram", b"nvme") == [0, 0], "no node is there"
    again.sync(again.register("a"), *events)
    assert again.exists(b"dram", b"nvme") == [1, 1]


def test_unrecorded_block_and_its_pin_return_by_inventory() -> None:
    master = Master(recorded=MEMBERSHIP)
    node = master.register("a")
    master.publish(node, Event(b"k", 5))
    pin(master, b"k")
    master = master.restart()
    node = master.register("a")
    assert master.exists(b"k") == [0]
    commands = master.sync(node, Event(b"k", 5))
    assert master.exists(b"k") == [1]
    assert [(node_id, command.keys) for node_id, command in commands] == [(1, [b"k"])] * len(commands)
    assert commands


def test_where_all_have_records_one_names_what_is_in_flight_too() -> None:
    master = Master()
    first, second = master.register("a"), master.register("b")
    plans = [master.directory.plan_publish(node.node_id, publish(node.epoch, [Event(b"k", 5)])) for node in (first, first, second)]
    for plan in plans:
        master.commit(plan.ops)
    assert master.block(b"k").holders == [(1, 2)]
    master.commit(master.directory.plan_publish(1, publish(first.epoch, [Event(b"k", 6, checksum=8)])).ops)
    assert (master.block(b"k").holders, master.block(b"k").generations) == ([(1,)], [6])
