"""Mooncake's calls that store objects: from buffers, from memory by address, in several parts, new or as a replacement.

They return once every process of the cluster can read the object, like Mooncake's.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

from kvstore.client import Client, Memory
from kvstore.engines.mooncake.arguments import (
    Buffer,
    Buffers,
    Number,
    NumberLists,
    Numbers,
    Part,
    ReplicateConfig,
    Text,
    Texts,
    instance_of,
    is_sound,
)
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_HAS_LEASE, OK, stored
from kvstore.engines.mooncake.link import StoreConnection, memory
from kvstore.protocol.errors import KVStoreError

ACK: Final = "cluster"
DEFAULT: Final = ReplicateConfig()
Config = Annotated[ReplicateConfig, instance_of(ReplicateConfig)]


class Puts(StoreConnection):
    """Calls that store objects. `put*` succeed without a write if the object exists. `upsert*` replace it, even
    while it is read."""

    def put(self, key: Text, value: Buffer, config: Config = DEFAULT) -> int:
        return self._put_staged([key], [value], config)[0]

    def put_batch(self, keys: Texts, values: Buffers, config: Config = DEFAULT) -> int:
        """Return the first error code, or 0."""
        return _first(keys, values, self._put_staged(keys, values, config))

    def put_parts(self, key: Text, *parts: Part, config: Config = DEFAULT) -> int:
        """Store the parts as one object, in order. Empty parts store nothing and succeed."""
        return self._put_staged([key], [list(parts)], config)[0] if any(part.nbytes for part in parts) else OK

    def put_from(self, key: Text, buffer_ptr: Number, size: Number, config: Config = DEFAULT) -> int:
        """Store memory as an object. A size of 0 stores nothing and succeeds."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0] if size else OK

    def put_from_with_metadata(
        self,
        key: Text,
        buffer_ptr: Number,
        metadata_buffer_ptr: Number,
        size: Number,
        metadata_size: Number,
        config: Config = DEFAULT,
    ) -> int:
        """Store the metadata followed by the data as one object."""
        if not size + metadata_size:
            return OK
        return self.batch_put_from_multi_buffers([key], [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]], config)[0]

    def batch_put_from(self, keys: Texts, buffer_ptrs: Numbers, sizes: Numbers, config: Config = DEFAULT) -> list[int]:
        return self._put(keys, _memories(buffer_ptrs, sizes), config)

    def batch_put_from_multi_buffers(
        self, keys: Texts, all_buffer_ptrs: NumberLists, all_sizes: NumberLists, config: Config = DEFAULT
    ) -> list[int]:
        """Store objects that are each made of several memory ranges, in order."""
        return self._put(keys, scattered(keys, all_buffer_ptrs, all_sizes), config)

    # --- replacements ---

    def upsert(self, key: Text, value: Buffer, config: Config = DEFAULT) -> int:
        return self._upsert([key], [value], config)[0]

    def upsert_batch(self, keys: Texts, values: Buffers, config: Config = DEFAULT) -> int:
        """Return the first error code, or 0."""
        return _first(keys, values, self._upsert(keys, values, config))

    def upsert_parts(self, key: Text, *parts: Part, config: Config = DEFAULT) -> int:
        return self._upsert([key], [list(parts)], config)[0] if any(part.nbytes for part in parts) else OK

    def upsert_from(self, key: Text, buffer_ptr: Number, size: Number, config: Config = DEFAULT) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0] if size else OK

    def batch_upsert_from(self, keys: Texts, buffer_ptrs: Numbers, sizes: Numbers, config: Config = DEFAULT) -> list[int]:
        return self._upsert(keys, _memories(buffer_ptrs, sizes), config)

    # --- implementation ---

    def _put_staged(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig) -> list[int]:
        """Put. Rejected without a local buffer, as in Mooncake, although nothing is staged here."""
        return self._put(keys, values, config) if self._can_stage else [INVALID_PARAMS] * len(keys)

    def _put(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig) -> list[int]:
        def put(client: Client) -> list[int]:
            names = self._keys(keys)
            given = [value if key else None for key, value in zip(keys, values, strict=True)]
            results = client.put_batch_from(names, given, namespace=self._namespace, ack=ACK, retention=config.retention())
            codes = [stored(result) for result in results]
            if config.with_hard_pin:
                client.pin([name for name, code in zip(names, codes, strict=True) if code == OK])
            return codes

        if len(keys) != len(values) or not is_sound(config, len(keys)):
            return [INVALID_PARAMS] * len(keys)
        return self._call_each(len(keys), put)

    def _upsert(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig) -> list[int]:
        def upsert(client: Client) -> list[int]:
            names = [self._key(key) for key in given]
            replaced = client.replace(names, list(given.values()), namespace=self._namespace, force=True, ack=ACK)
            if (hint := config.retention()) is not None:
                with suppress(KVStoreError):  # the objects are stored, whether they have the hint or not
                    client.retain(names, hint)
            if config.with_hard_pin:
                client.pin(names)
            codes = {key: OK if is_stored else OBJECT_HAS_LEASE for key, is_stored in zip(given, replaced, strict=True)}
            return [codes.get(key, INVALID_PARAMS) for key in keys]

        if len(keys) != len(values) or not is_sound(config, len(keys)):
            return [INVALID_PARAMS] * len(keys)
        # The first value of a repeated key wins: one value cannot replace another of the same call.
        given = {key: value for key, value in reversed(list(zip(keys, values, strict=True))) if key and _has_bytes(value)}
        return self._call_each(len(keys), upsert)


def scattered(keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]) -> list[Any]:
    """Return each key's memory ranges, None for an invalid range. [] if the lists differ in length."""
    if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
        return []
    rows = list(zip(all_buffer_ptrs, all_sizes, strict=True))
    if any(len(pointers) != len(sizes) for pointers, sizes in rows):
        return []
    found = [_memories(pointers, sizes) for pointers, sizes in rows]
    return [None if None in parts else parts for parts in found]


def _memories(pointers: Sequence[int], sizes: Sequence[int]) -> list[Memory | None]:
    """Return each range's memory; [] if the lists differ in length."""
    return [memory(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)] if len(pointers) == len(sizes) else []


def _has_bytes(value: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, Memory):
        return value.size_bytes > 0
    return any(map(_has_bytes, value)) if isinstance(value, list) else memoryview(value).nbytes > 0


def _first(keys: Sequence[str], values: Sequence[Any], codes: Sequence[int]) -> int:
    if len(keys) != len(values):
        return INVALID_PARAMS
    return next((code for code in codes if code != OK), OK)
