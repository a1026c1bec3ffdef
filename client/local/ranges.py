"""Ranges of values by their offsets. On this host they are copied out of the value where it lies; from elsewhere, and from tiers that are
not mapped, the whole value comes first: only of that can be said whether it is what was put. Sans-I/O: see effects.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from kvstore.client.core.buffers import Destination
from kvstore.client.core.effects import Operation, work
from kvstore.client.local.nodes import LocalNode
from kvstore.client.local.reader_slots import LocalView
from kvstore.client.local.reads import LocalReads
from kvstore.client.reads.sinks import FreshEach
from kvstore.protocol.errors import Fenced, InvalidArgument, KVStoreError
from kvstore.transfer.memory.memcpy import MemcpyPool, Scatter

WHOLE_AT_ONCE: Final = 32
"""Values that are brought here whole are kept until their ranges have been copied: so many at a time."""

RangeResult = int | KVStoreError | None
ReadWhole = Callable[[Sequence[bytes], FreshEach], Operation[list[bytes | None]]]
"""Has whole values in a sink."""


class RangeReads:
    """One batch of ranges. Use once: `near` for what lies on this host, then `whole` for the rest."""

    def __init__(
        self, keys: Sequence[bytes], offsets: Sequence[int], rooms: Sequence[Destination | InvalidArgument], copier: MemcpyPool
    ) -> None:
        self._offsets = offsets
        self._rooms = rooms
        self._copier = copier
        self._left: dict[bytes, list[int]] = {}
        """Indexes of the ranges of each key."""
        self.results: list[RangeResult] = [None] * len(keys)
        for index, (key, room) in enumerate(zip(keys, rooms, strict=True)):
            if isinstance(room, InvalidArgument):
                self.results[index] = room
            else:
                self._left.setdefault(key, []).append(index)

    def near(self, reads: LocalReads, nodes: Sequence[LocalNode]) -> Operation[None]:
        """Copy ranges of values that nodes of this host show. Slabs that are not mapped are wanted afterwards."""
        for key in list(self._left):
            view = yield from work(partial(reads.look, nodes, key), reads.look_bytes)
            if view is not None and (yield from self._from_view(key, view)):
                del self._left[key]

    def _from_view(self, key: bytes, view: LocalView) -> Operation[bool]:
        """False: its node hung up meanwhile, and what was copied may be another value's."""
        try:
            yield from self._take(key, view.memory)
        except BaseException:
            with suppress(Fenced):
                view.close()
            raise
        try:
            view.close()
        except Fenced:
            return False
        return True

    def whole(self, read: ReadWhole) -> Operation[None]:
        """Have the rest."""
        for keys in _cut(list(self._left)):
            sink = FreshEach(len(keys))
            failure: KVStoreError | None = None
            try:
                yield from read(keys, sink)
            except KVStoreError as error:
                failure = error
            for number, key in enumerate(keys):
                value, wrong = sink.result(number)
                if value is not None:
                    yield from self._take(key, memoryview(value))
                else:
                    for index in self._left[key]:
                        self.results[index] = wrong or failure

    def _take(self, key: bytes, value: memoryview) -> Operation[None]:
        """Copy the ranges of a value to their rooms."""
        scatters: list[Scatter] = []
        for index in self._left[key]:
            room, offset = self._rooms[index], self._offsets[index]
            assert isinstance(room, Destination)
            if 0 <= offset <= len(value) - room.size_bytes:
                scatters.append((value[offset : offset + room.size_bytes], room.parts))
                self.results[index] = room.size_bytes
            else:
                end = offset + room.size_bytes
                self.results[index] = InvalidArgument(
                    f"bytes {offset} to {end} are outside the value of key {index}, of {len(value)} bytes"
                )
        yield from work(lambda: self._copier.scatter(scatters), sum(len(source) for source, _ in scatters))
        for index in self._left[key]:
            room = self._rooms[index]
            if isinstance(room, Destination) and room.finish is not None and isinstance(self.results[index], int):
                room.finish()


def _cut(keys: list[bytes]) -> Iterator[list[bytes]]:
    for begin in range(0, len(keys), WHOLE_AT_ONCE):
        yield keys[begin : begin + WHOLE_AT_ONCE]
