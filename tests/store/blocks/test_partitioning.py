"""Promises of partitioning.py: a node's blocks are grouped by partition once a master has told how many there are, which never changes."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.partitions import partition_of
from kvstore.store.blocks.partitioning import Partitioning
from tests.store.made import made

BLOCKS = [made("red", b"key-%d" % number, 1, 1) for number in range(50)]


def test_all_is_one_partition_until_a_master_tells_of_several() -> None:
    partitioning = Partitioning()
    assert partitioning.group(BLOCKS) == {0: BLOCKS}
    assert {partitioning.of(block.key) for block in BLOCKS} == {0}
    assert partitioning.tell(4)
    assert not partitioning.tell(4)
    groups = partitioning.group(BLOCKS)
    assert set(groups) == {0, 1, 2, 3}
    for partition, blocks in groups.items():
        assert blocks == [block for block in BLOCKS if partition_of(block.key, 4) == partition == partitioning.of(block.key)]


def test_a_cluster_with_another_number_is_refused() -> None:
    partitioning = Partitioning()
    partitioning.tell(1)
    with pytest.raises(ConfigError, match="has 4 partitions, and that of the one that this node was in had 1"):
        partitioning.tell(4)
    assert partitioning.count == 1
