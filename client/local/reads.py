"""Reads of blocks that lie in the DRAM of a node on this host, without asking it: find the place, copy, and look whether it was the block's
all the time. What is not found here is no miss: it is asked for the old way (client/reads/).

No call waits for anybody, but for another thread's copy; so `Client` and `AsyncClient` share them. Each is told which nodes are at hand
(LocalNodes.at_hand). A single block is read in one go, with hardly a call but those that do the work: each costs as much as a word of it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import xxhash

from kvstore.client.core.buffers import fresh_bytes
from kvstore.client.core.effects import Operation, work
from kvstore.client.local.nodes import LocalNode
from kvstore.client.local.reader_slots import LocalView
from kvstore.client.local.row_copies import by_slab, gather
from kvstore.client.local.shared_index import Flags, FoundBatch, Indexes, Place, SharedIndexReader
from kvstore.client.memory import Parts
from kvstore.client.memory import checksum as checksum_of
from kvstore.client.reads.sinks import Sink
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.shared_index import MAX_KEY_BYTES, ORDERED, Words, words_of
from kvstore.transfer.memory.memcpy import COPY_BYTES, MemcpyPool, Scatter

PIECE_BYTES: Final = 1 << 20
"""Larger values are copied in pieces, by several threads."""
MAX_WANTED: Final = 1024
ATTEMPTS: Final = 3
"""A block that moves while it is read is looked for again so often, before the node is asked."""
FEW_KEYS = 20
"""So many are read one by one, in 5 us each; what numpy does takes 35 us (misses) to 120 (values read) however few they are."""
FEW_ASKED = 12
"""As FEW_KEYS, where only whether they are here is asked: 3 us each, and 40."""

Nodes = Sequence[LocalNode]
_checksum: Final = xxhash.xxh3_64_intdigest


@dataclass(slots=True)
class LocalBatch:
    """What of a batch lies at one node: the keys' indexes, in order, and where."""

    node: LocalNode
    index: SharedIndexReader
    slabs: dict[int, memoryview]
    """Those in which they lie; another thread may have the node's unmapped meanwhile."""
    indexes: Indexes
    found: FoundBatch

    def only(self, chosen: Flags) -> "LocalBatch":
        return LocalBatch(self.node, self.index, self.slabs, self.indexes[chosen], self.found.only(chosen))


