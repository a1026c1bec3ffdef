"""Sessions: an object that is read, or written, a few ranges at a time, by calls that name ranges of many objects.

A get session keeps nothing from eviction: an object that has gone by the next call is a miss there. What a put session has been given is
kept in this process, and put as a whole at its end.
"""

import threading
from collections.abc import Sequence

from kvstore.client.memory import view_of
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.config import ReplicateConfig
from kvstore.engines.mooncake.gets import Gets
from kvstore.engines.mooncake.link import memory
from kvstore.engines.mooncake.puts import DEFAULT, Puts
from kvstore.protocol.frames import MAX_VALUE_BYTES

Lists = Sequence[Sequence[int]]
"""For each key a number a range."""


class Sessions(Gets, Puts):
    """A call has a code a key. One that names a key without a session is refused for that key."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._reading: set[str] = set()
        self._writing: dict[str, tuple[bytearray, ReplicateConfig]] = {}

    def close(self) -> int:
        with self._lock:
            self._reading.clear()
            self._writing.clear()
        return super().close()

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        found = self.batch_is_exist(keys)
        with self._lock:
            self._reading.difference_update(keys)
            self._reading.update(key for key, code in zip(keys, found, strict=True) if code == 1)
        return [{1: OK, 0: OBJECT_NOT_FOUND}.get(code, code) for code in found]

    def batch_get_into_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Lists, all_sizes: Lists, all_src_offsets: Lists
    ) -> list[int]:
        """The bytes read of each object, or a code."""
        results = [INVALID_PARAMS] * len(keys)
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return results
        wanted: list[tuple[str, int, int, int]] = []
        owners: list[int] = []
        with self._lock:
            reading = set(self._reading)
        for index, (key, pointers, sizes, offsets) in enumerate(zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)):
            if key in reading and len(pointers) == len(sizes) == len(offsets):
                results[index] = 0
                wanted += [(key, offset, pointer, size) for pointer, size, offset in zip(pointers, sizes, offsets, strict=True)]
                owners += [index] * len(pointers)
        for index, code in zip(owners, self._read_ranges(wanted), strict=True):
            if results[index] >= 0:
                results[index] = code if code < 0 else results[index] + code
        return results

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        with self._lock:
            self._reading.difference_update(keys)
        return OK

    def batch_put_session_start(self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig = DEFAULT) -> list[int]:
        """Room for objects of these sizes."""
        if len(keys) != len(sizes) or not config.is_sound(len(keys)) or self._client is None:
            return [INVALID_PARAMS] * len(keys)
        codes = []
        with self._lock:
            for key, size in zip(keys, sizes, strict=True):
                is_new = key not in self._writing and 0 < size <= MAX_VALUE_BYTES
                if is_new:
                    self._writing[key] = bytearray(size), config
                codes.append(OK if is_new else INVALID_PARAMS)
        return codes

    def batch_put_from_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Lists, all_sizes: Lists, all_dst_offsets: Lists
    ) -> list[int]:
        """The bytes written of each object, or a code: nothing of it is written then."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [INVALID_PARAMS] * len(keys)
        with self._lock:
            rooms = [self._writing.get(key, (None, DEFAULT))[0] for key in keys]
        return [_write(*row) for row in zip(rooms, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)]

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Store the objects."""
        codes = []
        for key in keys:
            with self._lock:
                found = self._writing.pop(key, None)
            if found is None:
                codes.append(INVALID_PARAMS)
                continue
            value, config = found
            codes += self._put([key], [value], config) if config.group_ids is None else self._put([key], [value], DEFAULT)
        return codes

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Forget what was written."""
        with self._lock:
            return [OK if self._writing.pop(key, None) is not None else INVALID_PARAMS for key in keys]


def _write(room: bytearray | None, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> int:
    if room is None or not len(pointers) == len(sizes) == len(offsets):
        return INVALID_PARAMS
    ranges = list(zip(pointers, sizes, offsets, strict=True))
    if not all(memory(pointer, size) and 0 <= offset <= len(room) - size for pointer, size, offset in ranges):
        return INVALID_PARAMS
    for pointer, size, offset in ranges:
        room[offset : offset + size] = view_of(pointer, size)
    return sum(sizes)
