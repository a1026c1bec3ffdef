"""Promises of pins.py, held by a directory with nodes."""

from kvstore.protocol.catalog_messages import Hold
from tests.master.blocks import TENANT, die, one_node


def test_a_pin_holds_what_is_there_and_its_node_is_told_of_that_and_of_its_end() -> None:
    master, _ = one_node(b"a")
    for pinned in (True, False):
        pinning = master.directory.pins.pin(TENANT, [b"a", b"none"], pinned=pinned)
        assert (pinning.flags, pinning.commands.messages()) == (b"\1\0", [(1, Hold(1, TENANT, [b"a"], int(pinned)))])
        assert (len(pinning.ops), master.directory.counts().pinned) == (1, int(pinned))


def test_unpinning_lets_go_also_of_what_is_out_of_reach() -> None:
    master, node = one_node(b"a")
    master.commit(master.directory.pins.pin(TENANT, [b"a"], pinned=True).ops)
    die(master, node)
    pinning = master.directory.pins.pin(TENANT, [b"a", b"none"], pinned=False)
    master.commit(pinning.ops)
    assert (pinning.flags, pinning.commands.messages()) == (b"\0\0", [])
    assert not [key for key in master.catalog if key.startswith(b"p")]
