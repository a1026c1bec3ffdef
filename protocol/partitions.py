"""Partitions of the key space: mapping from keys to partitions, and the partition in gRPC metadata.

A key's xxh3_64 gives its shard; a partition is a range of shards. The number of partitions is fixed when a cluster is
created. Each partition has its own catalog, owner, epoch, and a connection of every node. Partition 0 also has
everything without a key: node ids, tickets, operators' quotas and the scheduler's instances.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import xxhash

from kvstore.protocol.errors import InvalidArgument

SHARDS: Final = 64
"""Shards of the key space, and of a newly created catalog."""
MAX_PARTITIONS: Final = SHARDS
SHARED_CHILDREN: Final = 4
"""A block with this many children ends a shared prefix: prompts behind it have home nodes of their own."""
PROMPT_BYTES: Final = 8
"""Bytes of a prompt's group in a commit."""
METADATA: Final = "kvstore-partition"
"""Metadata key of a gRPC call for its partition."""


def partition_of(key: bytes, count: int) -> int:
    """Return the key's partition, of `count`."""
    return xxhash.xxh3_64_intdigest(key) % SHARDS * count // SHARDS


def split(keys: Sequence[bytes], count: int) -> dict[int, list[int]]:
    """Return the keys' indices by partition, in order; partitions without keys are left out."""
    found: dict[int, list[int]] = {}
    digest = xxhash.xxh3_64_intdigest
    for index, key in enumerate(keys):
        found.setdefault(digest(key) % SHARDS * count // SHARDS, []).append(index)
    return found


def as_metadata(partition: int) -> tuple[tuple[str, str], ...]:
    """Return the `metadata` of a call about the partition; empty for partition 0, the default."""
    return ((METADATA, str(partition)),) if partition else ()


def from_metadata(metadata: Iterable[Any], count: int) -> int:
    """Return the partition of a call. Raises InvalidArgument unless it is one of `count`."""
    text = next((value for key, value in metadata if key == METADATA), "0")
    if not (isinstance(text, str) and text.isdecimal() and len(text) <= 2 and int(text) < count):
        raise InvalidArgument(f"there is no partition {text!r}: this cluster's key space has {count}")
    return int(text)
