"""Reads of blocks that lie in the DRAM of a node on this host, without asking it: find the place, copy, and look whether it was the block's
all the time. What is not found here is no miss: it is asked for the old way (client/reads/).

No call waits for anybody, but for another thread's copy; so `Client` and `AsyncClient` share them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client.buffers import Destination, fresh_bytes
from kvstore.client.effects import Operation, work
from kvstore.client.local.index import Flags, Found, FoundBatch, IndexView, is_showable
from kvstore.client.local.nodes import LocalNode, LocalNodes
from kvstore.client.local.view import LocalView
from kvstore.client.reads.sinks import Sink
from kvstore.protocol.shown_index import MAX_KEY_BYTES, ORDERED, Words, words_of
from kvstore.transfer.memory.memcpy import COPY_BYTES, MemcpyPool

PIECE_BYTES: Final = 1 << 20
"""Larger values are copied in pieces, by several threads."""
MAX_WANTED: Final = 1024
ATTEMPTS: Final = 3
"""A block that moves while it is read is looked for again so often, before the node is asked."""


Indexes = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]


@dataclass(slots=True)
class LocalBatch:
    """What of a batch lies at one node: the keys' indexes, in order, and where."""

    node: LocalNode
    index: IndexView
    slabs: dict[int, memoryview]
    """Those in which they lie; another thread may have the node's unmapped meanwhile."""
    indexes: Indexes
    found: FoundBatch

    def only(self, which: Flags) -> "LocalBatch":
        return LocalBatch(self.node, self.index, self.slabs, self.indexes[which], self.found.only(which))


