"""Mooncake's calls that read objects: as bytes, into memory by address, in several parts, by ranges."""

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.client import Client, Hold
from kvstore.engines.mooncake.arguments import Flag, Number, NumberListLists, NumberLists, Numbers, Text, TextLists, Texts
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, code_of, read
from kvstore.engines.mooncake.link import StoreConnection, memory
from kvstore.engines.mooncake.puts import scattered
from kvstore.protocol.errors import KVStoreError

Place = tuple[int, int, int]
"""Index of a range's result: buffer, key within it, range of that key."""


class BufferHandle(bytearray):
    """An object's bytes, owned by the caller."""

    def size(self) -> int:
        """Return the number of bytes."""
        return len(self)

    def ptr(self) -> int:
        """Return the address of the first byte."""
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


class Gets(StoreConnection):
    """Calls that read objects. A miss or a failure is an empty value, None or a negative code, as in Mooncake."""

    def get(self, key: Text, /) -> bytes:
        return self._value(lambda client: client.get(self._key(key))) or b""

    def get_batch(self, keys: Texts, /) -> list[bytes]:
        found = self._value(lambda client: client.get_batch(self._keys(keys)))
        return [b""] * len(keys) if found is None else [value or b"" for value in found]

    def get_buffer(self, key: Text, /) -> BufferHandle | None:
        def take(client: Client) -> BufferHandle | None:
            with client.view(self._key(key)) as value:  # local values are copied once, into the handle
                return None if value is None else BufferHandle(value)

        return self._value(take)

    def batch_get_buffer(self, keys: Texts, /) -> list[BufferHandle | None]:
        return [self.get_buffer(key) for key in keys]

    def get_into(self, key: Text, buffer_ptr: Number, size: Number) -> int:
        """Return the number of bytes, or a code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Texts, buffer_ptrs: Numbers, sizes: Numbers) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._read(keys, [memory(pointer, size) for pointer, size in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self, keys: Texts, all_buffer_ptrs: NumberLists, all_sizes: NumberLists, prefer_alloc_in_same_node: Flag = False
    ) -> list[int]:
        """Read each object into several memory ranges, in order."""
        buffers = scattered(keys, all_buffer_ptrs, all_sizes)
        return self._read(keys, buffers) if len(buffers) == len(keys) else [INVALID_PARAMS] * len(keys)

    def _read(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int]:
        return self._call_each(len(keys), lambda client: [read(found) for found in client.get_each_into(self._keys(keys), buffers)])

    # --- ranges ---

    def get_into_ranges(
        self,
        buffer_ptrs: Numbers,
        all_keys: TextLists,
        all_dst_offsets: NumberListLists,
        all_src_offsets: NumberListLists,
        all_sizes: NumberListLists,
    ) -> list[list[list[int]]]:
        """Read ranges of objects to offsets of registered buffers, or of any address in them.

        Returns the number of bytes or a code, for each buffer, key and range of `all_dst_offsets`.
        """
        results = _refused(len(buffer_ptrs), all_keys, all_dst_offsets)
        if not len(buffer_ptrs) == len(all_keys) == len(all_dst_offsets) == len(all_src_offsets) == len(all_sizes):
            return results
        wanted: list[tuple[str, int, int, int]] = []
        places: list[Place] = []
        for number, pointer in enumerate(buffer_ptrs):
            available_bytes = self._registered_bytes(pointer)
            row = _ranges(number, all_keys[number], all_dst_offsets[number], all_src_offsets[number], all_sizes[number])
            for place, key, target, source, size in row:
                if size == 0 and available_bytes:
                    results[place[0]][place[1]][place[2]] = 0
                elif target <= available_bytes - size:
                    wanted.append((key, source, pointer + target, size))
                    places.append(place)
        for code, (buffer, key_number, at) in zip(self._read_ranges(wanted), places, strict=True):
            results[buffer][key_number][at] = code
        return results

    def _read_ranges(self, ranges: Sequence[tuple[str, int, int, int]]) -> list[int]:
        """Read ranges (key, offset, address, size). Return the number of bytes, or a code."""
        keys = [self._key(key) for key, *_ in ranges]
        offsets = [offset for _, offset, _, _ in ranges]
        buffers = [memory(pointer, size) for *_, pointer, size in ranges]
        return self._call_each(len(ranges), lambda client: [read(found) for found in client.get_ranges_into(keys, offsets, buffers)])

    # --- existence ---

    def is_exist(self, key: Text, /) -> int:
        """Return 1 or 0, or a code. A found object stays for the lease (setting `lease_s`), as in Mooncake."""
        return self._call(lambda client: int(client.exists(self._key(key), hold=self._lease.hold(time.monotonic_ns()))))

    def batch_is_exist(self, keys: Texts) -> list[int]:
        """Call `is_exist` for each key."""
        return self._exist(keys, self._lease.hold(time.monotonic_ns()))

    def _exist(self, keys: Sequence[str], hold: Hold | None) -> list[int]:
        return self._call_each(len(keys), lambda client: [int(is_there) for is_there in client.exists_batch(self._keys(keys), hold=hold)])

    def get_size(self, key: Text, /) -> int:
        """Return the size in bytes, or a code."""
        try:
            [places] = self._connected().locate([self._key(key)])
        except KVStoreError as error:
            return code_of(error)
        return places[0].size_bytes if places else OBJECT_NOT_FOUND


def _refused(buffers: int, all_keys: TextLists, all_dst_offsets: NumberListLists) -> list[list[list[int]]]:
    """Return results in which all ranges are rejected: one a destination, one for a key without destinations."""
    results: list[list[list[int]]] = []
    for number in range(buffers):
        keys = all_keys[number] if number < len(all_keys) else None
        targets = all_dst_offsets[number] if number < len(all_dst_offsets) else []
        count = 1 if keys is None else len(keys)
        results.append([[INVALID_PARAMS] * (len(targets[key]) if key < len(targets) else 1) for key in range(count)])
    return results


def _ranges(
    number: int, keys: Sequence[str], targets: NumberLists, sources: NumberLists, sizes: NumberLists
) -> Iterator[tuple[Place, str, int, int, int]]:
    """Yield the ranges of one buffer, each with its index in the results. Keys with lists of unequal length are
    skipped."""
    if not len(keys) == len(targets) == len(sources) == len(sizes):
        return
    for key_number, (key, to, of, length) in enumerate(zip(keys, targets, sources, sizes, strict=True)):
        if len(to) == len(of) == len(length):
            for at, (target, source, size) in enumerate(zip(to, of, length, strict=True)):
                yield (number, key_number, at), key, target, source, size
