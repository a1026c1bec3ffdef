"""What of the node's DRAM its transfer engine shows to clients of other hosts: slabs to read, slots to write.

A slab is shown to its tenant from its first remote reader on, for reading only; the readers' leases keep the blocks in place. A slot is
shown to the one writer of an open put, and to nobody once the put is over: a late byte cannot reach the block that gets the slot next.
"""

from collections.abc import Iterable

from kvstore.protocol.errors import DeadlineExceeded, StaleHandle, Unauthorized
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region


class RegionWritePermission:
    """Leave to write one slot: an open_puts.Grant."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def revoke(self) -> bool:
        return _close(self._region)


class SharedRegions:
    """Not thread-safe: the node's loop is the only caller. It owns the regions, not their memory."""

    def __init__(self, dram: DramTier, engine: TransferEngine) -> None:
        self._dram = dram
        self._engine = engine
        self._slabs: dict[int, tuple[Region, bytes]] = {}
        self._tenants: dict[int, str] = {}
        """Of the slabs that are shown."""
        self._closing: list[Region] = []

    def show_slab(self, slab: int, *, tenant: str) -> bytes:
        """The slab as the engine exports it, for reading; b"" if it is gone or another tenant's."""
        try:
            memory = self._dram.slab_memory(slab, tenant=tenant)
        except (StaleHandle, Unauthorized):  # one answer for both: another tenant's slab does not exist for this one
            return b""
        if slab not in self._slabs:
            self._slabs[slab] = self._export(memory, writable=False)
            self._tenants[slab] = tenant
        return self._slabs[slab][1]

    def show_slot(self, slot: Slot) -> tuple[RegionWritePermission, bytes]:
        """Leave to write a slot, and the slot as the engine exports it."""
        region, description = self._export(self._dram.view(slot), writable=True)
        return RegionWritePermission(region), description

    def _export(self, memory: memoryview, *, writable: bool) -> tuple[Region, bytes]:
        """A region and its description. Raises whatever a transport has against the memory; none of them shows it then."""
        region = self._engine.register(memory)
        try:
            return region, self._engine.export(region, writable=writable)
        except BaseException:
            _close(region)
            raise

    def hide(self, tenant: str) -> None:
        """Show the tenant's slabs anew, under other keys, to whoever asks from now on: those told of before are refused."""
        self._hide(slab for slab, whose in self._tenants.items() if whose == tenant)

    def sweep(self) -> None:
        """Stop showing slabs that are gone; their memory is kept for as long as it is being read."""
        self._hide(slab for slab in self._slabs if not self._dram.has_slab(slab))

    def _hide(self, slabs: Iterable[int]) -> None:
        for slab in list(slabs):
            self._closing.append(self._slabs.pop(slab)[0])
            del self._tenants[slab]
        self._closing = [region for region in self._closing if not _close(region)]

    def __len__(self) -> int:
        return len(self._slabs)


def _close(region: Region) -> bool:
    """Refuse new transfers; True if none is under way."""
    try:
        region.close(deadline_s=0.0)
    except DeadlineExceeded:
        return False
    return True
