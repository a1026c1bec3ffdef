"""The regions of this process that peers may reach, and the check of every piece that they name."""

from collections.abc import Sequence

from kvstore.protocol.errors import Closed, Denied, InvalidArgument, StaleHandle
from kvstore.protocol.transfers import Fetch, Store
from kvstore.transfer.memory.region import Region


class Exports:
    """Regions by id. Thread-safe: every step is one of the dictionary's own."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def add(self, region: Region) -> None:
        """Peers that show its keys may reach it until it is closed. A second time is a no-op."""
        if region.region_id not in self._regions:
            self._regions[region.region_id] = region
            region.on_close(self._forget)

    def _forget(self, region: Region) -> None:
        self._regions.pop(region.region_id, None)

    def find(self, region_id: int, key: int, *, writing: bool) -> Region:
        """Raises StaleHandle (no such region, or closed) or Denied (the key does not allow it)."""
        region = self._regions.get(region_id)
        if region is None or region.is_closed:
            raise StaleHandle(f"region {region_id} is not, or no longer, open to peers")
        if key != region.write_key and (writing or key != region.read_key):
            raise Denied(f"this key does not allow {'writing' if writing else 'reading'} region {region_id}")
        if writing and region.memory.readonly:
            raise Denied(f"region {region_id} is read-only")
        return region

    def hold(self, request: Fetch | Store) -> tuple[list[memoryview], Sequence[Region]]:
        """The memory of every piece in order, and the regions that are held for it: release each when the bytes have moved.

        Raises StaleHandle, Denied, InvalidArgument; nothing is held then.
        """
        writing = isinstance(request, Store)
        views: list[memoryview] = []
        held: list[Region] = []
        known: dict[tuple[int, int], Region] = {}
        try:
            for region_id, key, offset, size in zip(request.regions, request.keys, request.offsets, request.sizes, strict=True):
                region = known.get((region_id, key))
                if region is None:
                    region = known[region_id, key] = self.find(region_id, key, writing=writing)
                    region.hold()
                    held.append(region)
                if offset + size > region.size_bytes:
                    raise InvalidArgument(
                        f"bytes {offset} to {offset + size} are outside region {region_id}, which has {region.size_bytes} bytes"
                    )
                views.append(region.memory[offset : offset + size])
        except Closed:
            release(held)
            raise StaleHandle(f"region {region_id} is closed") from None
        except BaseException:
            release(held)
            raise
        return views, held


def release(regions: Sequence[Region]) -> None:
    for region in regions:
        region.release()
