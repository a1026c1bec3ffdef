"""A link between node and master that breaks for a moment: what the master knows already is not named again, and nothing is lost."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.master.leadership.leader import LeaderRole
from kvstore.protocol.errors import Unavailable
from kvstore.testing.transfer.awaited import eventually
from tests.master.running import TIMEOUT_S, Places, master_in_thread
from tests.store.daemons import running

BLOCKS: Final = 20_000
BATCH: Final = 4_000
VALUE: Final = b"v" * 64


class Blinking:
    """A master of this process, and what it counts."""

    def __init__(self, places: Places) -> None:
        assert places.master is not None
        self.reactor = places.master.reactor
        self.leading: LeaderRole = places.master.partitions[0].role_manager.leader()

    def counted(self, name: str) -> int:
        return self.leading.frames.counters[name]

    def break_link(self) -> None:
        def break_off() -> None:
            (node,) = self.leading.directory.members.live()
            self.leading.frames.connections.disconnect(node.node_id, "a test breaks it")

        self.reactor.call(break_off, deadline_s=TIMEOUT_S)

    def is_settled(self) -> bool:
        return self.reactor.call(lambda: all(node.is_settled for node in self.leading.directory.members), deadline_s=TIMEOUT_S)

    def epoch(self) -> int:
        return self.reactor.call(lambda: max(node.epoch for node in self.leading.directory.members), deadline_s=TIMEOUT_S)

    def await_inventory_after(self, epoch: int) -> int:
        """Of a later registration; its epoch."""
        eventually(lambda: self.epoch() > epoch and self.is_settled(), "the inventory is known")
        return self.epoch()

    def known_keys(self) -> set[bytes]:
        """Of blocks that can be read; the directory agrees with itself."""

        def known() -> set[bytes]:
            directory = self.leading.directory
            directory.check_integrity()
            rows, tenants = directory.columns()
            return {key for tenant in tenants for key, row in tenant.rows.items() if rows.sets.live[rows.holders[row]]}

        return self.reactor.call(known, deadline_s=TIMEOUT_S)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path / "m", heartbeat_interval_s=0.05, node_ttl_s=3600.0) as found:
        yield found


def keys(begin: int, end: int) -> list[bytes]:
    return [b"key-%08d" % at for at in range(begin, end)]


def put(client: Client, begin: int, end: int) -> None:
    for at in range(begin, end, BATCH):
        batch = keys(at, min(at + BATCH, end))
        eventually(lambda batch=batch: _has_put(client, batch), "there is a node again")  # type: ignore[misc]


def _has_put(client: Client, batch: list[bytes]) -> bool:
    with contextlib.suppress(Unavailable):
        client.put_batch(batch, [VALUE] * len(batch))
        return True
    return False


@pytest.mark.promise("resync")
def test_of_a_link_that_blinks_less_than_a_tenth_is_named_again(places: Places, tmp_path: Path) -> None:
    """With puts and removals before, while it is broken, and while the inventory is compared."""
    master = Blinking(places)
    flags = ("--master", places.listen, "--listen", "127.0.0.1:0", "--run-dir", str(tmp_path / "n"), "--name", "n0", "--dram", "64MiB")
    quick = ("--reconnect-interval-s", "0.02", "--reconnect-max-interval-s", "0.1")
    with running("node", *flags, *quick, log=tmp_path / "node.log"):
        with Client(places.listen, settings=ClientSettings(ack="cluster"), deadline_s=TIMEOUT_S) as client:
            put(client, 0, BLOCKS)
            named, epoch = master.counted("published"), master.epoch()
            there = set(keys(0, BLOCKS))
            for turn in range(3):
                master.break_link()
                begin = BLOCKS + 100 * turn
                put(client, begin, begin + 100)
                gone = keys(1000 * turn, 1000 * turn + 10)
                client.remove(gone)
                there = (there | set(keys(begin, begin + 100))) - set(gone)
                epoch = master.await_inventory_after(epoch)
            assert master.counted("compared") > 2.5 * BLOCKS
            assert master.counted("published") - named < BLOCKS / 10
            assert master.known_keys() == there
