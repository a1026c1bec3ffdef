"""Tests of shared_regions.py with the engines of a node and a client: who may read and write which DRAM, and until
when."""

from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import Denied, Full, InvalidArgument, StaleHandle
from kvstore.store.shared_regions import SharedRegions
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot
from kvstore.transfer.description import unpack_region
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region, RemoteRegion
from kvstore.transfer.paths.peer import PeerRegion
from tests.store.engines import LOOPBACK, FarClient

SLOT_BYTES = 64 << 10
SLAB_BYTES = 4 * SLOT_BYTES


class Pair:
    """The node's side, and a client on another host."""

    def __init__(self) -> None:
        self.dram = DramTier(2 * SLAB_BYTES, slab_bytes=SLAB_BYTES)
        self.node = TransferEngine("node", LOOPBACK)
        self.regions = SharedRegions(self.dram, self.node)
        self.client = FarClient(self.node)

    def slot(self, fill: bytes, *, tenant: str = "red") -> Slot:
        slot = self.dram.allocate(SLOT_BYTES, tenant=tenant)
        self.dram.view(slot)[:] = fill * SLOT_BYTES
        return slot

    def close(self) -> None:
        self.client.close()
        self.node.close()
        self.dram.check_integrity()
        self.dram.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize("kind", ["slab", "slot"])
def test_a_failed_export_leaves_no_transport_exporting(pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    slot = pair.slot(b"a")
    export = pair.node.export
    shown: list[RemoteRegion] = []

    def late_refusal(region: Region, *, writable: bool = False) -> bytes:
        shown.append(unpack_region(export(region, writable=writable)))
        raise Full("no memory can be registered any more")

    with monkeypatch.context() as patch:
        patch.setattr(pair.node, "export", late_refusal)
        with pytest.raises(Full):
            pair.regions.export_slot(slot) if kind == "slot" else pair.regions.export_slab(pair.dram.locate(slot)[0], tenant="red")
    with pytest.raises(StaleHandle):
        pair.client.read(PeerRegion(pair.client.peer, shown[0]), 0, 1)
    assert pair.regions.export_slab(pair.dram.locate(slot)[0], tenant="red"), "it can be later"


def test_a_freed_slab_is_no_longer_exported(pair: Pair) -> None:
    slots = [pair.slot(b"a") for _ in range(8)]
    slab, _ = pair.dram.locate(slots[0])
    kept = pair.client.imported(pair.regions.export_slab(pair.dram.locate(slots[7])[0], tenant="red"))
    region = pair.client.imported(pair.regions.export_slab(slab, tenant="red"))
    for slot in slots[:4]:
        pair.dram.free(slot)
    pair.regions.close_stale()
    while pair.dram.has_slab(slab):  # another size takes its memory
        pair.dram.allocate(SLOT_BYTES // 2, tenant="red")
    pair.regions.close_stale()
    assert len(pair.regions) == 1
    assert pair.regions.export_slab(slab, tenant="red") == b""
    with pytest.raises(StaleHandle):
        pair.client.read(region, 0, 1)
    assert pair.client.read(kept, 0, 1) == b"a"


def test_a_slab_freed_while_read_keeps_its_memory(pair: Pair) -> None:
    slots = [pair.slot(b"a") for _ in range(4)]
    slab, _ = pair.dram.locate(slots[0])
    pair.regions.export_slab(slab, tenant="red")
    region, _ = pair.regions._slabs[slab]
    region.hold()  # as the engine does for a transfer
    for slot in slots:
        pair.dram.free(slot)
    while pair.dram.has_slab(slab):
        pair.dram.allocate(SLOT_BYTES // 2, tenant="red")
    pair.regions.close_stale()
    assert pair.regions._closing == [region]
    assert region.memory[0] in b"a\0", "still mapped"
    region.release()
    pair.regions.close_stale()
    assert pair.regions._closing == []


@pytest.mark.promise("slots-not-reused-early")
def test_a_slot_export_permits_writes_inside_the_slot_only(pair: Pair) -> None:
    before, slot, behind = pair.slot(b"a"), pair.slot(b"b"), pair.slot(b"c")
    _grant, description = pair.regions.export_slot(slot)
    region = pair.client.imported(description)
    pair.client.write(region, b"x" * SLOT_BYTES)
    assert bytes(pair.dram.view(slot)) == b"x" * SLOT_BYTES
    # The client's own check would refuse these: a peer that lies about the size meets the node's.
    lying = PeerRegion(pair.client.peer, region.remote._replace(size_bytes=SLAB_BYTES))
    for offset in (1, SLOT_BYTES):
        with pytest.raises(InvalidArgument, match="outside region"):
            pair.client.write(lying, b"y" * SLOT_BYTES, offset)
    for other in (1, -1):
        with pytest.raises((StaleHandle, Denied)):
            pair.client.write(PeerRegion(pair.client.peer, region.remote._replace(region_id=region.remote.region_id + other)), b"y")
    assert bytes(pair.dram.view(before)) == b"a" * SLOT_BYTES
    assert bytes(pair.dram.view(slot)) == b"x" * SLOT_BYTES
    assert bytes(pair.dram.view(behind)) == b"c" * SLOT_BYTES


@pytest.mark.promise("slots-not-reused-early")
def test_a_leaked_export_is_useless_after_the_put(pair: Pair) -> None:
    slot = pair.slot(b"a")
    grant, description = pair.regions.export_slot(slot)
    assert grant.revoke()
    assert grant.revoke(), "it may be asked again"
    with pytest.raises(StaleHandle):
        pair.client.write(pair.client.imported(description), b"x" * SLOT_BYTES)
    _again, fresh = pair.regions.export_slot(slot)  # the next put of the same slot
    assert unpack_region(fresh).key != unpack_region(description).key
    with pytest.raises(StaleHandle):
        pair.client.write(pair.client.imported(description), b"x" * SLOT_BYTES)
    assert bytes(pair.dram.view(slot)) == b"a" * SLOT_BYTES
    pair.client.write(pair.client.imported(fresh), b"y" * SLOT_BYTES)
    assert bytes(pair.dram.view(slot)) == b"y" * SLOT_BYTES
