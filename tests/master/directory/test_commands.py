"""Promises of commands.py."""

from kvstore.master.directory.commands import Commands
from kvstore.master.directory.tenants import Tenants
from kvstore.protocol.catalog_messages import Drop, Hold
from kvstore.protocol.frames import MAX_BATCH


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


def test_no_message_has_more_keys_than_a_node_takes_at_once() -> None:
    commands, red = Commands(9), Tenants().of("red")
    keys = [b"%d" % number for number in range(MAX_BATCH + 1)]
    for number, key in enumerate(keys):
        commands.drop(1, red, key, number)
        commands.hold(1, red, key, pinned=True)
    messages = [type(message).unpack(message.pack()) for _node_id, message in commands.messages()]  # as a node does
    assert [(type(message), len(message.keys)) for message in messages] == [(Drop, MAX_BATCH), (Drop, 1), (Hold, MAX_BATCH), (Hold, 1)]
    assert [key for message in messages for key in message.keys] == 2 * keys
    assert isinstance(messages[1], Drop)
    assert list(messages[1].generations) == [MAX_BATCH]
