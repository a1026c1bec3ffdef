"""Lock-free reads of blocks in the DRAM of a node on this host.

A read looks the key up in the node's shared-memory index, copies the value and validates the entry's sequence number
(seqlock). A key that is not found is not a miss: it falls through to client/reads/: location cache or
master, then a node.

Calls do not block, but for a copy in another thread, so `Client` and `AsyncClient` share this code. Callers pass the
readable nodes (`LocalNodes.cached_fresh`). Single reads are inlined, because each further call costs as much as one
word of the read.
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
from kvstore.client.local.shared_index import Flags, FoundBatch, IndexEntry, Indexes, SharedIndexReader
from kvstore.client.memory import Parts
from kvstore.client.memory import checksum as checksum_of
from kvstore.client.reads.sinks import Sink
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.shared_index import MAX_KEY_BYTES, ORDERED, Words, words_of
from kvstore.transfer.memory.memcpy import COPY_BYTES, MemcpyPool, Scatter

PIECE_BYTES: Final = 1 << 20
"""Unit of parallel copies of larger values."""
MAX_UNMAPPED_SLABS: Final = 1024
MAX_LOOKUPS: Final = 3
"""Lookups per read when concurrent writers change the entry, before client/reads/ takes over."""
FEW_KEYS = 20
"""Batches up to this size are read key by key, 5 us each. The numpy path takes 35 us (misses) to 120 us (reads) at
least."""
FEW_EXISTS_KEYS = 12
"""As FEW_KEYS, for `exists_batch`: 3 us each, against 40 us."""

Nodes = Sequence[LocalNode]
_checksum: Final = xxhash.xxh3_64_intdigest


@dataclass(slots=True)
class LocalBatch:
    """The part of a batch that one node has: key indexes, in order, and their index entries."""

    node: LocalNode
    index: SharedIndexReader
    slabs: dict[int, memoryview]
    """Mapped slabs of these entries; another thread may unmap the node's meanwhile."""
    indexes: Indexes
    found: FoundBatch

    def only(self, chosen: Flags) -> "LocalBatch":
        return LocalBatch(self.node, self.index, self.slabs, self.indexes[chosen], self.found.only(chosen))


