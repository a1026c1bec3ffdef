"""Nodes that are stopped in peace, with real processes: what they hold is found afterwards, and puts go on meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import Address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.store.served import Client as Writer
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, until

BLOCK_BYTES = 64 << 10
KEYS = [b"block-%d" % number for number in range(100)]
VALUES = [value_of(key, 0, BLOCK_BYTES) for key in KEYS]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path) as started:
        started.start_master()
        yield started


def test_after_sigterm_and_a_start_every_acknowledged_block_is_found(system: System, tmp_path: Path) -> None:
    """Those that were acknowledged by their node alone, too."""
    system.start_node("n0", "--dram", "16MiB", "--nvme", f"{tmp_path / 'nvme'}:64MiB", "--drain-s", "60")
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        assert client.put(b"last", b"one of a message")
        assert system.nodes["n0"].stop(120)
        system.start_node("n0")
        until(lambda: all(client.exists_batch([*KEYS, b"last"])), "all blocks are back")
        assert client.get_batch([*KEYS, b"last"]) == [*VALUES, b"one of a message"]


def test_while_a_node_ends_its_blocks_are_read_and_puts_go_elsewhere(system: System, tmp_path: Path) -> None:
    """Of its own host's clients, too. It ends late, because a put stays open."""
    for name in ("n0", "n1"):
        system.start_node(name, "--dram", "16MiB", "--nvme", f"{tmp_path / name}:64MiB", "--drain-s", "3600")
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        client.flush()
        [name] = {place.node for places in client.locate(KEYS) for place in places}
        [other] = {"n0", "n1"} - {name}
        unix = system.nodes[name].facts("ready", deadline_s=DEADLINE_S)["unix"]
        writer = Writer(Channel.open(Address(unix=unix), Hello(ROLE_CLIENT, "other"), Deadline(DEADLINE_S)))
        writer.open({"never committed": 1000})
        system.nodes[name].ask_to_stop()
        until(lambda: system.node_status(name).counters["closed"] == 1, "the node is ending")
        more = [b"more-%d" % number for number in range(20)]
        assert [client.put(key, value_of(key, 0, 100)) for key in more[:10]] == [True] * 10
        assert client.put_batch(more[10:], [value_of(key, 0, BLOCK_BYTES) for key in more[10:]]) == [True] * 10
        assert {place.node for places in client.locate(more) for place in places} == {other}
        assert client.get_batch(KEYS) == VALUES
        until(lambda: all("nvme" in places[0].tiers for places in client.locate(KEYS)), "all of its blocks are on NVMe")
        writer.close()
        assert system.nodes[name].stop(120)
        system.start_node(name)
        until(lambda: all(client.exists_batch(KEYS)), "all blocks are back")
        assert client.get_batch([*KEYS, *more[:1]]) == [*VALUES, value_of(more[0], 0, 100)]
