"""DRAM registered with the node's transfer engine for clients of other hosts: slabs for reading, slots for writing.

A slab is exported to its tenant, read-only, at its first remote read; leases keep the blocks in place. A slot is
exported to the writer of one open put and closed with it, so that a late write cannot reach the slot's next block.
"""

from collections.abc import Iterable

from kvstore.protocol.errors import DeadlineExceeded, StaleHandle, Unauthorized
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region


class RegionWritePermission:
    """WritePermission for one exported slot."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def revoke(self) -> bool:
        return _close(self._region)


class SharedRegions:
    """Exported regions of a node. It owns the regions, not their memory. Not thread-safe: called from the node's loop."""

    def __init__(self, dram: DramTier, engine: TransferEngine) -> None:
        self._dram = dram
        self._engine = engine
        self._slabs: dict[int, tuple[Region, bytes]] = {}
        self._tenants: dict[int, str] = {}
        """By exported slab."""
        self._closing: list[Region] = []

    def export_slab(self, slab: int, *, tenant: str) -> bytes:
        """Return the slab's read-only export; b"" if it was freed or is another tenant's."""
        try:
            memory = self._dram.slab_memory(slab, tenant=tenant)
        except (StaleHandle, Unauthorized):  # one answer for both hides other tenants' slabs
            return b""
        if slab not in self._slabs:
            self._slabs[slab] = self._export(memory, writable=False)
            self._tenants[slab] = tenant
        return self._slabs[slab][1]

    def export_slot(self, slot: Slot) -> tuple[RegionWritePermission, bytes]:
        """Return a write permission for a slot, and its export."""
        region, description = self._export(self._dram.view(slot), writable=True)
        return RegionWritePermission(region), description

    def _export(self, memory: memoryview, *, writable: bool) -> tuple[Region, bytes]:
        """Register and export memory. Raises the transports' errors; nothing stays registered then."""
        region = self._engine.register(memory)
        try:
            return region, self._engine.export(region, writable=writable)
        except BaseException:
            _close(region)
            raise

    def close_exports(self, tenant: str) -> None:
        """Close the tenant's exported slabs. Later requests get new keys; the old ones are refused."""
        self._close_slabs(slab for slab, owner in self._tenants.items() if owner == tenant)

    def close_stale(self) -> None:
        """Close exports of freed slabs. Their memory is kept while it is being read."""
        self._close_slabs(slab for slab in self._slabs if not self._dram.has_slab(slab))

    def _close_slabs(self, slabs: Iterable[int]) -> None:
        for slab in list(slabs):
            self._closing.append(self._slabs.pop(slab)[0])
            del self._tenants[slab]
        self._closing = [region for region in self._closing if not _close(region)]

    def __len__(self) -> int:
        return len(self._slabs)


def _close(region: Region) -> bool:
    """Refuse new transfers; return True if none is in progress."""
    try:
        region.close(deadline_s=0.0)
    except DeadlineExceeded:
        return False
    return True
