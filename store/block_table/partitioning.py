"""Which partition of the key space each block of a node belongs to. The masters tell how many there are at the first registration."""

from collections.abc import Mapping, Sequence

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.partitions import partition_of
from kvstore.store.block_table.block import Block


class Partitioning:
    """What the parts of a node share. Not thread-safe: the node's loop is the only caller."""

    __slots__ = ("_is_told", "count")

    def __init__(self) -> None:
        self.count = 1
        """1 until a master has told: nothing is said to any master before."""
        self._is_told = False

    def tell(self, count: int) -> bool:
        """The cluster has so many; whether that is news. Raises ConfigError: another cluster, with another number, had this node before."""
        if self._is_told:
            if count != self.count:
                raise ConfigError(
                    f"the cluster's key space has {count} partitions, and that of the one that this node was in had {self.count}: start "
                    "the node anew"
                )
            return False
        self.count, self._is_told = count, True
        return True

    def of(self, key: bytes) -> int:
        return partition_of(key, self.count) if self.count > 1 else 0

    def group(self, blocks: Sequence[Block]) -> Mapping[int, Sequence[Block]]:
        """The blocks by their partition, each in order."""
        if self.count == 1:
            return {0: blocks}
        found: dict[int, list[Block]] = {}
        for block in blocks:
            found.setdefault(partition_of(block.key, self.count), []).append(block)
        return found
