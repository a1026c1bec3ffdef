"""Rows whose bucket of a key index is full (key_index.py), by bucket. Not thread-safe.

Rows lie packed in bytes objects, in dictionaries of a few hundred buckets each: nothing of it is ever looked at by Python's garbage
collector, and no dictionary is large when it grows. One dictionary of lists stopped the loop for 0.1 s at 20 million rows, in each full
collection, and in proportion to them.
"""

from collections.abc import Iterator
from itertools import chain
from struct import pack
from typing import Final

PART_BUCKETS: Final = 4096
"""Whose rows are in one dictionary: every tenth to fiftieth of them has any."""


class SpilledRows:
    """See the module. Buckets without rows take nothing."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __getitem__(self, bucket: int) -> list[int]:
        """Empty for one that has none."""
        rows: list[int] = memoryview(self._parts.get(bucket // PART_BUCKETS, {}).get(bucket, b"")).cast("I").tolist()
        return rows

    def __iter__(self) -> Iterator[int]:
        """The buckets that have any, in no order."""
        return chain.from_iterable(self._parts.values())

    def add(self, bucket: int, *rows: int) -> None:
        """Behind those that it has."""
        part = self._parts.setdefault(bucket // PART_BUCKETS, {})
        part[bucket] = part.get(bucket, b"") + pack(f"{len(rows)}I", *rows)

    def pop(self, bucket: int) -> list[int]:
        """What `[bucket]` is; it has none any more."""
        rows = self[bucket]
        if rows:
            part = self._parts[bucket // PART_BUCKETS]
            del part[bucket]
            if not part:
                del self._parts[bucket // PART_BUCKETS]
        return rows