class LocalReads:
    """See the module. Thread-safe."""

    def __init__(self, nodes: LocalNodes, copier: MemcpyPool, *, verify_bytes: int) -> None:
        """Values of up to `verify_bytes` are compared with their checksum once they are copied; where the processor may change the order
        of loads, all are."""
        self._nodes = nodes
        self._copier = copier
        self._verify_bytes = verify_bytes if ORDERED else 1 << 62
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

    def get(self, key: bytes) -> bytes | None:
        """The value. None: it is to be asked for."""
        for node in self._nodes.fresh():
            for _ in range(ATTEMPTS):
                place = self._find(node, key)
                if place is None:
                    break
                index, found, memory = place
                if found.size < COPY_BYTES:
                    value = bytes(memory)
                else:
                    value, view = fresh_bytes(found.size)
                    self._copy(view, memory)
                if index.still(found):
                    if found.size <= self._verify_bytes and xxhash.xxh3_64_intdigest(value) != found.checksum:
                        break
                    node.desk.read_one(index, found)
                    return value
        return None

    def get_into(self, key: bytes, destination: Destination) -> int | None:
        """The size of a value that is in `destination` now. None: it is to be asked for; the destination's content is undefined then."""
        view = destination.view
        for node in self._nodes.fresh():
            for _ in range(ATTEMPTS):
                place = self._find(node, key)
                if place is None or place[1].size > len(view):
                    break
                index, found, memory = place
                room = view if found.size == len(view) else view[: found.size]
                if found.size < COPY_BYTES:
                    room[:] = memory
                else:
                    self._copy(room, memory)
                if index.still(found):
                    if found.size <= self._verify_bytes and xxhash.xxh3_64_intdigest(room) != found.checksum:
                        break
                    node.desk.read_one(index, found)
                    if destination.finish is not None:
                        destination.finish()
                    return found.size
        return None

    def exists(self, key: bytes) -> bool:
        """Whether it is here. False says nothing of elsewhere."""
        for node in self._nodes.fresh():
            if is_showable(key) and node.index.find(key) is not None:
                node.desk.asked()
                return True
        return False

    def look(self, key: bytes, view: LocalView) -> bool:
        """Have the view show the value. False: it is to be asked for."""
        for node in self._nodes.fresh():
            for _ in range(ATTEMPTS):
                place = self._find(node, key)
                if place is None:
                    break
                index, found, memory = place
                view.desk = node.desk
                if node.desk.look(index, found, view):
                    node.desk.read_one(index, found)
                    view.memory = memory
                    return True
                view.look_away()
        return False

    def _find(self, node: LocalNode, key: bytes) -> tuple[IndexView, Found, memoryview] | None:
        index = node.index
        found = index.find(key)
        if found is None:
            return None
        slab = node.slabs.get(found.slab)
        if slab is None or found.offset + found.size > len(slab):
            self.wanted.append((node, found.slab))
            return None
        return index, found, slab[found.offset : found.offset + found.size]

    def _copy(self, destination: memoryview, source: memoryview) -> None:
        self._copier.copy(
            [(destination[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES]) for at in range(0, len(source), PIECE_BYTES)]
        )

    # --- many ---

    def read(self, keys: Sequence[bytes], sink: Sink[Any]) -> Operation[list[int]]:
        """Have what is here in the sink; the indexes of the keys that are to be asked for, in order.

        Raises InvalidArgument for a value that has no room. After an error the content of the rooms is undefined.
        """
        is_read = np.zeros(len(keys), bool)
        desk = None
        for node, index, indexes, found in self._look(keys):
            batch = self._mapped(node, indexes[found.is_there], index, found)
            if not len(batch.indexes):
                continue
            yield from self._take(batch, sink)
            is_good = batch.index.still_batch(batch.found)
            if not ORDERED:
                is_good &= self._are_right(batch, sink)
            batch = batch if is_good.all() else batch.only(is_good)
            sink.done_many(batch.indexes, batch.found.sizes)
            desk = node.desk
            desk.read_many(batch.index, batch.found)
            is_read[batch.indexes] = True
        if desk is not None and is_read.all():
            desk.asked()
        left: list[int] = [] if is_read.all() else np.flatnonzero(~is_read).tolist()
        return left

    def _take(self, batch: LocalBatch, sink: Sink[Any]) -> Operation[None]:
        """Copy the values of a batch to where the sink wants them."""
        sizes, rows = batch.found.sizes, sink.rows
        if rows is not None and (sizes == rows.shape[1]).all():
            slabs, offsets = batch.found.slabs, batch.found.offsets.astype(np.int64)

            def gather() -> None:
                for slab in np.unique(slabs).tolist():
                    here = np.flatnonzero(slabs == slab)
                    _gather(batch.slabs[slab], offsets[here], rows, batch.indexes[here])

            yield from work(gather, int(sizes.sum()))
            return
        places = zip(batch.indexes.tolist(), self._memory(batch), strict=True)
        pairs = [(sink.room(index, len(memory)), memory) for index, memory in places]
        yield from work(lambda: self._copier.copy(pairs), int(sizes.sum()))

    def exists_batch(self, keys: Sequence[bytes]) -> Flags:
        """Which are here."""
        is_here = np.zeros(len(keys), bool)
        nodes = self._nodes.fresh()
        for length, indexes, words in _by_length(keys):
            for node in nodes:
                found = node.index.exist_batch(words, length)
                is_here[indexes] |= found
                if found.all():
                    break
                indexes, words = indexes[~found], words[~found]
        if nodes and is_here.all():
            nodes[0].desk.asked()
        return is_here

    def _look(self, keys: Sequence[bytes]) -> Iterator[tuple[LocalNode, IndexView, Indexes, FoundBatch]]:
        """Each node's answer: (node, its index, indexes of the keys looked for, what was found). A key found is looked for no more."""
        nodes = self._nodes.fresh()
        for length, indexes, words in _by_length(keys):
            for node in nodes:
                index = node.index
                found = index.find_batch(words, length)
                yield node, index, indexes, found
                if found.is_there.all():
                    break
                indexes, words = indexes[~found.is_there], words[~found.is_there]

    def _mapped(self, node: LocalNode, indexes: Indexes, index: IndexView, found: FoundBatch) -> LocalBatch:
        """What was found in slabs that are mapped; the others are wanted."""
        slabs = {slab: node.slabs.get(slab) for slab in np.unique(found.slabs).tolist()}
        mapped = {slab: memory for slab, memory in slabs.items() if memory is not None}
        batch = LocalBatch(node, index, mapped, indexes, found)
        missing = [slab for slab in slabs if slab not in mapped]
        if missing:
            self.wanted.extend((node, slab) for slab in missing)
            batch = batch.only(~np.isin(found.slabs, np.array(missing, np.uint64)))
        return batch

    def _memory(self, batch: LocalBatch) -> Iterator[memoryview]:
        slabs, found = batch.slabs, batch.found
        for slab, offset, size in zip(found.slabs.tolist(), found.offsets.tolist(), found.sizes.tolist(), strict=True):
            yield slabs[slab][offset : offset + size]

    def _are_right(self, batch: LocalBatch, sink: Sink[Any]) -> Flags:
        """Which of the values that were copied have the checksums they should."""
        rows = zip(batch.indexes.tolist(), batch.found.sizes.tolist(), batch.found.checksums.tolist(), strict=True)
        return np.array([xxhash.xxh3_64_intdigest(sink.room(index, size)) == checksum for index, size, checksum in rows], bool)


def _by_length(keys: Sequence[bytes]) -> Iterator[tuple[int, Indexes, Words]]:
    """Keys that can be shown, those of one length together: it, their indexes, and their words. As a rule all keys have one."""
    lengths = set(map(len, keys))
    everything = np.arange(len(keys))
    if len(lengths) == 1:
        [length] = lengths
        if length <= MAX_KEY_BYTES:
            yield length, everything, words_of(keys, length)
        return
    of_key = np.fromiter(map(len, keys), np.int64, len(keys))
    for length in lengths:
        if length <= MAX_KEY_BYTES:
            indexes = everything[of_key == length]
            yield length, indexes, words_of([keys[index] for index in indexes.tolist()], length)


def _gather(slab: memoryview, offsets: Indexes, rows: Rows, indexes: Indexes) -> None:
    """Copy what lies at the offsets into those rows, all in one call where that is possible."""
    row_bytes = rows.shape[1]
    memory = np.frombuffer(slab, np.uint8)
    if (offsets % row_bytes).any():
        for index, offset in zip(indexes.tolist(), offsets.tolist(), strict=True):
            rows[index] = memory[offset : offset + row_bytes]
        return
    source = memory[: len(memory) // row_bytes * row_bytes].reshape(-1, row_bytes)
    positions = offsets // row_bytes
    if indexes[-1] - indexes[0] == len(indexes) - 1:
        np.take(source, positions, axis=0, out=rows[indexes[0] : indexes[-1] + 1], mode="clip")
    else:
        rows[indexes] = source[positions]
