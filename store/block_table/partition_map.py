"""Partition of the key space for each block. The number of partitions is known from the first registration on."""

from collections.abc import Mapping, Sequence

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.partitions import partition_of
from kvstore.store.block_table.block import Block


class PartitionMap:
    """Number of partitions, shared by the parts of a node. Not thread-safe: called from the node's loop."""

    __slots__ = ("_is_known", "count")

    def __init__(self) -> None:
        self.count = 1
        """1 until a master has reported the number; no event is sent before."""
        self._is_known = False

    def set_count(self, count: int) -> bool:
        """Set the number of partitions; return True if it was unknown. Raises ConfigError if it differs: the node has
        joined another cluster."""
        if self._is_known:
            if count != self.count:
                raise ConfigError(
                    f"the cluster has {count} partitions, but had {self.count} at this node's first registration: restart the node"
                )
            return False
        self.count, self._is_known = count, True
        return True

    def of(self, key: bytes) -> int:
        return partition_of(key, self.count) if self.count > 1 else 0

    def group(self, blocks: Sequence[Block]) -> Mapping[int, Sequence[Block]]:
        """Group blocks by partition, each in order."""
        if self.count == 1:
            return {0: blocks}
        found: dict[int, list[Block]] = {}
        for block in blocks:
            found.setdefault(partition_of(block.key, self.count), []).append(block)
        return found
