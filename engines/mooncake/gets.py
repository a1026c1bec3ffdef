"""Calls that read objects: as bytes, into memory by its address, in several parts, by ranges."""

import ctypes
from collections.abc import Sequence
from typing import Any

from kvstore.client import Client
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, code_of, read
from kvstore.engines.mooncake.link import Link, memory
from kvstore.engines.mooncake.puts import scattered
from kvstore.protocol.errors import KVStoreError

Ranges = Sequence[Sequence[Sequence[int]]]
"""By buffer, key and range."""


class BufferHandle(bytearray):
    """An object's bytes, the caller's own."""

    def size(self) -> int:
        """In bytes."""
        return len(self)

    def ptr(self) -> int:
        """The address of the first one."""
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


class Gets(Link):
    """A miss is an empty value, None, or a negative code, each as in Mooncake; and so is what went wrong."""

    def get(self, key: str) -> bytes:
        return self._value(lambda client: client.get(self._key(key))) or b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        found = self._value(lambda client: client.get_batch(self._keys(keys)))
        return [b""] * len(keys) if found is None else [value or b"" for value in found]

    def get_buffer(self, key: str) -> BufferHandle | None:
        def take(client: Client) -> BufferHandle | None:
            with client.view(self._key(key)) as value:  # on the same host the one copy is the handle's
                return None if value is None else BufferHandle(value)

        return self._value(take)

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        return [self.get_buffer(key) for key in keys]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """The number of bytes, or a code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._read(keys, [memory(pointer, size) for pointer, size in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Each object goes to several places, in order."""
        buffers = scattered(keys, all_buffer_ptrs, all_sizes)
        return self._read(keys, buffers) if len(buffers) == len(keys) else [INVALID_PARAMS] * len(keys)

    def _read(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int]:
        return self._call_each(len(keys), lambda client: [read(found) for found in client.get_each_into(self._keys(keys), buffers)])

    # --- ranges ---

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Ranges,
        all_src_offsets: Ranges,
        all_sizes: Ranges,
    ) -> list[list[list[int]]]:
        """Read ranges of objects to offsets of registered buffers: for each buffer, key and range the number of bytes or a code."""
        wanted: list[tuple[str, int, int, int, list[int]]] = []
        """Key, offset, address, size, and where the result goes."""
        results: list[list[list[int]]] = []
        for pointer, keys, targets, sources, sizes in zip(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=False):
            room_bytes = self._registered.get(pointer, (0, None))[0]
            results.append([])
            for key, to, of, length in zip(keys, targets, sources, sizes, strict=False):
                codes = [INVALID_PARAMS] * max(len(to), len(of), len(length))
                results[-1].append(codes)
                if not len(to) == len(of) == len(length):
                    continue
                for place, (target, source, size) in enumerate(zip(to, of, length, strict=True)):
                    if 0 <= target <= room_bytes - size:
                        wanted.append((key, source, pointer + target, size, [len(results) - 1, len(results[-1]) - 1, place]))
        found = self._read_ranges([(key, source, pointer, size) for key, source, pointer, size, _ in wanted])
        for code, (*_, (buffer, number, place)) in zip(found, wanted, strict=True):
            results[buffer][number][place] = code
        return results

    def _read_ranges(self, ranges: Sequence[tuple[str, int, int, int]]) -> list[int]:
        """(key, offset, address, size) each: the number of bytes, or a code."""
        keys = [self._key(key) for key, *_ in ranges]
        offsets = [offset for _, offset, _, _ in ranges]
        buffers = [memory(pointer, size) for *_, pointer, size in ranges]
        return self._call_each(len(ranges), lambda client: [read(found) for found in client.get_ranges_into(keys, offsets, buffers)])

    # --- what is there ---

    def is_exist(self, key: str) -> int:
        """1 or 0, or a code."""
        return self._call(lambda client: int(client.exists(self._key(key))))

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return self._call_each(len(keys), lambda client: [int(is_there) for is_there in client.exists_batch(self._keys(keys))])

    def get_size(self, key: str) -> int:
        """In bytes, or a code."""
        try:
            [places] = self._connected().locate([self._key(key)])
        except KVStoreError as error:
            return code_of(error)
        return places[0].size_bytes if places else OBJECT_NOT_FOUND
