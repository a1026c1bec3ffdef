"""Tests of remote reads with real engines: values are mapped, and stay in place while leased."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import RevokeCredentials
from kvstore.protocol.errors import Denied, InvalidArgument, StaleHandle
from kvstore.protocol.node_messages import INLINE, MAPPED, MISS, ExportSlabs, ExportSlabsReply
from kvstore.protocol.session_messages import ROLE_NODE, Count, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.store.session_authenticator import MAX_SLABS
from kvstore.transfer.description import unpack_region
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.peer import PeerRegion
from tests.store.engines import LOOPBACK, FarClient
from tests.store.served import TIMEOUT_S, Client, Master, Served, served

KIB = 1024
SIZE = 16 * KIB
"""Of the node's DRAM."""


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine("node", LOOPBACK) as engine:
        yield engine


@pytest.fixture
def node(tmp_path: Path, engine: TransferEngine) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=SIZE, nvme_bytes=1 << 20, engine=engine) as node:
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


def shown(client: Client, *slabs: int) -> list[bytes]:
    return client.ask(ExportSlabs(list(slabs)), ExportSlabsReply).regions


def readers(node: Served, name: str) -> int:
    block = node.call(lambda: node.store.table.find("red", name.encode()))
    assert block is not None
    return block.readers


def test_large_values_are_mapped_and_small_ones_sent(node: Served, client: Client, far: FarClient) -> None:
    values = {"a": b"a" * 5000, "b": b"b" * 100}
    client.put(values)
    blocks = client.ask_blocks("a", "b", "x", inline_bytes=100, engine=1)
    assert list(blocks.statuses) == [MAPPED, INLINE, MISS]
    assert blocks.lease
    assert blocks.lease_ms == 10_000
    small = bytearray(100)
    client.channel.read_into([memoryview(small)], Deadline(TIMEOUT_S))
    assert bytes(small) == values["b"]
    [description] = shown(client, blocks.slabs[0])
    assert far.read(far.imported(description), blocks.offsets[0], 5000) == values["a"]
    assert readers(node, "a") == 1
    client.release(blocks.lease)
    client.read("x")
    assert readers(node, "a") == 0


@pytest.mark.promise("slots-not-reused-early")
def test_a_removed_block_stays_readable_under_its_lease(node: Served, client: Client, far: FarClient) -> None:
    client.put({"a": b"a" * SIZE})
    blocks = client.ask_blocks("a", engine=1)
    block = node.call(lambda: node.store.table.find("red", b"a"))
    assert block is not None
    node.call(lambda: node.store.table.copies.drop(block))
    [description] = shown(client, blocks.slabs[0])
    assert far.read(far.imported(description), blocks.offsets[0], SIZE) == b"a" * SIZE
    client.release(blocks.lease)
    assert client.put({"b": b"b" * SIZE}) == [1]


def test_export_slabs_is_limited_to_the_tenant_and_batch_size(node: Served, client: Client, tmp_path: Path) -> None:
    client.put({"a": b"a" * 3000})
    slab = client.ask_blocks("a", engine=1).slabs[0]
    assert [bool(region) for region in shown(client, slab, 1000, slab)] == [True, False, True]
    blue = node.connect(tcp=True, tenant="blue")
    assert shown(blue, slab) == shown(blue, 1000) == [b""]
    blue.close()
    with pytest.raises(InvalidArgument, match=str(MAX_SLABS)):
        shown(client, *range(MAX_SLABS + 1))
    with served(tmp_path / "other") as without:
        other = without.connect(tcp=True)
        with pytest.raises(InvalidArgument, match="transfer engine"):
            shown(other, slab)
        other.close()


@pytest.mark.promise("authentication")
def test_a_revoked_readers_regions_are_closed(node: Served, client: Client, far: FarClient) -> None:
    """Regions of other tenants stay open; the tenant's other readers get new ones."""
    client.put({"a": b"a" * 3000})
    blocks = client.ask_blocks("a", engine=1)
    blue = node.connect(tcp=True, tenant="blue")
    blue.put({"a": b"b" * 3000})
    theirs = blue.ask_blocks("a", engine=1)
    before, others = far.imported(shown(client, blocks.slabs[0])[0]), far.imported(shown(blue, theirs.slabs[0])[0])
    assert far.read(before, blocks.offsets[0], 3000) == b"a" * 3000
    link = Master(node.link())
    assert link.ask(RevokeCredentials(0, "red", [4711])) == Count(0)
    with pytest.raises((Denied, StaleHandle)):
        far.read(before, blocks.offsets[0], 3000)
    assert far.read(others, theirs.offsets[0], 3000) == b"b" * 3000
    anew = far.imported(shown(client, blocks.slabs[0])[0])
    assert far.read(anew, blocks.offsets[0], 3000) == b"a" * 3000
    link.close()
    blue.close()


def test_a_pass_opens_only_the_slabs_of_its_blocks(tmp_path: Path) -> None:
    with TransferEngine("passes", LOOPBACK) as engine, served(tmp_path, dram_bytes=8 * SIZE, engine=engine, needs_tickets=True) as node:
        writer = node.connect(ticket=node.ticket())
        writer.put({"a": b"a" * 3000, "b": b"b" * 9000}, generation=4)
        slabs = writer.ask_blocks("a", "b").slabs
        assert slabs[0] != slabs[1]
        pass_for_a = node.call(lambda: node.issuer.issue_pass(5, "red", [b"a"], [4], node.reactor.now_ns()))
        hello = Hello(ROLE_NODE, "red", "", "other", 0, pass_for_a)
        reader = Client(Channel.open(parse_address(node.tcp), hello, Deadline(TIMEOUT_S)))
        with pytest.raises(Denied, match="does not cover blocks in these slabs"):
            shown(reader, slabs[0])
        assert list(reader.ask_blocks("a", engine=1, generations=[4]).statuses) == [MAPPED]
        assert shown(reader, slabs[0]) != [b""]
        with pytest.raises(Denied, match="in these slabs"):
            shown(reader, slabs[1])
        reader.close()
        writer.close()


@pytest.mark.promise("tenant-isolation")
def test_another_tenant_cannot_guess_a_slabs_key(node: Served, client: Client, far: FarClient) -> None:
    """It reaches the same engine and knows everything but the key."""
    client.put({"a": b"a" * 3000})
    blocks = client.ask_blocks("a", engine=1)
    known = unpack_region(shown(client, blocks.slabs[0])[0])
    for key in (0, known.key + 1, known.key ^ 1):
        with pytest.raises(Denied):
            far.read(PeerRegion(far.peer, known._replace(key=key)), 0, 1)
    for region_id in range(known.region_id + 1, known.region_id + 10):
        with pytest.raises((StaleHandle, Denied)):
            far.read(PeerRegion(far.peer, known._replace(region_id=region_id)), 0, 1)


def test_a_slab_reader_may_not_write_it(client: Client, far: FarClient) -> None:
    client.put({"a": b"a" * 3000})
    blocks = client.ask_blocks("a", engine=1)
    [description] = shown(client, blocks.slabs[0])
    with pytest.raises(Denied):
        far.write(far.imported(description), b"x" * 3000, blocks.offsets[0])
    assert client.read("a", inline_bytes=1 << 20)[1] == [b"a" * 3000]
