"""The client's side of its desk at a node of this host (protocol/shared_index.py): what it has read, and what it is looking at.

It counts what it said for `stats`, too. One lock guards both; it is given back between the store of a hazard and the look at the entry
that follows, and so is the full fence that these two need.
"""

import os
import threading

import numpy as np

from kvstore.client.core.forks import ForkGeneration
from kvstore.client.local.shared_index import FoundBatch, Place, SharedIndexReader
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
from kvstore.transfer.memory.mapping import map_slab


class Hazard:
    """One of a desk's words that say what is looked at. Whoever looks has it, or the desk. Where it is lost, for a signal handler raised
    between any two steps, it ends by itself what it says, and the desk makes another one.
    """

    __slots__ = ("_lost", "_process", "_words", "at", "is_lent")

    def __init__(self, words: memoryview, lost: list[int]) -> None:
        """Takes the last of the `lost`. Raises IndexError: there is none.

        It calls nothing, so that a signal handler can raise before it has taken one, and after the word is its own, but not between.
        """
        self._process = ForkGeneration.number
        self._words = words
        self._lost = lost
        self.is_lent = False
        self.at = lost[-1]
        del lost[-1]

    def __del__(self) -> None:
        # One that has taken none was struck before. In a forked child the desk is the parent's.
        if hasattr(self, "at") and self._process == ForkGeneration.number:
            self._words[self.at] = 0
            self._lost.append(self.at)


class LocalReaderSlots:
    """See the module. Thread-safe."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes no ownership of `fd`. Raises Broken: it is no desk, or not one of this release."""
        memory = map_slab(os.dup(fd), size_bytes, writable=True).memory
        self._words = memory.cast("Q")
        if size_bytes != READER_SLOTS_BYTES or self._words[AT_READER_MAGIC] != MAGIC:
            raise Broken("a node of this host has desks in a form that this release does not know")
        self._ring: Words = np.frombuffer(memory, np.uint64)[AT_RING : AT_RING + ACCESSES]
        self._holds: Words = np.frombuffer(memory, np.uint64)[AT_HOLDS : AT_HOLDS + HOLD_WORDS]
        self._lock = threading.Lock()
        self._process = ForkGeneration.number
        self._begun = self._written = self._words[AT_ACCESSES_WRITTEN]
        self._lost_before = self._words[AT_ACCESSES_LOST]
        self._unheld_before = self._words[AT_HOLDS_MISSED]
        self._room_until = 0
        """The node had taken what stood before this, less ACCESSES, when it was last looked at."""
        self._free: list[Hazard] = []
        self._lost = list(range(AT_HAZARDS, AT_HAZARDS + HAZARDS))
        """Words of hazards that are no more, or not yet."""
        self._looks = 0
        self.bytes_in = 0
        self.calls = 0

    @property
    def hits(self) -> int:
        """Blocks read here."""
        return self._written - self._begun + self._words[AT_ACCESSES_LOST] - self._lost_before

    @property
    def unheld(self) -> int:
        """Blocks that the node did not hold, of those that `hold` had room for."""
        return self._words[AT_HOLDS_MISSED] - self._unheld_before

    @property
    def is_over(self) -> bool:
        """The node has ended the connection: nothing is kept for its views any more."""
        return bool(self._words[AT_READER_CLOSED])

    def read_one(self, index: SharedIndexReader, at: int, sequence: int, size_bytes: int, calls: int = 1) -> None:
        """A block was read, by a call of its own unless `calls` is 0."""
        words = self._words
        with self._lock:
            self.calls += calls
            self.bytes_in += size_bytes
            written = self._written
            if written >= self._room_until and not self._room():
                words[AT_ACCESSES_LOST] += 1
                return
            words[AT_RING + written % ACCESSES] = (at - index.entries) // index.entry_words | (sequence & 0xFFFF_FFFF) << 32
            self._written = words[AT_ACCESSES_WRITTEN] = written + 1

    def _room(self) -> int:
        """For how many accesses the ring has room now."""
        self._room_until = self._words[AT_ACCESSES_READ] + ACCESSES
        return max(0, self._room_until - self._written)

    def asked(self) -> None:
        """A call is over that asked nobody."""
        with self._lock:
            self.calls += 1

    def read_many(self, index: SharedIndexReader, found: FoundBatch) -> None:
        """Blocks were read, in order."""
        words = index.access_words(found)
        with self._lock:
            self.bytes_in += int(found.sizes.sum())
            room = self._room()
            self._words[AT_ACCESSES_LOST] += max(0, len(words) - room)
            words = words[:room]
            begin = self._written % ACCESSES
            first = words[: ACCESSES - begin]
            self._ring[begin : begin + len(first)] = first
            self._ring[: len(words) - len(first)] = words[len(first) :]
            self._written += len(words)
            self._words[AT_ACCESSES_WRITTEN] = self._written

    def look(self, index: SharedIndexReader, place: Place) -> Hazard | None:
        """Keep the node from reusing what was found, until `look_away` or the end of the hazard, whatever is raised meanwhile.

        None: the place is another block's by now, or the node hung up, or as much is looked at as can be.
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
            words[hazard.at] = place[-1] + 1 | self._looks << HAZARD_SERIAL_SHIFT
        if index.words[place[0]] != place[1] or words[AT_READER_CLOSED]:
            self.look_away(hazard)
            return None
        return hazard

    def look_away(self, hazard: Hazard) -> None:
        """What was looked at is used no more. A second call is a no-op, and so is one of a forked child: the desk is its parent's."""
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
        """Have the node keep these blocks, as `SharedIndexReader.access_words` names them, until then
        (CLOCK_MONOTONIC), or until `release`.

        Blocks whose entries are the same afterwards as when they were found had not begun to leave before the node could see this. False:
        the ring has no room for all of them, and none is held.
        """
        record = np.empty(HOLD_HEADER_WORDS + len(accesses), np.uint64)
        record[:HOLD_HEADER_WORDS] = number, until_ns, len(accesses)
        record[HOLD_HEADER_WORDS:] = accesses
        return self._write_hold(record)

    def release(self, number: int) -> bool:
        """End that hold. False: the ring has no room, and it ends at its time."""
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
    """A value looked at where it lies in a node's DRAM, without a lease. `memory` is read-only. Dropped without an end, it looks away with
    its hazard."""

    __slots__ = ("_desk", "_hazard", "memory")

    def __init__(self, desk: LocalReaderSlots, hazard: Hazard, memory: memoryview) -> None:
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
