"""Partitions: the parts of a cluster's key space, each of which one master owns at a time. What is here is all that decides whose a key is.

The catalog's shards, by the xxh3_64 of a block's key, in as many ranges as the cluster has partitions; their number is fixed when the
cluster is made. A partition has a catalog, an owner, an epoch and a link of every node of its own. Partition 0 is besides the home of
what belongs to no key: it gives nodes their ids and clients their tickets, and has operators' quotas and the instances of the scheduler.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import xxhash

from kvstore.protocol.errors import InvalidArgument

SHARDS: Final = 64
"""That partitions are ranges of: also those of a catalog that is made now."""
MAX_PARTITIONS: Final = SHARDS
METADATA: Final = "kvstore-partition"
"""Of a gRPC call: the partition that it is about."""


def partition_of(key: bytes, count: int) -> int:
    """Of `count` partitions the one that the key belongs to."""
    return xxhash.xxh3_64_intdigest(key) % SHARDS * count // SHARDS


def split(keys: Sequence[bytes], count: int) -> dict[int, list[int]]:
    """The keys' indices by partition, each in order; none of them empty."""
    found: dict[int, list[int]] = {}
    digest = xxhash.xxh3_64_intdigest
    for index, key in enumerate(keys):
        found.setdefault(digest(key) % SHARDS * count // SHARDS, []).append(index)
    return found


def as_metadata(partition: int) -> tuple[tuple[str, str], ...]:
    """For the `metadata` of a call; nothing for partition 0, which is the default."""
    return ((METADATA, str(partition)),) if partition else ()


def from_metadata(metadata: Iterable[Any], count: int) -> int:
    """Which of `count` partitions a call is about. Raises InvalidArgument: there is no such."""
    said = next((value for key, value in metadata if key == METADATA), "0")
    if not (isinstance(said, str) and said.isdecimal() and len(said) <= 2 and int(said) < count):
        raise InvalidArgument(f"there is no partition {said!r}: this cluster's key space has {count}")
    return int(said)
