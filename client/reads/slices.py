"""Values a slice at a time: while one slice is hashed the next one is on its way. Sans-I/O: see effects.py."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import xxhash

from kvstore.client.effects import Operation, Together, work

STREAM_BYTES: Final = 4 << 20
"""Of a stream, which goes on into the kernel's buffers meanwhile. With a quarter of it the sender is woken too often (1.1 GB/s over veth
instead of 1.6)."""
SLICE_BYTES: Final = 8 << 20
"""Of what the transfer engine copies, which has a part of its own to do for each: long beside that."""
AT_ONCE: Final = 2
"""One on its way, one being hashed."""


def in_slices(views: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """The views in order, cut into lists of about STREAM_BYTES: (index of the view, its next part) each."""
    found: list[tuple[int, memoryview]] = []
    left = STREAM_BYTES
    for index, view in enumerate(views):
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

    def __init__(self, room: memoryview, bring: Callable[[int, memoryview], Operation[None]]) -> None:
        """`bring` copies what lies at an offset of the value into that part of its room."""
        self._room = room
        self._bring = bring
        self._offsets = deque(range(0, len(room), SLICE_BYTES))
        self._arrived: set[int] = set()
        self._digest = xxhash.xxh3_64()
        self._hashed_bytes = 0
        self._is_hashing = False

    def run(self) -> Operation[int]:
        """Bring all of it: its xxh3_64. Raises what `bring` does, once nothing moves any more."""
        yield Together([self._lane() for _ in range(AT_ONCE)])
        return self._digest.intdigest()

    def _lane(self) -> Operation[None]:
        while self._offsets:
            offset = self._offsets.popleft()
            yield from self._bring(offset, self._room[offset : offset + SLICE_BYTES])
            self._arrived.add(offset)
            # In order, and one lane at a time: the other one finds what has arrived meanwhile.
            while self._hashed_bytes in self._arrived and not self._is_hashing:
                self._is_hashing = True
                yield from self._hash(self._room[self._hashed_bytes : self._hashed_bytes + SLICE_BYTES])
                self._is_hashing = False

    def _hash(self, part: memoryview) -> Operation[None]:
        yield from work(lambda: self._digest.update(part), len(part))
        self._hashed_bytes += len(part)
