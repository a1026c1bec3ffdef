"""Promises of partitions.py: every key belongs to one partition, and each partition is a range of shards."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.partitions import MAX_PARTITIONS, SHARDS, as_metadata, from_metadata, partition_of, split

KEYS = st.lists(st.binary(min_size=1, max_size=20), max_size=50)
COUNTS = st.integers(1, MAX_PARTITIONS)


@given(KEYS, COUNTS)
def test_keys_are_split_by_their_partitions_and_stay_in_order(keys: list[bytes], count: int) -> None:
    found = split(keys, count)
    assert sorted(index for places in found.values() for index in places) == list(range(len(keys)))
    for partition, places in found.items():
        assert places == sorted(places) != []
        assert {partition_of(keys[index], count) for index in places} == {partition}


@pytest.mark.parametrize("count", range(1, MAX_PARTITIONS + 1))
def test_each_partition_is_a_range_of_shards_and_none_is_empty(count: int) -> None:
    key_of = {xxhash.xxh3_64_intdigest(key) % SHARDS: key for key in map(str.encode, map(str, range(3000)))}
    partitions = [partition_of(key_of[shard], count) for shard in range(SHARDS)]
    assert partitions == sorted(partitions)
    assert set(partitions) == set(range(count))


def test_which_partition_a_key_belongs_to_never_changes() -> None:
    """Blocks of a cluster are where the release before put them."""
    assert [partition_of(b"key-%d" % number, 4) for number in range(8)] == [3, 3, 2, 1, 1, 1, 2, 0]


def test_a_call_says_its_partition_unless_it_is_the_first() -> None:
    assert as_metadata(0) == ()
    assert [from_metadata([("other", "9"), *as_metadata(partition)], 4) for partition in range(4)] == [0, 1, 2, 3]
    for said in ("4", "-1", "x", "100", b"1"):
        with pytest.raises(InvalidArgument, match="there is no partition"):
            from_metadata([("kvstore-partition", said)], 4)
