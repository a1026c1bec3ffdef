"""A value looked at where it lies in a node's DRAM, without a lease: the client says in shared memory that it looks, and the node leaves
the slot alone until it looks away, or its connection ends.
"""

from kvstore.client.local.desk import LocalDesk, Looker
from kvstore.protocol.errors import InvalidArgument, LeaseExpired


class LocalView(Looker):
    """Filled by LocalReads.look; `memory` is read-only. Whatever is raised meanwhile, the slot is looked away from when this ends."""

    __slots__ = ("desk", "memory")

    def __init__(self) -> None:
        super().__init__()
        self.memory = memoryview(b"")
        self.desk: LocalDesk | None = None

    def close(self) -> None:
        """End it: the memory can no longer be used.

        Raises LeaseExpired when the node hung up before, so that what was read may be another value's, and InvalidArgument when something
        made from the view holds its memory, as far as Python can tell (a numpy array goes unseen).
        """
        in_time = self.desk is None or not self.desk.is_over
        try:
            self.memory.release()
            still_used = False
        except BufferError:
            still_used = True
        self.look_away()
        if not in_time:
            raise LeaseExpired("the connection to the view's node broke while it was open: throw away what was read")
        if still_used:
            raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")

    def look_away(self) -> None:
        """Nothing is looked at any more. A second call is a no-op."""
        if self.desk is not None and self.hazards:
            self.desk.look_away(self)

    def __del__(self) -> None:
        self.look_away()