class LocalReads:
    """Reads, views and lookups in the local indexes. Thread-safe."""

    def __init__(self, copier: MemcpyPool, *, verify_bytes: int, verifies_all: bool) -> None:
        """Single values of up to `verify_bytes` are verified by checksum after the copy. All values are, with
        `verifies_all` or where the processor may reorder loads."""
        self._copier = copier
        self._verifies_all = verifies_all or not ORDERED
        self._verifies_views = verifies_all
        self.view_bytes = MAX_VALUE_BYTES if verifies_all else 0
        self._verify_bytes = 1 << 62 if self._verifies_all else verify_bytes
        self.unmapped_slabs: deque[tuple[LocalNode, int]] = deque(maxlen=MAX_UNMAPPED_SLABS)
        """Slabs that a read needed and that are not mapped. Any thread appends; `take_unmapped_slabs` drains."""

    def take_unmapped_slabs(self) -> dict[LocalNode, list[int]]:
        """Drain the slabs to be mapped, by node."""
        unmapped_slabs: dict[LocalNode, list[int]] = {}
        with suppress(IndexError):
            while True:
                node, slab = self.unmapped_slabs.popleft()
                if slab not in unmapped_slabs.setdefault(node, []):
                    unmapped_slabs[node].append(slab)
        return unmapped_slabs

    # --- one block ---

    def get(self, nodes: Nodes, key: bytes) -> bytes | None:
        """Return a copy of the value, or None if it is not readable locally."""
        for node in nodes:
            for _ in range(MAX_LOOKUPS):
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
                    node.reader_slots.read_one(index, at, sequence, size)
                    return value
        return None

    def get_into(self, nodes: Nodes, key: bytes, view: memoryview) -> int | None:
        """Copy the value into `view`: its size. None if it is not readable locally; the view's content is undefined
        then."""
        for node in nodes:
            for _ in range(MAX_LOOKUPS):
                found = self._find(node, key)
                if found is None:
                    break
                index, (at, sequence, _, _, size, checksum, _), source = found
                if size > len(view):
                    break
                buffer = view if size == len(view) else view[:size]
                if size < COPY_BYTES:
                    buffer[:] = source
                else:
                    self._copy(buffer, source)
                if index.words[at] == sequence:
                    if size <= self._verify_bytes and _checksum(buffer) != checksum:
                        break
                    node.reader_slots.read_one(index, at, sequence, size)
                    return size
        return None

    def exists(self, nodes: Nodes, key: bytes) -> bool:
        """Return whether the block is in a local index. False says nothing about other nodes."""
        for node in nodes:
            if node.index.find(key) is not None:
                node.reader_slots.count_call()
                return True
        return False

    def open_view(self, nodes: Nodes, key: bytes) -> LocalView | None:
        """A view of the value, or None if it is not readable locally. Touches about `view_bytes`."""
        for node in nodes:
            for _ in range(MAX_LOOKUPS):
                found = self._find(node, key)
                if found is None:
                    break
                index, entry, source = found
                hazard = node.reader_slots.acquire_hazard(index, entry)
                if hazard is not None and self._verifies_views and _checksum(source) != entry[5]:
                    node.reader_slots.release_hazard(hazard)
                    break
                if hazard is not None:
                    node.reader_slots.read_one(index, entry[0], entry[1], entry[4])
                    return LocalView(node.reader_slots, hazard, source)
        return None

    def _find(self, node: LocalNode, key: bytes) -> tuple[SharedIndexReader, IndexEntry, memoryview] | None:
        """The index, the block's entry, and the memory it names; None if not found or not mapped."""
        index = node.index
        entry = index.find(key)
        if entry is None:
            return None
        _, _, slab, offset, size, _, _ = entry
        memory = node.slabs.get(slab)
        if memory is None or offset + size > len(memory):
            self.unmapped_slabs.append((node, slab))
            return None
        return index, entry, memory[offset : offset + size]

    def _copy(self, destination: memoryview, source: memoryview) -> None:
        self._copier.copy(
            [(destination[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES]) for at in range(0, len(source), PIECE_BYTES)]
        )

    # --- many ---

    def read(self, nodes: Nodes, keys: Sequence[bytes], lengths: set[int], sink: Sink[Any]) -> Operation[list[int]]:
        """Read local values into the sink: indexes of the keys that remain, in order. `lengths` is the set of key
        lengths.

        Raises InvalidArgument for a buffer that is too small. After an error the buffers' content is undefined.
        """
        if len(keys) <= FEW_KEYS:
            return (yield from self._read_few(nodes, keys, sink))
        is_read = np.zeros(len(keys), bool)
        reader_slots = None
        for node, index, indexes, found in look_up(nodes, keys, lengths):
            batch = self._mapped(node, indexes[found.which], index, found)
            if not len(batch.indexes):
                continue
            yield from self._copy_batch(batch, sink)
            is_good = batch.index.validate_batch(batch.found)
            if self._verifies_all:
                is_good &= yield from work(partial(_verify_checksums, batch, sink), int(batch.found.sizes.sum()))
            batch = batch if is_good.all() else batch.only(is_good)
            sink.done_many(batch.indexes, batch.found.sizes)
            reader_slots = node.reader_slots
            reader_slots.read_many(batch.index, batch.found)
            is_read[batch.indexes] = True
        if is_read.all():
            if reader_slots is not None:
                reader_slots.count_call()
            return []
        left: list[int] = np.flatnonzero(~is_read).tolist()
        return left

    def _read_few(self, nodes: Nodes, keys: Sequence[bytes], sink: Sink[Any]) -> Operation[list[int]]:
        """`read` for few keys, one at a time."""
        found: list[tuple[int, LocalNode, SharedIndexReader, IndexEntry, Parts]] = []
        scatters: list[Scatter] = []
        for number, key in enumerate(keys):
            for node in nodes:
                here = self._find(node, key)
                if here is None:
                    continue
                index, entry, source = here
                buffer = sink.buffer(number, len(source))
                scatters.append((source, buffer))
                found.append((number, node, index, entry, buffer))
                break
        if not found:
            return list(range(len(keys)))
        # A single key may have failed verification a moment ago: verify it as a single read does.
        verify_bytes = self._verify_bytes if self._verifies_all or len(keys) == 1 else 0

        def copy() -> set[int]:
            self._copier.scatter(scatters)
            return {number for number, *_, entry, buffer in found if entry[4] <= verify_bytes and checksum_of(buffer) != entry[5]}

        wrong = yield from work(copy, sum(entry[4] for *_, entry, _ in found))
        left = set(range(len(keys)))
        for number, node, index, (at, sequence, _, _, size, _, _), _ in found:
            if index.words[at] == sequence and number not in wrong:
                sink.done(number, size)
                node.reader_slots.read_one(index, at, sequence, size, calls=0)
                left.discard(number)
        if not left:
            found[0][1].reader_slots.count_call()
        return sorted(left)

    def _copy_batch(self, batch: LocalBatch, sink: Sink[Any]) -> Operation[None]:
        """Copy the values of a batch to the sink's buffers."""
        sizes, rows = batch.found.sizes, sink.rows
        if rows is not None and (sizes == rows.shape[1]).all():
            slabs, offsets = batch.found.slabs, batch.found.offsets.view(np.int64)

            def gather_all() -> None:
                for slab, here in by_slab(slabs):
                    gather(batch.slabs[slab], offsets[here], rows, batch.indexes[here])

            yield from work(gather_all, int(sizes.sum()))
            return
        places = zip(batch.indexes.tolist(), _memory(batch), strict=True)
        scatters = [(memory, sink.buffer(index, len(memory))) for index, memory in places]
        yield from work(lambda: self._copier.scatter(scatters), int(sizes.sum()))

    def exists_batch(self, nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> Flags:
        """Return which keys are in a local index."""
        if len(keys) <= FEW_EXISTS_KEYS:
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
            nodes[0].reader_slots.count_call()
        return is_here

    def _mapped(self, node: LocalNode, indexes: Indexes, index: SharedIndexReader, found: FoundBatch) -> LocalBatch:
        """The part of `found` that lies in mapped slabs; the other slabs are added to `unmapped_slabs`."""
        slabs = {slab: node.slabs.get(slab) for slab, _ in by_slab(found.slabs)}
        mapped = {slab: memory for slab, memory in slabs.items() if memory is not None}
        batch = LocalBatch(node, index, mapped, indexes, found)
        missing = [slab for slab in slabs if slab not in mapped]
        if missing:
            self.unmapped_slabs.extend((node, slab) for slab in missing)
            batch = batch.only(~np.isin(found.slabs, np.array(missing, np.uint64)))
        return batch


def look_up(nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> Iterator[tuple[LocalNode, SharedIndexReader, Indexes, FoundBatch]]:
    """Look keys up node by node: (node, index, indexes of the keys searched, matches). A key that was found is not
    searched again."""
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


def _verify_checksums(batch: LocalBatch, sink: Sink[Any]) -> Flags:
    """Return which of the copied values match their checksums."""
    rows = zip(batch.indexes.tolist(), batch.found.sizes.tolist(), batch.found.checksums.tolist(), strict=True)
    return np.array([checksum_of(sink.buffer(index, size)) == checksum for index, size, checksum in rows], bool)


def _by_length(keys: Sequence[bytes], lengths: set[int]) -> Iterator[tuple[int, Indexes, Words]]:
    """Keys of one length at a time, skipping lengths that no index holds: (length, indexes, key words)."""
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
