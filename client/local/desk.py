"""The client's side of its desk at a node of this host (protocol/shown_index.py): what it has read, and what it is looking at.

It counts what it said for `stats`, too. One lock guards both; it is given back between the store of a hazard and the look at the entry
that follows, and so is the full fence that these two need.
"""

import os
import threading
import weakref

import numpy as np

from kvstore.client.local.index import Found, FoundBatch, IndexView
from kvstore.protocol.errors import Broken
from kvstore.protocol.shown_index import (
    ACCESSES,
    AT_ACCESSES,
    AT_DESK_MAGIC,
    AT_DESK_OVER,
    AT_HAZARDS,
    AT_HAZARDS_USED,
    AT_LOST,
    AT_RING,
    AT_TAKEN,
    DESK_BYTES,
    HAZARDS,
    LOOK_NUMBERS,
    LOOK_SHIFT,
    MAGIC,
    Words,
)
from kvstore.transfer.memory.mapping import map_slab


class Looker:
    """Whoever looks at values; `hazards` are those that keep them where they are."""

    __slots__ = ("__weakref__", "hazards")

    def __init__(self) -> None:
        self.hazards: list[int] = []


class LocalDesk:
    """See the module. Thread-safe."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes no ownership of `fd`. Raises Broken: it is no desk, or not one of this release."""
        memory = map_slab(os.dup(fd), size_bytes, writable=True).memory
        self._words = memory.cast("Q")
        if size_bytes != DESK_BYTES or self._words[AT_DESK_MAGIC] != MAGIC:
            raise Broken("a node of this host has desks in a form that this release does not know")
        self._ring: Words = np.frombuffer(memory, np.uint64)[AT_RING : AT_RING + ACCESSES]
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._written = self._words[AT_ACCESSES]
        self._free = list(range(HAZARDS))
        self._looks = 0
        self._lookers: dict[int, weakref.ref[Looker]] = {}
        """Whose the other hazards are."""
        self.hits = 0
        """Blocks read here."""
        self.bytes_in = 0
        self.calls = 0

    @property
    def is_over(self) -> bool:
        """The node has ended the connection: nothing is kept for its views any more."""
        return bool(self._words[AT_DESK_OVER])

    def read_one(self, index: IndexView, found: Found) -> None:
        """A block was read."""
        with self._lock:
            self.calls += 1
            self.hits += 1
            self.bytes_in += found.size
            if self._written - self._words[AT_TAKEN] >= ACCESSES:
                self._words[AT_LOST] += 1
                return
            self._words[AT_RING + self._written % ACCESSES] = index.access_word(found)
            self._written += 1
            self._words[AT_ACCESSES] = self._written

    def asked(self) -> None:
        """A call is over that asked nobody."""
        with self._lock:
            self.calls += 1

    def read_many(self, index: IndexView, found: FoundBatch) -> None:
        """Blocks were read, in order."""
        words = index.access_words(found)
        with self._lock:
            self.hits += len(words)
            self.bytes_in += int(found.sizes.sum())
            room = max(0, ACCESSES - (self._written - self._words[AT_TAKEN]))
            self._words[AT_LOST] += max(0, len(words) - room)
            words = words[:room]
            begin = self._written % ACCESSES
            first = words[: ACCESSES - begin]
            self._ring[begin : begin + len(first)] = first
            self._ring[: len(words) - len(first)] = words[len(first) :]
            self._written += len(words)
            self._words[AT_ACCESSES] = self._written

    def look(self, index: IndexView, found: Found, looker: "Looker") -> bool:
        """Keep the node from reusing what was found, until `look_away` or the end of `looker`, whatever is raised meanwhile.

        False: the place is another block's by now, or the node hung up, or as much is looked at as can be.
        """
        with self._lock:
            if self._lookers:
                self._sweep()
            if not self._free:
                return False
            number = self._free[-1]
            looker.hazards.append(number)
            self._lookers[number] = weakref.ref(looker)
            self._free.pop()
            self._words[AT_HAZARDS_USED] = HAZARDS - len(self._free)
            self._looks = (self._looks + 1) % LOOK_NUMBERS
            self._words[AT_HAZARDS + number] = found.slot + 1 | self._looks << LOOK_SHIFT
        return index.still(found) and not self.is_over

    def look_away(self, looker: "Looker") -> None:
        """What was looked at is used no more. A second call is a no-op, and so is one of a forked child: the desk is its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            while looker.hazards:
                self._release(looker.hazards[-1])
                looker.hazards.pop()

    def _sweep(self) -> None:
        """Release what was looked at by somebody who is no more: a signal handler that raised kept it from looking away."""
        for number, reference in list(self._lookers.items()):
            looker = reference()
            if looker is None or number not in looker.hazards:
                self._release(number)

    def _release(self, number: int) -> None:
        self._words[AT_HAZARDS + number] = 0
        if number not in self._free:
            self._free.append(number)
        self._words[AT_HAZARDS_USED] = HAZARDS - len(self._free)
        self._lookers.pop(number, None)
