"""Reader slots: one local client's page in shared memory, with its hazard pointers, access ring and holds. The client
writes, the node reads.

The content is not trusted. A client that writes nonsense protects at most HAZARDS slots of its own tenant, and holds at
most what any client may.
"""

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore.protocol.shared_index import (
    ACCESSES,
    AT_ACCESSES_LOST,
    AT_ACCESSES_READ,
    AT_ACCESSES_WRITTEN,
    AT_HAZARDS,
    AT_HAZARDS_USED,
    AT_HOLDS,
    AT_HOLDS_MISSED,
    AT_HOLDS_READ,
    AT_HOLDS_WRITTEN,
    AT_READER_CLOSED,
    AT_READER_MAGIC,
    AT_RING,
    HAZARD_SERIAL_SHIFT,
    HAZARDS,
    HOLD_HEADER_WORDS,
    HOLD_WORDS,
    MAGIC,
    READER_SLOTS_BYTES,
)
from kvstore.store.shared_memory import make_shared_memory

_SLOT_MASK: Final = (1 << HAZARD_SERIAL_SHIFT) - 1
MAX_LOST: Final = 1 << 32
"""Larger numbers of lost accesses are capped."""


class HoldRecord(NamedTuple):
    """Recorded hold of blocks until `until_ns`; 0 releases the number."""

    number: int
    until_ns: int
    words: list[int]


def slot_of(word: int) -> int:
    """Return the slot of a hazard word."""
    return (word & _SLOT_MASK) - 1


class ReaderSlots:
    """Reader slots of a connection. Not thread-safe: called from the node's loop."""

    def __init__(self) -> None:
        """Raises TierFailed: the system has no descriptor or memory left."""
        self.fd, memory = make_shared_memory("desk", READER_SLOTS_BYTES, mode=0o600)
        self._words = memory.cast("Q")
        self._hazards = self._words[AT_HAZARDS : AT_HAZARDS + HAZARDS]
        self._ring = self._words[AT_RING : AT_RING + ACCESSES]
        self._holds = self._words[AT_HOLDS : AT_HOLDS + HOLD_WORDS]
        self._taken = 0
        self._lost = 0
        self._holds_taken = 0
        self._words[AT_READER_MAGIC] = MAGIC

    def export(self) -> int:
        """Return a new descriptor for the client; the caller closes it."""
        return os.dup(self.fd)

    def hazards(self) -> list[int]:
        """Return the hazard words in use. After a fence that followed the removal of a block from the index, the
        absence of its slot is final."""
        return list(filter(None, self._hazards.tolist())) if self._words[AT_HAZARDS_USED] else []

    def hazards_on(self, slot: int) -> list[int]:
        """Return the hazard words on the slot."""
        if not self._words[AT_HAZARDS_USED]:
            return []
        return [word for word in self.hazards() if word & _SLOT_MASK == slot + 1]

    def has_hazard(self, word: int) -> bool:
        """Return True if this very hazard is still set."""
        return word in self._hazards

    def accesses(self, most: int) -> Iterator[int]:
        """Iterate over new access words, oldest first, at most `most`; see `SharedIndexTable.accessed`."""
        written = self._words[AT_ACCESSES_WRITTEN]
        count = written - self._taken
        if not 0 < count <= ACCESSES:
            self._taken = written  # nothing, or an invalid count
            return
        begin = self._taken % ACCESSES
        count = min(count, most, ACCESSES - begin)
        found = self._ring[begin : begin + count].tolist()
        self._taken += count
        self._words[AT_ACCESSES_READ] = self._taken
        yield from found

    def newly_lost(self) -> int:
        """Accesses since the last call that did not fit into the ring."""
        lost, self._lost = self._words[AT_ACCESSES_LOST] - self._lost, self._words[AT_ACCESSES_LOST]
        return max(0, min(lost, MAX_LOST))

    @property
    def has_holds(self) -> bool:
        return self._words[AT_HOLDS_WRITTEN] != self._holds_taken

    def hold_records(self) -> list[HoldRecord]:
        """Return new hold records, oldest first. Everything after an invalid one is dropped."""
        written, at = self._words[AT_HOLDS_WRITTEN], self._holds_taken
        found: list[HoldRecord] = []
        if 0 < written - at <= HOLD_WORDS:
            begin = at % HOLD_WORDS
            words = (self._holds[begin:].tolist() + self._holds[:begin].tolist())[: written - at]
            at = 0
            while at + HOLD_HEADER_WORDS <= len(words):
                number, until_ns, count = words[at : at + HOLD_HEADER_WORDS]
                at += HOLD_HEADER_WORDS + count
                if at > len(words):
                    break
                found.append(HoldRecord(number, until_ns, words[at - count : at]))
        self._holds_taken = self._words[AT_HOLDS_READ] = written
        return found

    def not_held(self, blocks: int) -> None:
        """Add to the client's count of blocks whose hold was refused."""
        self._words[AT_HOLDS_MISSED] += blocks

    @property
    def has_accesses(self) -> bool:
        return self._words[AT_ACCESSES_WRITTEN] != self._taken

    @property
    def is_closed(self) -> bool:
        return self.fd < 0

    def close(self) -> None:
        """Close the reader slots; their hazards end. A second close is a no-op."""
        if self.fd >= 0:
            self._words[AT_READER_CLOSED] = 1
            os.close(self.fd)
            self.fd = -1