class LocalReads:
    """See the module. Thread-safe."""

    def __init__(self, copier: MemcpyPool, *, verify_bytes: int, verifies_all: bool) -> None:
        """Single values of up to `verify_bytes` are compared with their checksum once they are copied; all are if `verifies_all`, and
        where the processor may change the order of loads."""
        self._copier = copier
        self._verifies_all = verifies_all or not ORDERED
        self._verifies_views = verifies_all
        self.look_bytes = MAX_VALUE_BYTES if verifies_all else 0
        self._verify_bytes = 1 << 62 if self._verifies_all else verify_bytes
        self.wanted: deque[tuple[LocalNode, int]] = deque(maxlen=MAX_WANTED)
        """Slabs in which something was found, and which are not mapped. Any thread adds to it, and takes what it is to have mapped."""

    def take_wanted(self) -> dict[LocalNode, list[int]]:
        """The slabs that are to be mapped, by node: the caller's from here on."""
        wanted: dict[LocalNode, list[int]] = {}
        with suppress(IndexError):
            while True:
                node, slab = self.wanted.popleft()
                if slab not in wanted.setdefault(node, []):
                    wanted[node].append(slab)
        return wanted

    # --- one block ---

    def get(self, nodes: Nodes, key: bytes) -> bytes | None:
        """The value. None: it is to be asked for."""
        for node in nodes:
            for _ in range(ATTEMPTS):
                found = self._find(node, key)
                if found is None:
                    break
                index, (at, sequence, _, _, size, checksum, _), source = found
                if size < COPY_BYTES:
                    value = source.tobytes()
                else:
                    value, view = fresh_bytes(size)
                    self._copy(view, source)
                if index.words[at] == sequence:
                    if size <= self._verify_bytes and _checksum(value) != checksum:
                        break
                    node.desk.read_one(index, at, sequence, size)
                    return value
        return None

    def get_into(self, nodes: Nodes, key: bytes, view: memoryview) -> int | None:
        """The size of a value that is in `view` now. None: it is to be asked for; the view's content is undefined then."""
        for node in nodes:
            for _ in range(ATTEMPTS):
                found = self._find(node, key)
                if found is None:
                    break
                index, (at, sequence, _, _, size, checksum, _), source = found
                if size > len(view):
                    break
                room = view if size == len(view) else view[:size]
                if size < COPY_BYTES:
                    room[:] = source
                else:
                    self._copy(room, source)
                if index.words[at] == sequence:
                    if size <= self._verify_bytes and _checksum(room) != checksum:
                        break
                    node.desk.read_one(index, at, sequence, size)
                    return size
        return None

    def exists(self, nodes: Nodes, key: bytes) -> bool:
        """Whether it is here. False says nothing of elsewhere."""
        for node in nodes:
            if node.index.find(key) is not None:
                node.desk.asked()
                return True
        return False

    def look(self, nodes: Nodes, key: bytes) -> LocalView | None:
        """A view of the value. None: it is to be asked for. It touches about `look_bytes`."""
        for node in nodes:
            for _ in range(ATTEMPTS):
                found = self._find(node, key)
                if found is None:
                    break
                index, place, source = found
                hazard = node.desk.look(index, place)
                if hazard is not None and self._verifies_views and _checksum(source) != place[5]:
                    node.desk.look_away(hazard)
                    break
                if hazard is not None:
                    node.desk.read_one(index, place[0], place[1], place[4])
                    return LocalView(node.desk, hazard, source)
        return None

    def _find(self, node: LocalNode, key: bytes) -> tuple[SharedIndexReader, Place, memoryview] | None:
        """The node's index, what it says of the block, and where that says the value is. None: it is to be asked for."""
        index = node.index
        place = index.find(key)
        if place is None:
            return None
        _, _, slab, offset, size, _, _ = place
        memory = node.slabs.get(slab)
        if memory is None or offset + size > len(memory):
            self.wanted.append((node, slab))
            return None
        return index, place, memory[offset : offset + size]

    def _copy(self, destination: memoryview, source: memoryview) -> None:
        self._copier.copy(
            [(destination[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES]) for at in range(0, len(source), PIECE_BYTES)]
        )

    # --- many ---

    def read(self, nodes: Nodes, keys: Sequence[bytes], lengths: set[int], sink: Sink[Any]) -> Operation[list[int]]:
        """Have what is here in the sink; the indexes of the keys that are to be asked for, in order. `lengths` are those that keys have.

        Raises InvalidArgument for a value that has no room. After an error the content of the rooms is undefined.
        """
        if len(keys) <= FEW_KEYS:
            return (yield from self._read_few(nodes, keys, sink))
        is_read = np.zeros(len(keys), bool)
        desk = None
        for node, index, indexes, found in look_up(nodes, keys, lengths):
            batch = self._mapped(node, indexes[found.which], index, found)
            if not len(batch.indexes):
                continue
            yield from self._take(batch, sink)
            is_good = batch.index.still_batch(batch.found)
            if self._verifies_all:
                is_good &= yield from work(partial(_are_right, batch, sink), int(batch.found.sizes.sum()))
            batch = batch if is_good.all() else batch.only(is_good)
            sink.done_many(batch.indexes, batch.found.sizes)
            desk = node.desk
            desk.read_many(batch.index, batch.found)
            is_read[batch.indexes] = True
        if is_read.all():
            if desk is not None:
                desk.asked()
            return []
        left: list[int] = np.flatnonzero(~is_read).tolist()
        return left

    def _read_few(self, nodes: Nodes, keys: Sequence[bytes], sink: Sink[Any]) -> Operation[list[int]]:
        """As `read`."""
        found: list[tuple[int, LocalNode, SharedIndexReader, Place, Parts]] = []
        scatters: list[Scatter] = []
        for number, key in enumerate(keys):
            for node in nodes:
                here = self._find(node, key)
                if here is None:
                    continue
                index, place, source = here
                room = sink.room(number, len(source))
                scatters.append((source, room))
                found.append((number, node, index, place, room))
                break
        if not found:
            return list(range(len(keys)))
        # A single one may have been found to be wrong a moment ago: it is compared as a call for one key does.
        verify_bytes = self._verify_bytes if self._verifies_all or len(keys) == 1 else 0

        def copy() -> set[int]:
            self._copier.scatter(scatters)
            return {number for number, *_, place, room in found if place[4] <= verify_bytes and checksum_of(room) != place[5]}

        wrong = yield from work(copy, sum(place[4] for *_, place, _ in found))
        left = set(range(len(keys)))
        for number, node, index, (at, sequence, _, _, size, _, _), _ in found:
            if index.words[at] == sequence and number not in wrong:
                sink.done(number, size)
                node.desk.read_one(index, at, sequence, size, calls=0)
                left.discard(number)
        if not left:
            found[0][1].desk.asked()
        return sorted(left)

    def _take(self, batch: LocalBatch, sink: Sink[Any]) -> Operation[None]:
        """Copy the values of a batch to where the sink wants them."""
        sizes, rows = batch.found.sizes, sink.rows
        if rows is not None and (sizes == rows.shape[1]).all():
            slabs, offsets = batch.found.slabs, batch.found.offsets.view(np.int64)

            def gather_all() -> None:
                for slab, here in by_slab(slabs):
                    gather(batch.slabs[slab], offsets[here], rows, batch.indexes[here])

            yield from work(gather_all, int(sizes.sum()))
            return
        places = zip(batch.indexes.tolist(), _memory(batch), strict=True)
        scatters = [(memory, sink.room(index, len(memory))) for index, memory in places]
        yield from work(lambda: self._copier.scatter(scatters), int(sizes.sum()))

    def exists_batch(self, nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> Flags:
        """Which are here."""
        if len(keys) <= FEW_ASKED:
            is_here = np.array([any(node.index.find(key) is not None for node in nodes) for key in keys], bool)
        elif len(nodes) == 1 and len(lengths) == 1 and (length := min(lengths)) <= MAX_KEY_BYTES:  # as a rule
            is_here = nodes[0].index.exist_batch(words_of(keys, length), length)
        else:
            is_here = np.zeros(len(keys), bool)
            for length, indexes, words in _by_length(keys, lengths):
                for node in nodes:
                    found = node.index.exist_batch(words, length)
                    is_here[indexes] |= found
                    indexes, words = indexes[~found], words[~found]
        if nodes and is_here.all():
            nodes[0].desk.asked()
        return is_here

    def _mapped(self, node: LocalNode, indexes: Indexes, index: SharedIndexReader, found: FoundBatch) -> LocalBatch:
        """What was found in slabs that are mapped; the others are wanted."""
        slabs = {slab: node.slabs.get(slab) for slab, _ in by_slab(found.slabs)}
        mapped = {slab: memory for slab, memory in slabs.items() if memory is not None}
        batch = LocalBatch(node, index, mapped, indexes, found)
        missing = [slab for slab in slabs if slab not in mapped]
        if missing:
            self.wanted.extend((node, slab) for slab in missing)
            batch = batch.only(~np.isin(found.slabs, np.array(missing, np.uint64)))
        return batch


def look_up(nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> Iterator[tuple[LocalNode, SharedIndexReader, Indexes, FoundBatch]]:
    """Each node's answer: (node, its index, indexes of the keys looked for, what was found). A key found is looked for no more."""
    for length, indexes, words in _by_length(keys, lengths):
        for number, node in enumerate(nodes, 1):
            index = node.index
            found = index.find_batch(words, length)
            if len(found.which):
                yield node, index, indexes, found
            if number == len(nodes) or len(found.which) == len(indexes):
                break
            indexes, words = np.delete(indexes, found.which), np.delete(words, found.which, axis=0)


def _memory(batch: LocalBatch) -> Iterator[memoryview]:
    slabs, found = batch.slabs, batch.found
    for slab, offset, size in zip(found.slabs.tolist(), found.offsets.tolist(), found.sizes.tolist(), strict=True):
        yield slabs[slab][offset : offset + size]


def _are_right(batch: LocalBatch, sink: Sink[Any]) -> Flags:
    """Which of the values that were copied have the checksums they should."""
    rows = zip(batch.indexes.tolist(), batch.found.sizes.tolist(), batch.found.checksums.tolist(), strict=True)
    return np.array([checksum_of(sink.room(index, size)) == checksum for index, size, checksum in rows], bool)


def _by_length(keys: Sequence[bytes], lengths: set[int]) -> Iterator[tuple[int, Indexes, Words]]:
    """Keys that can be shown, those of one length together: it, their indexes, and their words. As a rule all keys have one."""
    everything = np.arange(len(keys))
    if len(lengths) == 1:
        [length] = lengths
        if length <= MAX_KEY_BYTES:
            yield length, everything, words_of(keys, length)
        return
    of_key = np.fromiter(map(len, keys), np.int64, len(keys))
    for length in lengths:
        indexes = everything[of_key == length]
        if length <= MAX_KEY_BYTES and len(indexes):
            yield length, indexes, words_of([keys[index] for index in indexes.tolist()], length)
