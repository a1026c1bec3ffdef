"""Reader side of the reader slots, this client's page in a node's shared memory (protocol/shared_index.py).

The page holds hazard pointers, which protect slots while they are read, and rings of accesses and holds that the node
drains. One lock guards the page and the counters for `stats`. It is released between the store of a hazard pointer and
the validation of the entry; the release is also the full memory fence that these two steps need.
"""

import os
import threading

import numpy as np

from kvstore.client.core.forks import ForkGeneration
from kvstore.client.local.shared_index import FoundBatch, IndexEntry, SharedIndexReader
from kvstore.protocol.errors import Broken, InvalidArgument, LeaseExpired
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
    HAZARD_SERIALS,
    HAZARDS,
    HOLD_HEADER_WORDS,
    HOLD_WORDS,
    MAGIC,
    READER_SLOTS_BYTES,
    Words,
)
from kvstore.transfer.memory.mapped_memory import map_slab


class Hazard:
    """One hazard pointer of the page: a word that names the protected slot.

    Its owner is the reader that acquired it, or the free list. A hazard that is lost because a signal handler raised
    between two steps clears its word when it is collected; the page then creates another.
    """

    __slots__ = ("_lost", "_process", "_words", "at", "is_lent")

    def __init__(self, words: memoryview, lost: list[int]) -> None:
        """Take the last word of `lost`. Raises IndexError if none is left.

        The body calls nothing: a signal handler can raise before the word is taken or after it is owned, not in
        between.
        """
        self._process = ForkGeneration.number
        self._words = words
        self._lost = lost
        self.is_lent = False
        self.at = lost[-1]
        del lost[-1]

    def __del__(self) -> None:
        # Without `at`, a signal struck before a word was taken. In a forked child the page is the parent's.
        if hasattr(self, "at") and self._process == ForkGeneration.number:
            self._words[self.at] = 0
            self._lost.append(self.at)


