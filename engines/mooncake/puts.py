"""Calls that store objects: from buffers, from memory by its address, in several parts, anew or in place of what is there.

They return once every process of the cluster can read the object, as Mooncake's do.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvstore.client import Client
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_HAS_LEASE, OK, stored
from kvstore.engines.mooncake.config import ReplicateConfig
from kvstore.engines.mooncake.link import Link, memory

ACK: Final = "cluster"
DEFAULT: Final = ReplicateConfig()


class Puts(Link):
    """`put*`: what is there already is a success, and stays as it is. `upsert*` replace it, whoever reads it."""

    def put(self, key: str, value: Any, config: ReplicateConfig = DEFAULT) -> int:
        return self._put_staged([key], [value], config)[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig = DEFAULT) -> int:
        """The first code that is no success."""
        return _first(self._put_staged(keys, values, config))

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig = DEFAULT) -> int:
        """The parts are one object, in order."""
        return self._put_staged([key], [list(parts)], config)[0]

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig = DEFAULT,
    ) -> int:
        """The metadata comes first in the object."""
        codes = self.batch_put_from_multi_buffers([key], [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]], config)
        return codes[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put(keys, [memory(pointer, size) for pointer, size in zip(buffer_ptrs, sizes, strict=True)], config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = DEFAULT,
    ) -> list[int]:
        """Each object lies in several places, in order."""
        return self._put(keys, scattered(keys, all_buffer_ptrs, all_sizes), config)

    # --- in place of what is there ---

    def upsert(self, key: str, value: Any, config: ReplicateConfig = DEFAULT) -> int:
        return self._upsert([key], [value], config)[0]

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig = DEFAULT) -> int:
        """The first code that is no success."""
        return _first(self._upsert(keys, values, config))

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig = DEFAULT) -> int:
        return self._upsert([key], [list(parts)], config)[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._upsert(keys, [memory(pointer, size) for pointer, size in zip(buffer_ptrs, sizes, strict=True)], config)

    # --- what they stand on ---

    def _put_staged(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig) -> list[int]:
        """Nothing is staged here; but a store without a local buffer has no such puts."""
        return self._put(keys, values, config) if self._can_stage else [INVALID_PARAMS] * len(keys)

    def _put(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig) -> list[int]:
        def put(client: Client) -> list[int]:
            names = self._keys(keys)
            codes = [stored(result) for result in client.put_batch_from(names, values, namespace=self._namespace, ack=ACK)]
            if config.with_hard_pin:
                client.pin([name for name, code in zip(names, codes, strict=True) if code == OK])
            return codes

        if len(keys) != len(values) or not config.is_sound(len(keys)):
            return [INVALID_PARAMS] * len(keys)
        return self._call_each(len(keys), put)

    def _upsert(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig) -> list[int]:
        def upsert(client: Client) -> list[int]:
            names = self._keys(keys)
            replaced = client.replace(names, values, namespace=self._namespace, force=True, ack=ACK)
            if config.with_hard_pin:
                client.pin(names)
            return [OK if is_stored else OBJECT_HAS_LEASE for is_stored in replaced]

        if len(keys) != len(values) or not config.is_sound(len(keys)):
            return [INVALID_PARAMS] * len(keys)
        return self._call_each(len(keys), upsert)


def scattered(keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]) -> list[Any]:
    """For each key the memory of its parts, None where pointers and sizes are no memory. [] unless there are as many of each."""
    if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
        return []
    found = []
    for pointers, sizes in zip(all_buffer_ptrs, all_sizes, strict=True):
        parts = [memory(pointer, size) for pointer, size in zip(pointers, sizes, strict=False)]
        found.append(None if len(pointers) != len(sizes) or None in parts else parts)
    return found


def _first(codes: Sequence[int]) -> int:
    return next((code for code in codes if code != OK), OK)
