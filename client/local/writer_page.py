"""The client's side of the page in which a node of this host offers it the slot of its next put: protocol/writer_page.py."""

import os
import threading

from kvstore.protocol.errors import Broken
from kvstore.protocol.writer_page import (
    AT_NUMBER,
    AT_OFFSET,
    AT_PAGE_MAGIC,
    AT_SIZE,
    AT_SLAB,
    AT_SLABS_AHEAD,
    AT_WRITING,
    PAGE_BYTES,
    PAGE_MAGIC,
    SLABS_AHEAD,
)
from kvstore.transfer.memory.mapping import map_slab


class OfferedSlot:
    """Belongs to a connection: whoever has that is the only caller."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes no ownership of `fd`. Raises Broken: it is no such page, or not one of this release."""
        self._words = map_slab(os.dup(fd), size_bytes, writable=True).memory.cast("Q")
        if size_bytes != PAGE_BYTES or self._words[AT_PAGE_MAGIC] != PAGE_MAGIC:
            raise Broken("a node of this host offers slots in a form that this release does not know")
        self._fence = threading.Lock()
        self._ahead = self._words[AT_SLABS_AHEAD : AT_SLABS_AHEAD + SLABS_AHEAD]
        self._told: list[int] = []

    def has(self, size_bytes: int) -> bool:
        """Whether a slot of this size is offered now."""
        return bool(self._words[AT_NUMBER]) and self._words[AT_SIZE] == size_bytes

    def enter(self, size_bytes: int) -> tuple[int, int, int] | None:
        """Begin to write the slot: (number, slab, offset in bytes). It stays this writer's until `leave`, or until its put is answered.

        None: no slot of this size is offered now."""
        words = self._words
        number = words[AT_NUMBER]
        if not self.has(size_bytes):
            return None
        words[AT_WRITING] = number
        with self._fence:  # a full barrier between this store and the load
            pass
        if words[AT_NUMBER] != number:
            self.leave()
            return None
        return number, words[AT_SLAB], words[AT_OFFSET]

    def new_slabs_ahead(self) -> list[int]:
        """Slabs that later slots will be in, where the node has named others since the last call."""
        told = self._ahead.tolist()
        if told == self._told:
            return []
        self._told = told
        return [word - 1 for word in told if word]

    def leave(self) -> None:
        """The slot is not written any more."""
        self._words[AT_WRITING] = 0