class LocalReaderSlots:
    """This client's reader slots at one node. Thread-safe."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the page behind `fd`, which stays the caller's. Raises Broken: not reader slots, or those of another
        release."""
        memory = map_slab(os.dup(fd), size_bytes, writable=True).memory
        self._words = memory.cast("Q")
        if size_bytes != READER_SLOTS_BYTES or self._words[AT_READER_MAGIC] != MAGIC:
            raise Broken("the reader slots of a local node have an unknown format: run client and node of the same release")
        self._ring: Words = np.frombuffer(memory, np.uint64)[AT_RING : AT_RING + ACCESSES]
        self._holds: Words = np.frombuffer(memory, np.uint64)[AT_HOLDS : AT_HOLDS + HOLD_WORDS]
        self._lock = threading.Lock()
        self._process = ForkGeneration.number
        self._begun = self._written = self._words[AT_ACCESSES_WRITTEN]
        self._lost_before = self._words[AT_ACCESSES_LOST]
        self._unheld_before = self._words[AT_HOLDS_MISSED]
        self._free_until = 0
        """End of the known free space of the access ring: the node's read position when last loaded, plus ACCESSES."""
        self._free: list[Hazard] = []
        self._lost = list(range(AT_HAZARDS, AT_HAZARDS + HAZARDS))
        """Words without a Hazard object."""
        self._looks = 0
        self.bytes_in = 0
        self.calls = 0

    @property
    def hits(self) -> int:
        """Blocks read through this page."""
        return self._written - self._begun + self._words[AT_ACCESSES_LOST] - self._lost_before

    @property
    def unheld(self) -> int:
        """Blocks that the node refused to hold."""
        return self._words[AT_HOLDS_MISSED] - self._unheld_before

    @property
    def is_over(self) -> bool:
        """Return whether the node closed the connection: views are no longer protected."""
        return bool(self._words[AT_READER_CLOSED])

    def read_one(self, index: SharedIndexReader, at: int, sequence: int, size_bytes: int, calls: int = 1) -> None:
        """Record the access of one block. `calls` 0: the caller counts the call itself."""
        words = self._words
        with self._lock:
            self.calls += calls
            self.bytes_in += size_bytes
            written = self._written
            if written >= self._free_until and not self._free_entries():
                words[AT_ACCESSES_LOST] += 1
                return
            words[AT_RING + written % ACCESSES] = (at - index.entries) // index.entry_words | (sequence & 0xFFFF_FFFF) << 32
            self._written = words[AT_ACCESSES_WRITTEN] = written + 1

    def _free_entries(self) -> int:
        """Free entries of the access ring."""
        self._free_until = self._words[AT_ACCESSES_READ] + ACCESSES
        return max(0, self._free_until - self._written)

    def count_call(self) -> None:
        """Count a call that was served without a request."""
        with self._lock:
            self.calls += 1

    def read_many(self, index: SharedIndexReader, found: FoundBatch) -> None:
        """Record accesses of blocks, in order. Accesses that do not fit the ring are counted as lost."""
        words = index.access_words(found)
        with self._lock:
            self.bytes_in += int(found.sizes.sum())
            free_entries = self._free_entries()
            self._words[AT_ACCESSES_LOST] += max(0, len(words) - free_entries)
            words = words[:free_entries]
            begin = self._written % ACCESSES
            first = words[: ACCESSES - begin]
            self._ring[begin : begin + len(first)] = first
            self._ring[: len(words) - len(first)] = words[len(first) :]
            self._written += len(words)
            self._words[AT_ACCESSES_WRITTEN] = self._written

    def acquire_hazard(self, index: SharedIndexReader, entry: IndexEntry) -> Hazard | None:
        """Protect the slot of `entry` until `release_hazard`, or until the hazard is collected.

        None: the entry has changed, the connection is closed, or all hazard pointers are in use.
        """
        words = self._words
        try:
            hazard = self._free.pop() if self._free else Hazard(words, self._lost)
        except IndexError:
            return None
        with self._lock:
            words[AT_HAZARDS_USED] = HAZARDS - len(self._free) - len(self._lost)
            self._looks = (self._looks + 1) % HAZARD_SERIALS
            hazard.is_lent = True
            words[hazard.at] = entry[-1] + 1 | self._looks << HAZARD_SERIAL_SHIFT
        if index.words[entry[0]] != entry[1] or words[AT_READER_CLOSED]:
            self.release_hazard(hazard)
            return None
        return hazard

    def release_hazard(self, hazard: Hazard) -> None:
        """End the protection. A second call is a no-op, as is a call in a forked child: the page is its parent's."""
        if self._process != ForkGeneration.number:
            return
        words = self._words
        with self._lock:
            if hazard.is_lent:
                hazard.is_lent = False
                words[hazard.at] = 0
                self._free.append(hazard)
                words[AT_HAZARDS_USED] = HAZARDS - len(self._free) - len(self._lost)

    def hold(self, number: int, until_ns: int, accesses: Words) -> bool:
        """Have the node keep these blocks, named by `SharedIndexReader.access_words`, until `until_ns`
        (CLOCK_MONOTONIC) or `release`.

        Blocks whose entries are unchanged afterwards are held. False: the ring is full, and none is held.
        """
        record = np.empty(HOLD_HEADER_WORDS + len(accesses), np.uint64)
        record[:HOLD_HEADER_WORDS] = number, until_ns, len(accesses)
        record[HOLD_HEADER_WORDS:] = accesses
        return self._write_hold(record)

    def release(self, number: int) -> bool:
        """End that hold. False: the ring is full, and the hold ends at its time."""
        return self._write_hold(np.array((number, 0, 0), np.uint64))

    def _write_hold(self, record: Words) -> bool:
        words, size = self._words, len(record)
        if self._process != ForkGeneration.number:
            return False
        with self._lock:
            written = words[AT_HOLDS_WRITTEN]
            if written + size - words[AT_HOLDS_READ] > HOLD_WORDS or words[AT_READER_CLOSED]:
                return False
            begin = written % HOLD_WORDS
            first = record[: HOLD_WORDS - begin]
            self._holds[begin : begin + len(first)] = first
            self._holds[: size - len(first)] = record[len(first) :]
            words[AT_HOLDS_WRITTEN] = written + size
        return True


class LocalView:
    """View of a value in a node's DRAM, protected by a hazard pointer. `memory` is read-only. Collecting the view
    releases the hazard."""

    __slots__ = ("_hazard", "_reader_slots", "memory")

    def __init__(self, reader_slots: LocalReaderSlots, hazard: Hazard, memory: memoryview) -> None:
        self._reader_slots = reader_slots
        self._hazard = hazard
        self.memory = memory

    def close(self) -> None:
        """End the view and release its memory. Call once.

        Raises LeaseExpired if the connection closed before, so that the bytes read may be another value's. Raises
        InvalidArgument if another object still exports the memory, as far as Python can tell (a numpy array goes
        unseen).
        """
        in_time = not self._reader_slots.is_over
        try:
            self.memory.release()
            still_used = False
        except BufferError:
            still_used = True
        self._reader_slots.release_hazard(self._hazard)
        if not in_time:
            raise LeaseExpired("the connection to the view's node broke while the view was open: discard what was read")
        if still_used:
            raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")
