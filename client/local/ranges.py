"""Reads of byte ranges of values. Sans-I/O: see effects.py.

Local ranges are copied straight out of the value in shared memory. Remote values, and values in tiers that are not
mapped, are fetched whole, because only a whole value can be verified against its checksum.
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
"""Whole values in memory at a time, until their ranges are copied."""

RangeResult = int | KVStoreError | None
ReadWhole = Callable[[Sequence[bytes], FreshEach], Operation[list[bytes | None]]]
"""Reads whole values into a sink."""


class RangeReads:
    """One batch of ranges. Use once: `read_local` for local values, then `read_whole` for the rest."""

    def __init__(
        self, keys: Sequence[bytes], offsets: Sequence[int], buffers: Sequence[Destination | InvalidArgument], copier: MemcpyPool
    ) -> None:
        self._offsets = offsets
        self._rooms = buffers
        self._copier = copier
        self._left: dict[bytes, list[int]] = {}
        """Range indexes by key."""
        self.results: list[RangeResult] = [None] * len(keys)
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if isinstance(buffer, InvalidArgument):
                self.results[index] = buffer
            else:
                self._left.setdefault(key, []).append(index)

    def read_local(self, reads: LocalReads, nodes: Sequence[LocalNode]) -> Operation[None]:
        """Copy ranges of values in local indexes. Afterwards `reads.unmapped_slabs` names slabs that were not
        mapped."""
        for key in list(self._left):
            view = yield from work(partial(reads.open_view, nodes, key), reads.view_bytes)
            if view is not None and (yield from self._copy_from_view(key, view)):
                del self._left[key]

    def _copy_from_view(self, key: bytes, view: LocalView) -> Operation[bool]:
        """Copy from an open view. False: its node closed the connection meanwhile, so the bytes may be another
        value's."""
        try:
            yield from self._copy_ranges(key, view.memory)
        except BaseException:
            with suppress(Fenced):
                view.close()
            raise
        try:
            view.close()
        except Fenced:
            return False
        return True

    def read_whole(self, read: ReadWhole) -> Operation[None]:
        """Fetch the remaining values whole and copy their ranges."""
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
                    yield from self._copy_ranges(key, memoryview(value))
                else:
                    for index in self._left[key]:
                        self.results[index] = wrong or failure

    def _copy_ranges(self, key: bytes, value: memoryview) -> Operation[None]:
        """Copy the ranges of one value to their buffers."""
        scatters: list[Scatter] = []
        for index in self._left[key]:
            buffer, offset = self._rooms[index], self._offsets[index]
            assert isinstance(buffer, Destination)
            if 0 <= offset <= len(value) - buffer.size_bytes:
                scatters.append((value[offset : offset + buffer.size_bytes], buffer.parts))
                self.results[index] = buffer.size_bytes
            else:
                end = offset + buffer.size_bytes
                self.results[index] = InvalidArgument(
                    f"bytes {offset} to {end} are outside the value of key {index}, of {len(value)} bytes"
                )
        yield from work(lambda: self._copier.scatter(scatters), sum(len(source) for source, _ in scatters))
        for index in self._left[key]:
            buffer = self._rooms[index]
            if isinstance(buffer, Destination) and buffer.finish is not None and isinstance(self.results[index], int):
                buffer.finish()


def _cut(keys: list[bytes]) -> Iterator[list[bytes]]:
    for begin in range(0, len(keys), WHOLE_AT_ONCE):
        yield keys[begin : begin + WHOLE_AT_ONCE]
