"""Promises of commands.py."""

from kvstore.master.directory.commands import Commands
from kvstore.master.directory.tenants import Tenants
from kvstore.protocol.catalog_messages import Drop, Hold


def test_orders_to_one_node_and_tenant_are_one_message_with_the_masters_epoch() -> None:
    tenants, commands = Tenants(), Commands(9)
    red, blue = tenants.of("red"), tenants.of("blue")
    commands.drop(1, red, b"a", 5)
    commands.drop(1, red, b"b", 6)
    commands.drop(1, red, b"c", 8, force=True)
    commands.drop(1, blue, b"a", 7)
    commands.hold(2, red, b"c", pinned=True)
    commands.hold(2, red, b"d", pinned=False)
    assert commands.messages() == [
        (1, Drop(9, "red", [b"a", b"b"], [5, 6])),
        (1, Drop(9, "red", [b"c"], [8], force=1)),
        (1, Drop(9, "blue", [b"a"], [7])),
        (2, Hold(9, "red", [b"c"], 1)),
        (2, Hold(9, "red", [b"d"], 0)),
    ]
