"""Values that arrive in a node's reply, or in slices: one slice is hashed while the next is in flight. Sans-I/O: see
effects.py."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import xxhash

from kvstore.client.core.effects import GatherEffect, Operation, ReadPayloadEffect, work
from kvstore.client.memory import Parts, in_pieces, size_of
from kvstore.client.reads.progress import GetProgress, ReadReply
from kvstore.protocol.errors import ChecksumMismatch
from kvstore.protocol.node_messages import INLINE

STREAM_BYTES: Final = 4 << 20
"""Read size of a stream, which continues into kernel buffers meanwhile. A quarter of it wakes the sender too often (1.1
GB/s over veth instead of 1.6)."""
SLICE_BYTES: Final = 8 << 20
"""Slice of a transfer-engine copy: large against its overhead per slice."""
AT_ONCE: Final = 2
"""Slices in progress: one in flight, one being hashed."""


def in_slices(values: Sequence[Parts]) -> Iterator[list[tuple[int, memoryview]]]:
    """The values in order, split into lists of about STREAM_BYTES, of (index of the value, part)."""
    found: list[tuple[int, memoryview]] = []
    left = STREAM_BYTES
    for index, view in ((index, view) for index, parts in enumerate(values) for view in parts):
        for at in range(0, len(view), STREAM_BYTES):
            part = view[at : at + STREAM_BYTES]
            if found and len(part) > left:
                yield found
                found, left = [], STREAM_BYTES
            found.append((index, part))
            left -= len(part)
    if found:
        yield found


class SlicedValue:
    """One large value, read and hashed in slices. `run` it once."""

    def __init__(self, buffer: Parts, bring: Callable[[int, Parts], Operation[None]]) -> None:
        """`bring(offset, parts)` reads the value from an offset on into these parts of its buffer.
        - SlicedValue._hashed"""
        self._slices = list(in_pieces(buffer, SLICE_BYTES))
        self._bring = bring
        self._left = deque(range(len(self._slices)))
        self._arrived: set[int] = set()
        self._digest = xxhash.xxh3_64()
        self._hashed = 0
        """Slices."""
        self._is_hashing = False

    def run(self) -> Operation[int]:
        """Read all slices: the value's xxh3_64. Raises what `bring` raises, once nothing is in flight."""
        yield GatherEffect([self._read_slices() for _ in range(AT_ONCE)])
        return self._digest.intdigest()

    def _read_slices(self) -> Operation[None]:
        while self._left:
            number = self._left.popleft()
            yield from self._bring(number * SLICE_BYTES, self._slices[number])
            self._arrived.add(number)
            # Hash in order, in one operation at a time: the other's slices are picked up here.
            while self._hashed in self._arrived and not self._is_hashing:
                self._is_hashing = True
                parts = self._slices[self._hashed]
                yield from work(partial(self._hash, parts), size_of(parts))
                self._hashed += 1
                self._is_hashing = False

    def _hash(self, parts: Parts) -> None:
        for part in parts:
            self._digest.update(part)


def take_inline(answer: ReadReply, progress: GetProgress[Any]) -> Operation[None]:
    """Read all inline values; afterwards the channel is at a frame boundary. Raises Unavailable, DeadlineExceeded: it
    is not."""
    blocks, node_id = answer.blocks, answer.node.node_id
    positions = answer.positions(INLINE)
    found = [progress.buffer(answer.wanted[position][0], blocks.sizes[position]) for position in positions]
    # A value that has no room is read all the same: the rest of the batch comes after it.
    buffers = [
        (memoryview(bytearray(blocks.sizes[position])),) if buffer is None else buffer
        for buffer, position in zip(found, positions, strict=True)
    ]
    digests = [xxhash.xxh3_64() for _ in positions]
    for parts in in_slices(buffers):
        yield ReadPayloadEffect(answer.connection.channel, [part for _, part in parts], answer.deadline)
        yield from work(partial(_hash, digests, parts), sum(len(part) for _, part in parts))
    good: list[int] = []
    damaged: list[int] = []
    for position, buffer, digest in zip(positions, found, digests, strict=True):
        if buffer is not None:
            (good if digest.intdigest() == blocks.checksums[position] else damaged).append(position)
    progress.arrived(answer, good)
    if damaged:
        error = ChecksumMismatch(f"node {node_id} sent a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node_id, answer.items(damaged), error)


def _hash(digests: "Sequence[xxhash.xxh3_64]", parts: Sequence[tuple[int, memoryview]]) -> None:
    for index, part in parts:
        digests[index].update(part)
