"""Reads against a scripted cluster."""

import pytest

from kvstore.client.connections.locations import CachedLocation
from kvstore.client.reads.batch_read import PART_BYTES
from kvstore.protocol.errors import (
    DeadlineExceeded,
    Unavailable,
)
from kvstore.protocol.master_messages import Lookup
from kvstore.protocol.node_messages import DEFERRED, MapSlabs, ReadBlocks, ReadBlocksReply
from tests.client.oracle import BIG, MASTER, OTHER, Oracle, OracleChannel, Pair
from tests.client.reads.gets import get


def test_remote_values_are_inline_and_local_ones_mapped(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"small", b"abc", 1)
    oracle.store(b"big", BIG, 1)
    oracle.store(b"far", BIG, 2)
    assert get(oracle, b"small", b"big", b"far", b"nowhere", b"big") == [b"abc", BIG, BIG, None, BIG]
    assert oracle.releases() == [1]
    stats = oracle.resources.counters.snapshot()
    assert (stats.hits, stats.misses, stats.bytes_in, dict(stats.hits_by_tier)) == (4, 1, 300_003, {"hbm": 0, "dram": 4, "nvme": 0})


@pytest.mark.promise("shm-reads-whole")
def test_a_stale_hint_is_dropped_and_the_master_asked_once_again(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.resources.hints.learn([(b"k", CachedLocation(1, 99, 1))])
    assert get(oracle, b"k") == [b"v"]
    assert oracle.resources.counters.snapshot().stale_hints == 1
    [hint] = oracle.resources.hints.find([b"k"])
    assert hint is not None
    assert hint[:3] == (2, 1, 1)


def test_a_block_that_the_master_knows_and_no_node_has_is_a_miss(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    nodes[1].blocks.clear()
    assert get(oracle, b"k") == [None]


def test_an_unreachable_node_is_avoided(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2, 1)
    oracle.resources.hints.learn([(b"k", CachedLocation(2, 1, 1))])
    oracle.unreachable.add("node2:1")
    assert get(oracle, b"k") == [b"v"]
    assert [message.avoid for message in oracle.sent(Lookup)] == [2]


def test_an_unreachable_master_is_an_error_not_a_miss(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.unreachable.add(MASTER)
    with pytest.raises(Unavailable, match="no master can be reached"):
        get(oracle, b"k")


@pytest.mark.promise("no-wait-for-peers")
def test_slow_node_leaves_half_the_time_to_another_replica(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"two", b"value", 1, 2)
    oracle.store(b"one", b"other", 1)
    oracle.script[ReadBlocks].append(DeadlineExceeded("hangs"))
    assert get(oracle, b"two", b"one") == [b"value", b"other"]
    assert [connection.channel.address.unix or str(connection.channel.address) for connection in oracle.loans].count("node2:1") == 1


@pytest.mark.promise("no-wait-for-peers")
def test_a_node_with_the_only_replica_has_all_the_time(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 1)
    oracle.script[ReadBlocks].append(DeadlineExceeded("hangs"))
    with pytest.raises(DeadlineExceeded, match="hangs"):
        get(oracle, b"k")


def test_a_slab_that_is_gone_is_read_anew_over_a_fresh_lease(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)

    def moved(channel: OracleChannel, message: ReadBlocks) -> ReadBlocksReply:
        blocks = oracle.answer(channel, message)
        assert isinstance(blocks, ReadBlocksReply)
        blocks.slabs = [55]
        return blocks

    oracle.script[ReadBlocks].append(moved)
    oracle.replicas[b"k"] = [1, 2]
    nodes[1].blocks[b"k"] = nodes[0].blocks[b"k"]
    assert get(oracle, b"k") == [BIG]
    assert [message.slabs for message in oracle.sent(MapSlabs)] == [[55]]
    assert not oracle.loans[3].channel.is_open


def test_batches_larger_than_a_frame_are_cut(nodes: Pair) -> None:
    oracle = Oracle(*nodes, frame_bytes=250_000)
    keys = [b"%d" % i for i in range(5)]
    for key in keys:
        oracle.store(key, BIG, 2)
    assert get(oracle, *keys) == [BIG] * 5
    assert [len(message.keys) for message in oracle.sent(ReadBlocks)] == [2, 2, 1]


@pytest.mark.promise("memory-bounded")
def test_keys_over_the_reply_limit_are_requested_again(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    keys = [b"a", b"b", b"c"]
    for key in keys:
        oracle.store(key, key * 1000, 2)

    def only_the_first(channel: OracleChannel, message: ReadBlocks) -> ReadBlocksReply:
        whole = oracle.answer(channel, ReadBlocks(message.keys[:1], [message.generations[0]], message.inline_bytes, message.lease_ms))
        assert isinstance(whole, ReadBlocksReply)
        rest = len(message.keys) - 1
        return ReadBlocksReply(
            0, 0, 0, whole.statuses + bytes([DEFERRED]) * rest, [*whole.sizes, *[0] * rest], [*whole.checksums, *[0] * rest],
            whole.tiers + bytes(rest), [*whole.slabs, *[0] * rest], [*whole.offsets, *[0] * rest],
        )  # fmt: skip

    oracle.script[ReadBlocks] += [only_the_first, only_the_first]
    assert get(oracle, *keys) == [key * 1000 for key in keys]
    assert [len(read.keys) for read in oracle.sent(ReadBlocks)] == [3, 2, 1]
    assert len(oracle.sent(Lookup)) == 1
    assert oracle.resources.counters.snapshot().stale_hints == 0


def test_nodes_are_read_concurrently(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"here", BIG, 1)
    oracle.store(b"there", BIG, 2)
    assert get(oracle, b"here", b"there") == [BIG, BIG]
    assert oracle.together == [2]
    assert get(oracle, b"there") == [BIG]
    assert get(oracle, b"here", b"here") == [BIG, BIG]
    assert oracle.together == [2]


def test_of_parts_of_one_node_two_are_asked_for_at_a_time(nodes: Pair) -> None:
    oracle = Oracle(*nodes, frame_bytes=250_000)
    keys = [b"%d" % i for i in range(9)]
    for key in keys:
        oracle.store(key, BIG, 2)
    assert get(oracle, *keys) == [BIG] * 9
    assert oracle.together == [2]
    assert len(oracle.sent(ReadBlocks)) == 5


def test_remote_batch_is_read_in_overlapping_parts(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    value = b"v" * (PART_BYTES // 2 + 1)
    keys = [b"a", b"b", b"c"]
    for key in keys:
        oracle.store(key, value, 2)
    assert get(oracle, *keys) == [value] * 3
    assert [len(message.keys) for message in oracle.sent(ReadBlocks)] == [1, 1, 1]
    assert oracle.together == [2]


def many_parts(oracle: Oracle, *node_ids: int) -> list[bytes]:
    """Keys of blocks that these nodes have, each a part of its own."""
    keys = [b"%d" % i for i in range(9)]
    for key in keys:
        oracle.store(key, BIG, *node_ids)
    return keys


@pytest.mark.promise("no-wait-for-peers")
def test_hanging_node_gets_no_further_parts(nodes: Pair) -> None:
    oracle = Oracle(*nodes, frame_bytes=150_000)
    keys = many_parts(oracle, 1, 2)
    oracle.store(b"one", OTHER, 1)
    oracle.script[ReadBlocks].append(DeadlineExceeded("hangs"))
    assert get(oracle, *keys, b"one") == [BIG] * 9 + [OTHER]
    assert [(message.avoid, len(message.keys)) for message in oracle.sent(Lookup)] == [(0, 10), (1, 9), (0, 1)]


def test_parts_with_uncommitted_puts_stay_at_their_node(nodes: Pair) -> None:
    oracle = Oracle(*nodes, frame_bytes=150_000)
    keys = many_parts(oracle, 1)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    oracle.resources.uncommitted_puts.begin(known)
    for key in keys[:6]:
        del oracle.replicas[key]
    oracle.resources.hints.learn((key, CachedLocation(1, 0, len(BIG))) for key in keys[:6])
    oracle.resources.hints.learn((key, CachedLocation(1, 7, len(BIG))) for key in keys[6:])
    oracle.script[ReadBlocks].append(Unavailable("it broke"))
    assert get(oracle, *keys)[1:6] == [BIG] * 5
    assert [len(message.keys) for message in oracle.sent(Lookup)] == [1, 3]


def test_get_after_a_timeout_asks_the_master(nodes: Pair) -> None:
    oracle = Oracle(*nodes, frame_bytes=150_000)
    keys = many_parts(oracle, 1, 2)
    oracle.resources.hints.learn((key, CachedLocation(1, 0, len(BIG))) for key in keys[:5])
    oracle.resources.hints.learn((key, CachedLocation(1, 5, len(BIG))) for key in keys[5:])
    oracle.script[ReadBlocks].append(DeadlineExceeded("hangs"))
    with pytest.raises(DeadlineExceeded, match="hangs"):
        get(oracle, *keys)
    oracle.script[ReadBlocks].append(DeadlineExceeded("hangs"))
    assert get(oracle, *keys) == [BIG] * 9


def test_hints_of_uncommitted_puts_survive_a_timeout(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    oracle.resources.uncommitted_puts.begin(known)
    hints = {b"early": CachedLocation(1, 0, 5), b"late": CachedLocation(1, 7, 5)}
    oracle.resources.hints.learn(hints.items())
    oracle.script[ReadBlocks].append(DeadlineExceeded("hangs"))
    with pytest.raises(DeadlineExceeded, match="hangs"):
        get(oracle, *hints)
    assert oracle.resources.hints.find(list(hints)) == [hints[b"early"], None]
