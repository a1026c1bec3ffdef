"""Tests of remote puts with real engines: visible values are whole, and a slot has one writer."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from kvstore.protocol.errors import Full, InvalidArgument, StaleHandle
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import RETRY_LATER, STORED, AbortPuts, OpenSlotsReply
from kvstore.protocol.session_messages import Ok
from kvstore.store.shared_regions import RegionWritePermission
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from tests.store.engines import LOOPBACK, FarClient, eventually, stalled_writer
from tests.store.served import Client, Served, served
from tests.store.tables import PUT_TTL_NS

KIB = 1024
SIZE = 16 * KIB
"""Of the node's DRAM: it holds one such value."""


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine("node", LOOPBACK) as engine:
        yield engine


@pytest.fixture
def node(tmp_path: Path, engine: TransferEngine) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=SIZE, engine=engine) as node:
        yield node


@pytest.fixture
def client(node: Served) -> Iterator[Client]:
    client = node.connect(tcp=True)
    yield client
    client.close()


@pytest.fixture
def far(engine: TransferEngine) -> Iterator[FarClient]:
    far = FarClient(engine)
    yield far
    far.close()


def write(far: FarClient, opened: OpenSlotsReply, values: list[bytes]) -> None:
    for region, value in zip(opened.regions, values, strict=True):
        far.write(far.imported(region), value)


def region_of(node: Served, opened: OpenSlotsReply) -> Region:
    """The node's side of the first put's slot."""

    def find() -> Region:
        [put] = [put for put in node.store.table.puts._puts.values() if put.put_id == opened.put_ids[0]]
        return cast(RegionWritePermission, put.grant)._region

    return node.call(find)


def free_bytes(node: Served) -> int:
    return node.call(lambda: node.store.dram.free_bytes)


def expire(node: Served, *, puts: int) -> None:
    """Have the time of all open puts pass, of which there are so many."""
    later_ns = node.reactor.now_ns() + PUT_TTL_NS
    assert node.call(lambda: node.store.table.expire(now_ns=later_ns)) == puts


def sweep(node: Served) -> None:
    """As the node does ten times a second."""
    expire(node, puts=0)


def test_an_engine_put_is_visible_after_its_commit(node: Served, client: Client, far: FarClient) -> None:
    values = [b"a" * 5000, b"b" * 100]
    opened = client.open({"a": 5000, "b": 100}, engine=1)
    assert list(opened.statuses) == [GRANTED] * 2
    assert list(opened.slabs_ahead) == []
    write(far, opened, values)
    assert client.read("a")[1] == [None]
    assert client.commit(opened, values) == [STORED] * 2
    assert client.read("a", "b", inline_bytes=1 << 20)[1] == values
    assert node.call(lambda: node.in_place_puts.in_bytes) == 5100


def test_a_node_without_an_engine_refuses_its_use(tmp_path: Path) -> None:
    with served(tmp_path) as node:
        client = node.connect(tcp=True)
        with pytest.raises(InvalidArgument, match="no transfer engine: use Put"):
            client.open({"a": 1}, engine=1)
        assert client.put({"a": b"x"}) == [STORED]
        client.close()


@pytest.mark.promise("slots-not-reused-early")
def test_a_committed_slot_can_be_written_no_more(client: Client, far: FarClient) -> None:
    value = b"a" * SIZE
    opened = client.open({"a": SIZE}, engine=1)
    write(far, opened, [value])
    assert client.commit(opened, [value]) == [STORED]
    with pytest.raises(StaleHandle):
        write(far, opened, [b"x" * SIZE])
    assert client.read("a", inline_bytes=1 << 20)[1] == [value]


