"""Tests of pins.py, held by a directory with nodes."""

import random

import pytest

from kvstore.master.directory.limits.pins import MAX_ENDED, SPARE_ENDS, PinResult
from kvstore.protocol.catalog_messages import EVENT_REMOVED, SetPinned
from kvstore.protocol.errors import QuotaExceeded
from kvstore.security.quotas.quota import Quota
from tests.master.blocks import TENANT, Event, Master, S, die, one_node


def pin_for(master: Master, *keys: bytes, ttl_s: float) -> PinResult:
    pin_result = master.directory.pins.pin_for(TENANT, keys, ttl_ns=int(ttl_s * S), now_ns=master.now_ns)
    master.commit(pin_result.ops)
    master.directory.check_integrity()
    return pin_result


def after(master: Master, seconds: float) -> PinResult:
    """Pins that end by then."""
    master.now_ns += int(seconds * S)
    ended = master.directory.pins.expire(master.now_ns)
    master.commit(ended.ops)
    master.directory.check_integrity()
    return ended


def pins_of(master: Master) -> list[bytes]:
    """In the catalog."""
    return sorted(key[5:] for key in master.catalog if key.startswith(b"p"))


def test_pin_is_sent_to_nodes_and_ends() -> None:
    master, _ = one_node(b"a")
    for pinned in (True, False):
        pin_result = master.directory.pins.pin(TENANT, [b"a", b"none"], pinned=pinned)
        assert (pin_result.flags, pin_result.commands.messages()) == (b"\1\0", [(1, SetPinned(1, TENANT, [b"a"], int(pinned)))])
        assert (len(pin_result.ops), master.directory.counts().pinned) == (1, int(pinned))


def test_block_evicted_during_its_pin_is_reported_absent() -> None:
    keys = [b"a", b"b", b"c", b"d", b"none"]
    master, node = one_node(*keys[:4])
    pin_result = master.directory.pins.pin(TENANT, keys, pinned=True)
    master.publish(node, Event(b"a", kind=EVENT_REMOVED))

    def held(*answers: bytes | None) -> bytes:
        return master.directory.pins.held(TENANT, keys, pin_result, [(keys[:4], flags) for flags in answers])

    assert pin_result.flags == b"\1\1\1\1\0"
    assert held(b"\0\0\1\1") == b"\0\0\1\1\0", "of b the node's event has yet to come"
    assert held(b"\0\0\1\1", b"\0\1\0\1") == b"\0\1\1\1\0", "another node has it"
    assert held(None) == b"\0\1\1\1\0", "it hears of the pins when it registers"
    assert held() == b"\0\1\1\1\0", "they were pinned for longer"


def test_unpinning_lets_go_also_of_what_is_out_of_reach() -> None:
    master, node = one_node(b"a")
    master.commit(master.directory.pins.pin(TENANT, [b"a"], pinned=True).ops)
    die(master, node)
    pin_result = master.directory.pins.pin(TENANT, [b"a", b"none"], pinned=False)
    master.commit(pin_result.ops)
    assert (pin_result.flags, pin_result.commands.messages()) == (b"\0\0", [])
    assert not [key for key in master.catalog if key.startswith(b"p")]


def test_a_pin_with_a_time_ends_by_itself_and_its_node_is_told() -> None:
    master, _ = one_node(b"a", b"b")
    pin_result = pin_for(master, b"a", b"none", ttl_s=5)
    assert (pin_result.flags, pin_result.commands.messages()) == (b"\1\0", [(1, SetPinned(1, TENANT, [b"a"], 1))])
    pin_for(master, b"b", ttl_s=6)
    assert pins_of(master) == [b"a", b"b"]
    assert after(master, 4.999).commands.messages() == []
    assert after(master, 0.001).commands.messages() == [(1, SetPinned(1, TENANT, [b"a"], 0))]
    assert after(master, 1).commands.messages() == [(1, SetPinned(1, TENANT, [b"b"], 0))]
    assert pins_of(master) == []
    assert master.directory.counts().pinned == 0


