"""Values that come with a node's answer, or a slice at a time: while one slice is hashed the next one is on its way. Sans-I/O: see
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
"""Of a stream, which goes on into the kernel's buffers meanwhile. With a quarter of it the sender is woken too often (1.1 GB/s over veth
instead of 1.6)."""
SLICE_BYTES: Final = 8 << 20
"""Of what the transfer engine copies, which has a part of its own to do for each: long beside that."""
AT_ONCE: Final = 2
"""One on its way, one being hashed."""


def in_slices(values: Sequence[Parts]) -> Iterator[list[tuple[int, memoryview]]]:
    """The values in order, cut into lists of about STREAM_BYTES: (index of the value, its next part) each."""
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
    """One large value. `run` it once."""

    def __init__(self, room: Parts, bring: Callable[[int, Parts], Operation[None]]) -> None:
        """`bring` copies what lies at an offset of the value into these parts of its room."""
        self._slices = list(in_pieces(room, SLICE_BYTES))
        self._bring = bring
        self._left = deque(range(len(self._slices)))
        self._arrived: set[int] = set()
        self._digest = xxhash.xxh3_64()
        self._hashed = 0
        """Slices."""
        self._is_hashing = False

    def run(self) -> Operation[int]:
        """Bring all of it: its xxh3_64. Raises what `bring` does, once nothing moves any more."""
        yield GatherEffect([self._lane() for _ in range(AT_ONCE)])
        return self._digest.intdigest()

    def _lane(self) -> Operation[None]:
        while self._left:
            number = self._left.popleft()
            yield from self._bring(number * SLICE_BYTES, self._slices[number])
            self._arrived.add(number)
            # In order, and one lane at a time: the other one finds what has arrived meanwhile.
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
    """All of them, whatever becomes of each: the channel is in step afterwards. Raises Unavailable, DeadlineExceeded: it is not."""
    blocks, node_id = answer.blocks, answer.node.node_id
    places = answer.places(INLINE)
    found = [progress.room(answer.wanted[place][0], blocks.sizes[place]) for place in places]
    # A value that has no room is read all the same: the rest of the batch comes after it.
    rooms = [(memoryview(bytearray(blocks.sizes[place])),) if room is None else room for room, place in zip(found, places, strict=True)]
    digests = [xxhash.xxh3_64() for _ in places]
    for parts in in_slices(rooms):
        yield ReadPayloadEffect(answer.loan.channel, [part for _, part in parts], answer.deadline)
        yield from work(partial(_hash, digests, parts), sum(len(part) for _, part in parts))
    good: list[int] = []
    damaged: list[int] = []
    for place, room, digest in zip(places, found, digests, strict=True):
        if room is not None:
            (good if digest.intdigest() == blocks.checksums[place] else damaged).append(place)
    progress.arrived(answer, good)
    if damaged:
        error = ChecksumMismatch(f"node {node_id} sent a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node_id, answer.items(damaged), error)


def _hash(digests: "Sequence[xxhash.xxh3_64]", parts: Sequence[tuple[int, memoryview]]) -> None:
    for index, part in parts:
        digests[index].update(part)