@pytest.mark.promise("get-exact-bytes")
def test_an_engine_put_with_a_wrong_checksum_is_not_stored(node: Served, client: Client, far: FarClient) -> None:
    opened = client.open({"a": SIZE}, engine=1)
    write(far, opened, [b"a" * SIZE])
    assert client.commit(opened, [b"b" * SIZE]) == [RETRY_LATER]
    assert client.read("a")[1] == [None]
    assert node.call(lambda: node.store.table.open_puts) == 0
    assert free_bytes(node) == SIZE
    with pytest.raises(StaleHandle):
        write(far, opened, [b"a" * SIZE])


@pytest.mark.promise("slots-not-reused-early")
@pytest.mark.parametrize("ending", ["commit", "abort", "hang up", "expiry"])
def test_a_slot_is_not_reused_while_it_is_written(node: Served, client: Client, engine: TransferEngine, ending: str) -> None:
    writing = node.connect(tcp=True)
    opened = writing.open({"a": SIZE}, engine=1)
    region = region_of(node, opened)
    with stalled_writer(engine, opened.regions[0]) as stalled:
        eventually(lambda: region.users == 1)
        if ending == "commit":
            assert writing.commit(opened, [b"x" * SIZE]) == [RETRY_LATER]
        elif ending == "abort":
            writing.ask(AbortPuts(list(opened.put_ids)), Ok)
        elif ending == "hang up":
            writing.close()
            eventually(lambda: node.call(lambda: node.store.table.open_puts) == 0)
        else:
            expire(node, puts=1)
        sweep(node)
        assert free_bytes(node) == 0
        assert node.call(lambda: node.store.open("b", SIZE)) is None
        assert region.users == 1, "the writer was not hindered"
        stalled.socket.sendall(b"x" * (SIZE - 1))
        assert stalled.answer()[0].type == Ok.TYPE
        eventually(lambda: region.users == 0)
    sweep(node)
    assert free_bytes(node) == SIZE
    assert list(client.open({"b": SIZE}, engine=1).statuses) == [GRANTED]
    writing.close()


def test_a_slot_of_a_dead_writer_is_reused(node: Served, client: Client, engine: TransferEngine, far: FarClient) -> None:
    writing = node.connect(tcp=True)
    opened = writing.open({"a": SIZE}, engine=1)
    region = region_of(node, opened)
    with stalled_writer(engine, opened.regions[0]):
        eventually(lambda: region.users == 1)
        writing.close()
        eventually(lambda: node.call(lambda: node.store.table.open_puts) == 0)
    eventually(lambda: region.users == 0)
    sweep(node)
    again = client.open({"a": SIZE}, engine=1)
    assert list(again.statuses) == [GRANTED]
    write(far, again, [b"y" * SIZE])
    assert client.commit(again, [b"y" * SIZE]) == [STORED]


def test_an_expired_engine_put_frees_its_slot_at_once(node: Served, client: Client, far: FarClient) -> None:
    opened = client.open({"a": SIZE}, engine=1)
    write(far, opened, [b"a" * SIZE])
    expire(node, puts=1)
    assert free_bytes(node) == SIZE, "its writer can do no harm: it has no way to the slot any more"
    with pytest.raises(StaleHandle):
        write(far, opened, [b"x" * SIZE])
    other = node.connect()
    assert list(other.open({"a": SIZE}).statuses) == [GRANTED]
    assert client.commit(opened, [b"a" * SIZE]) == [RETRY_LATER]
    assert node.call(lambda: node.store.table.open_puts) == 1, "the other's put is not touched"
    other.close()


def test_a_failed_slot_export_leaves_nothing_open(
    node: Served, client: Client, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = engine.export
    shown: list[Region] = []

    def second_fails(region: Region, *, writable: bool = False) -> bytes:
        if shown:
            raise Full("no memory can be registered any more")
        shown.append(region)
        return export(region, writable=writable)

    monkeypatch.setattr(engine, "export", second_fails)
    with pytest.raises(Full, match="registered"):
        client.open({"a": 100, "b": 100}, engine=1)
    assert node.call(lambda: node.store.table.open_puts) == 0
    assert free_bytes(node) == SIZE
    assert shown[0].is_closed