def test_a_pin_is_never_shortened() -> None:
    master, _ = one_node(b"good", b"long", b"longer")
    master.commit(master.directory.pins.pin(TENANT, [b"good"], pinned=True).ops)
    pin_for(master, b"long", b"longer", ttl_s=10)
    again = pin_for(master, b"good", b"long", ttl_s=5)
    assert (again.flags, again.ops) == (b"\1\1", [])
    pin_for(master, b"longer", ttl_s=20)
    after(master, 10)
    assert pins_of(master) == [b"good", b"longer"]
    after(master, 10)
    assert pins_of(master) == [b"good"]


def test_permanent_pin_replaces_one_with_an_end() -> None:
    master, _ = one_node(b"a", b"b")
    pin_for(master, b"a", b"b", ttl_s=1)
    master.commit(master.directory.pins.pin(TENANT, [b"a"], pinned=True).ops)
    master.commit(master.directory.pins.pin(TENANT, [b"b"], pinned=False).ops)
    assert after(master, 1).ops == []
    assert pins_of(master) == [b"a"]


def test_an_end_outlives_the_master() -> None:
    master, _ = one_node(b"a", b"b", b"c")
    pin_for(master, b"a", ttl_s=1)
    pin_for(master, b"b", ttl_s=100)
    master.commit(master.directory.pins.pin(TENANT, [b"c"], pinned=True).ops)
    again = Master(2, master.catalog, wall_ns=1000 + 50 * S, now_ns=7 * S)
    after(again, 0)
    assert pins_of(again) == [b"b", b"c"]
    again.sync(again.register("a"), Event(b"a"), Event(b"b"), Event(b"c"))
    after(again, 1000)
    assert pins_of(again) == [b"c"]


def test_pin_of_a_removed_block_does_not_end_twice() -> None:
    master, _ = one_node(b"a")
    pin_for(master, b"a", ttl_s=1)
    assert master.remove(b"a", force=True) == [1]
    assert after(master, 1).ops == []


def test_pins_made_again_and_again_take_no_more_memory() -> None:
    master, _ = one_node(*(b"%d" % i for i in range(10)))
    for step in range(2 * SPARE_ENDS):
        master.directory.pins.pin_for(TENANT, [b"%d" % (step % 10)], ttl_ns=step + 1, now_ns=0)
    assert len(master.directory.pins._ends) <= SPARE_ENDS + 20
    assert len(after(master, 1).ops) == 10


def test_so_many_pins_end_at_a_time() -> None:
    keys = [b"%d" % i for i in range(MAX_ENDED + 10)]
    master, _ = one_node(*keys)
    random.Random(1).shuffle(keys)
    pin_for(master, *keys, ttl_s=1)
    assert [len(after(master, 1).ops), len(after(master, 0).ops), len(after(master, 0).ops)] == [MAX_ENDED, 10, 0]


def test_pins_over_quota_are_refused_as_a_whole() -> None:
    master = Master(quota=Quota(pins=2))
    master.sync(master.register("a"), *(Event(key) for key in (b"a", b"b", b"c")))
    pins = master.directory.pins
    master.commit(pins.pin(TENANT, [b"a", b"a", b"none", b"b"], pinned=True).ops)
    refused = r"tenant '.*' has 2 blocks pinned; 1 more exceed its quota of 2 \(pins\)"
    with pytest.raises(QuotaExceeded, match=refused):
        pins.pin(TENANT, [b"a", b"c"], pinned=True)
    with pytest.raises(QuotaExceeded, match=refused):
        pins.pin_for(TENANT, [b"c"], ttl_ns=S, now_ns=0)
    assert pins_of(master) == [b"a", b"b"]
    master.commit(pins.pin(TENANT, [b"a", b"b"], pinned=True).ops)
    master.commit(pins.pin(TENANT, [b"b"], pinned=False).ops)
    assert pin_for(master, b"c", ttl_s=1).flags == b"\1"
