"""Leave for peers to reach this rank's memory for the length of one request, and the end of that leave.

A window is regions of its own over memory that stays: closing them fences late bytes of this request off, and nothing else. What peers may
write is never shown as shared memory: a mapping outlives its region, and a process that is stopped in the middle of a copy would go on
with it after the blocks have become another request's. Readers may map; they look whether the region is still open after they have copied.
"""

from collections.abc import Sequence

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region


class Window:
    """See the module. Thread-safe. It owns its regions, not their memory, which stays until `close` has returned True."""

    def __init__(self, engine: TransferEngine, memory: Sequence[Region], *, writable: bool) -> None:
        """Raises whatever a transport has against the memory; nothing is shown then."""
        self.regions: list[Region] = []
        self.descriptions: list[bytes] = []
        try:
            for region in memory:
                self.regions.append(Region(region.memory, location=region.location, fd=-1 if writable else region.fd))
                self.descriptions.append(engine.export(self.regions[-1], writable=writable))
        except BaseException:
            self.close()
            raise

    def close(self) -> bool:
        """Refuse peers from now on; True once none of them is at it any more. Does not wait: call it again."""
        is_closed = True
        for region in self.regions:
            try:
                region.close(deadline_s=0.0)
            except DeadlineExceeded:
                is_closed = False
        return is_closed
