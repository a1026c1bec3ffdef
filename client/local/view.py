"""A value looked at where it lies in a node's DRAM, without a lease: the client says in shared memory that it looks, and the node leaves
the slot alone until it looks away, or its connection ends.
"""

from kvstore.client.local.desk import Hazard, LocalDesk
from kvstore.protocol.errors import InvalidArgument, LeaseExpired


class LocalView:
    """`memory` is read-only. Dropped without an end, it looks away with its hazard."""

    __slots__ = ("_desk", "_hazard", "memory")

    def __init__(self, desk: LocalDesk, hazard: Hazard, memory: memoryview) -> None:
        self._desk = desk
        self._hazard = hazard
        self.memory = memory

    def close(self) -> None:
        """End it: the memory can no longer be used. Only once.

        Raises LeaseExpired when the node hung up before, so that what was read may be another value's, and InvalidArgument when something
        made from the view holds its memory, as far as Python can tell (a numpy array goes unseen).
        """
        in_time = not self._desk.is_over
        try:
            self.memory.release()
            still_used = False
        except BufferError:
            still_used = True
        self._desk.look_away(self._hazard)
        if not in_time:
            raise LeaseExpired("the connection to the view's node broke while it was open: throw away what was read")
        if still_used:
            raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")
