"""Mooncake's sessions: objects that are read, or written, a few ranges at a time over several calls.

The store holds the objects of a get session until its end, within the nodes' limits; an object that was removed is a
miss in the next call. A put session collects bytes in this process, and its end stores the whole object.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.client import Client, Hold, new_hold
from kvstore.client.memory import view_of
from kvstore.engines.mooncake.arguments import NumberLists, Numbers, ReplicateConfig, Texts, is_sound
from kvstore.engines.mooncake.codes import INVALID_PARAMS, INVALID_REPLICA, OBJECT_ALREADY_EXISTS, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.gets import Gets
from kvstore.engines.mooncake.link import memory
from kvstore.engines.mooncake.puts import DEFAULT, Config, Puts
from kvstore.protocol.frames import MAX_VALUE_BYTES

SESSION_S: Final = 60.0
"""Duration of a get session's hold, renewed after half of it. It is the nodes' default limit (max_lease_s)."""
RENEW_NS: Final = int(SESSION_S * 1e9 / 2)


@dataclass(slots=True, eq=False)
class GetSession:
    """Objects whose get session began with one call."""

    hold: Hold
    renew_ns: int
    keys: set[str]


class GetSessions:
    """Get sessions by object, with their holds. Not thread-safe: the caller locks."""

    def __init__(self) -> None:
        self._of_key: dict[str, GetSession] = {}

    def begin(self, hold: Hold, keys: Sequence[str], now_ns: int) -> None:
        """Begin a session of these objects, which `hold` protects. None of them may have a session: call `end`
        first."""
        self._of_key.update(dict.fromkeys(keys, GetSession(hold, now_ns + RENEW_NS, set(keys))))

    def end(self, keys: Iterable[str]) -> list[Hold]:
        """End the sessions of these objects. Return the holds without objects, which the caller releases."""
        over = []
        for key in keys:
            reading = self._of_key.pop(key, None)
            if reading is not None:
                reading.keys.discard(key)
                if not reading.keys:
                    over.append(reading.hold)
        return over

    def due(self, keys: Iterable[str], now_ns: int) -> list[tuple[Hold, list[str]]]:
        """Return the holds that are due for renewal, with their objects, and schedule the next renewal."""
        found = {id(reading): reading for key in keys if (reading := self._of_key.get(key)) is not None and reading.renew_ns <= now_ns}
        for reading in found.values():
            reading.renew_ns = now_ns + RENEW_NS
        return [(reading.hold, sorted(reading.keys)) for reading in found.values()]

    def __contains__(self, key: str) -> bool:
        return key in self._of_key


class ObjectSessions(Gets, Puts):
    """Calls of get and put sessions. They return a code a key; a key without a session gets an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._reading = GetSessions()
        self._writing: dict[str, tuple[bytearray, ReplicateConfig]] = {}

    def close(self) -> int:
        with self._lock:
            self._reading = GetSessions()  # the client releases its holds on close
            self._writing.clear()
        return super().close()

    def batch_get_session_start(self, keys: Texts) -> list[int]:
        hold = new_hold(SESSION_S)
        found = self._exist(keys, hold)
        there = [key for key, code in zip(keys, found, strict=True) if code == 1]
        with self._lock:
            over = self._reading.end(keys)
            self._reading.begin(hold, there, time.monotonic_ns())
        self._release(over if there else [*over, hold])
        return [{1: OK, 0: OBJECT_NOT_FOUND}.get(code, code) for code in found]

    def _release(self, holds: Sequence[Hold]) -> None:
        def release(client: Client) -> None:
            for hold in holds:
                client.release(hold)

        if holds:
            self._value(release)

    def batch_get_into_multi_buffer_ranges(
        self, keys: Texts, all_buffer_ptrs: NumberLists, all_sizes: NumberLists, all_src_offsets: NumberLists
    ) -> list[int]:
        """Read ranges of each object; return the number of bytes, or a code."""
        results = [INVALID_PARAMS] * len(keys)
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return results
        wanted: list[tuple[str, int, int, int]] = []
        owners: list[int] = []
        with self._lock:
            reading = {key for key in keys if key in self._reading}
            due = self._reading.due(keys, time.monotonic_ns())
        for hold, held in due:
            self._exist(held, hold)
        for index, (key, pointers, sizes, offsets) in enumerate(zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)):
            if key in reading and len(pointers) == len(sizes) == len(offsets):
                results[index] = 0
                ranges = [(key, offset, pointer, size) for pointer, size, offset in zip(pointers, sizes, offsets, strict=True) if size]
                wanted += ranges
                owners += [index] * len(ranges)
        for index, code in zip(owners, self._read_ranges(wanted), strict=True):
            if results[index] >= 0:
                results[index] = code if code < 0 else results[index] + code
        return results

    def batch_get_session_end(self, keys: Texts) -> int:
        if self._client is None:
            return -1
        with self._lock:
            over = self._reading.end(keys)
        self._release(over)
        return OK

    def batch_put_session_start(self, keys: Texts, sizes: Numbers, config: Config = DEFAULT) -> list[int]:
        """Reserve objects of these sizes. Returns -705 for an object that exists or has a session."""
        if len(keys) != len(sizes) or not is_sound(config, len(keys)) or self._client is None:
            return [INVALID_PARAMS] * len(keys)
        there = self._call_each(len(keys), lambda client: [int(found) for found in client.exists_batch(self._keys(keys))])
        opened = set(self._writing)
        codes = []
        for key, size, is_there in zip(keys, sizes, there, strict=True):
            with self._lock:
                if key in opened or not key or not 0 < size <= MAX_VALUE_BYTES:
                    codes.append(INVALID_PARAMS)
                elif is_there or key in self._writing:
                    codes.append(is_there if is_there < 0 else OBJECT_ALREADY_EXISTS)
                else:
                    self._writing[key] = bytearray(size), config
                    codes.append(OK)
        return codes

    def batch_put_from_multi_buffer_ranges(
        self, keys: Texts, all_buffer_ptrs: NumberLists, all_sizes: NumberLists, all_dst_offsets: NumberLists
    ) -> list[int]:
        """Write ranges of each object; return the number of bytes, or a code, after which nothing of it was written."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [INVALID_PARAMS] * len(keys)
        with self._lock:
            reserved = [self._writing.get(key, (None, DEFAULT))[0] for key in keys]
        return [_write(*row) for row in zip(reserved, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)]

    def batch_put_session_end(self, keys: Texts) -> list[int]:
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

    def batch_put_session_revoke(self, keys: Texts) -> list[int]:
        """Drop the written bytes."""
        with self._lock:
            return [OK if self._writing.pop(key, None) is not None else INVALID_PARAMS for key in keys]


def _write(reserved: bytearray | None, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> int:
    if reserved is None or not len(pointers) == len(sizes) == len(offsets):
        return INVALID_PARAMS
    if not pointers:
        return INVALID_REPLICA
    ranges = list(zip(pointers, sizes, offsets, strict=True))
    if not all(memory(pointer, size) and 0 <= offset <= len(reserved) - size for pointer, size, offset in ranges):
        return INVALID_PARAMS
    for pointer, size, offset in ranges:
        reserved[offset : offset + size] = view_of(pointer, size)
    return sum(sizes)
