"""Reads against a scripted cluster."""

from collections.abc import Iterator

import pytest

from kvstore.client.buffers import as_destination
from kvstore.client.locations import Hint
from kvstore.client.reading import FreshBytes, IntoBuffers, Reading
from kvstore.protocol.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidArgument,
    LeaseExpired,
    ProtocolError,
    Unavailable,
)
from kvstore.protocol.master_messages import Lookup, Nodes
from kvstore.protocol.node_messages import INLINE, LATER, Blocks, Read, Slabs
from tests.client.oracle import MASTER, Oracle, OracleChannel, OracleNode

BIG = b"B" * 100_000


@pytest.fixture
def nodes() -> Iterator[tuple[OracleNode, OracleNode]]:
    local, remote = OracleNode(1, local=True), OracleNode(2, local=False)
    yield local, remote
    local.close()
    remote.close()


Pair = tuple[OracleNode, OracleNode]


def get(oracle: Oracle, *keys: bytes) -> list[bytes | None]:
    reading = Reading(oracle.resources, keys, FreshBytes(len(keys)), oracle.deadline(), lambda: 1000)
    result: list[bytes | None] = oracle.run(reading.run())
    assert oracle.all_given_back()
    return result


def get_into(oracle: Oracle, keys: list[bytes], buffers: list[bytearray]) -> list[int | None]:
    reading = Reading(oracle.resources, keys, IntoBuffers([as_destination(b) for b in buffers]), oracle.deadline(), lambda: 1000)
    result: list[int | None] = oracle.run(reading.run())
    return result


def damaged(oracle: Oracle) -> object:
    def answer(channel: OracleChannel, message: Read) -> Blocks:
        blocks = oracle.answer(channel, message)
        assert isinstance(blocks, Blocks)
        channel.payload = b"X" + channel.payload[1:]
        return blocks

    return answer


def test_values_come_inline_from_elsewhere_and_mapped_on_this_host(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"small", b"abc", 1)
    oracle.store(b"big", BIG, 1)
    oracle.store(b"far", BIG, 2)
    assert get(oracle, b"small", b"big", b"far", b"nowhere", b"big") == [b"abc", BIG, BIG, None, BIG]
    assert oracle.releases() == [1]
    stats = oracle.resources.counters.snapshot()
    assert (stats.hits, stats.misses, stats.bytes_in, dict(stats.hits_by_tier)) == (4, 1, 300_003, {"hbm": 0, "dram": 4, "nvme": 0})


def test_no_keys_give_no_values_and_no_questions(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    assert get(oracle) == []
    assert oracle.log == []


def test_a_known_block_is_read_without_asking_the_master(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    get(oracle, b"k")
    asked = len(oracle.sent(Lookup))
    assert get(oracle, b"k") == [b"v"]
    assert len(oracle.sent(Lookup)) == asked


def test_a_stale_hint_is_dropped_and_the_master_asked_once_again(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.resources.hints.learn([(b"k", Hint(1, 99, 1))])
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


@pytest.mark.parametrize(
    ("local", "tiers", "own", "chosen"),
    [
        ((True, False), (4, 2), 1, 1),
        ((False, True), (2, 4), 2, 2),
        ((False, False), (4, 2), 0, 2),
        ((True, True), (4, 2), 1, 2),
        ((True, True), (2, 2), 1, 1),
        ((True, True), (2, 2), 2, 2),
        ((False, False), (2, 2), 0, 1),
    ],
    ids=["this host", "this host again", "faster tier", "faster tier of this host", "own node", "own node again", "any"],
)
def test_a_replica_on_this_host_is_preferred_then_the_faster_tier_then_ones_own_node(
    nodes: Pair, local: tuple[bool, bool], tiers: tuple[int, int], own: int, chosen: int
) -> None:
    for node, is_local, tier in zip(nodes, local, tiers, strict=True):
        node.local, node.tier = is_local, tier
    oracle = Oracle(*nodes, spread=own - 1 if all(local) else 0)
    oracle.store(b"k", b"v", 1, 2)
    get(oracle, b"k")
    assert oracle.resources.daemons.nodes.local_id == own
    assert [hint and hint.node_id for hint in oracle.resources.hints.find([b"k"])] == [chosen], "from the first question on"


def test_a_copy_on_this_host_is_found_by_who_remembers_the_block_elsewhere(nodes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(*nodes)
    for key in (b"k", b"other", b"near"):
        oracle.store(key, b"v", 1 if key == b"near" else 2)
    assert get(oracle, b"k", b"other", b"near") == [b"v"] * 3
    nodes[0].blocks[b"k"] = nodes[1].blocks[b"k"]
    oracle.replicas[b"k"] = [1, 2]
    before = len(oracle.sent(Lookup))
    assert get(oracle, b"k", b"near") == [b"v"] * 2
    assert len(oracle.sent(Lookup)) == before, "not so soon"
    monkeypatch.setattr("kvstore.client.reading.FAR_HINT_NS", 0)
    assert get(oracle, b"near", b"k", b"other") == [b"v"] * 3
    assert [message.keys for message in oracle.sent(Lookup)[before:]] == [[b"k", b"other"]], "what is near is not asked for"
    assert [hint and hint.node_id for hint in oracle.resources.hints.find([b"k", b"other", b"near"])] == [1, 2, 1]
    assert get(oracle, b"k") == [b"v"]
    assert len(oracle.sent(Lookup)) == before + 1


def test_a_block_elsewhere_that_is_gone_when_the_master_is_asked_anew_is_a_miss(nodes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.reading.FAR_HINT_NS", 0)
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    assert get(oracle, b"k") == [b"v"]
    oracle.replicas.clear()
    assert get(oracle, b"k") == [None]


@pytest.mark.parametrize("failure", [Unavailable("gone"), DeadlineExceeded("hangs")], ids=["gone", "hangs"])
def test_while_no_master_answers_a_block_is_read_where_it_was(nodes: Pair, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    monkeypatch.setattr("kvstore.client.reading.FAR_HINT_NS", 0)
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    get(oracle, b"k")
    oracle.script[Lookup].append(failure)
    assert get(oracle, b"k") == [b"v"]


def test_a_client_on_no_nodes_host_does_not_ask_anew(nodes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.reading.FAR_HINT_NS", 0)
    nodes[0].local = False
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    get(oracle, b"k")
    asked = len(oracle.sent(Lookup))
    assert get(oracle, b"k") == [b"v"]
    assert len(oracle.sent(Lookup)) == asked


def test_an_unreachable_node_is_avoided(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2, 1)
    oracle.resources.hints.learn([(b"k", Hint(2, 1, 1))])
    oracle.unreachable.add("node2:1")
    assert get(oracle, b"k") == [b"v"]
    assert [message.avoid for message in oracle.sent(Lookup)] == [2]


def test_a_node_that_has_moved_is_found_at_its_new_place(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    get(oracle, b"k")
    oracle.unreachable.add("node2:1")
    nodes[1].port = 2
    assert get(oracle, b"k") == [b"v"]


def test_a_block_whose_only_node_is_unreachable_is_a_miss(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.unreachable.add("node2:1")
    assert get(oracle, b"k") == [None]


def test_a_block_of_a_node_that_nobody_knows_is_a_miss(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.replicas[b"k"] = [77]
    assert get(oracle, b"k") == [None]
    assert len(oracle.sent(Nodes)) >= 1


def test_an_unreachable_master_is_an_error_not_a_miss(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.unreachable.add(MASTER)
    with pytest.raises(Unavailable, match="no master can be reached"):
        get(oracle, b"k")


def test_an_idle_channel_whose_peer_has_gone_is_replaced_unnoticed(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    get(oracle, b"k")
    address = next(loan.channel.address for loan in oracle.loans if str(loan.channel.address) == "node2:1")
    for _ in range(2):
        oracle.idle[address].append(OracleChannel(address, oracle._welcome(address)))
    oracle.script[Read].extend([Unavailable("gone"), Unavailable("gone")])
    assert get(oracle, b"k") == [b"v"]


def test_damaged_bytes_are_never_returned_and_another_replica_is_read(nodes: Pair) -> None:
    nodes[0].local = False
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 1, 2)
    oracle.script[Read].append(damaged(oracle))  # type: ignore[arg-type]
    assert get(oracle, b"k") == [b"value"]
    assert oracle.resources.counters.snapshot().checksum_failures == 1


def test_a_node_that_does_not_answer_in_half_the_time_leaves_the_rest_to_another_replica(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"two", b"value", 1, 2)
    oracle.store(b"one", b"other", 1)
    oracle.script[Read].append(DeadlineExceeded("hangs"))
    assert get(oracle, b"two", b"one") == [b"value", b"other"]
    assert [loan.channel.address.unix or str(loan.channel.address) for loan in oracle.loans].count("node2:1") == 1


def test_a_node_with_the_only_replica_has_all_the_time(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 1)
    oracle.script[Read].append(DeadlineExceeded("hangs"))
    with pytest.raises(DeadlineExceeded, match="hangs"):
        get(oracle, b"k")


def test_a_block_with_no_undamaged_replica_is_an_error(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 2)
    oracle.script[Read].extend([damaged(oracle)] * 3)  # type: ignore[list-item]
    with pytest.raises(ChecksumMismatch, match="node 2"):
        get(oracle, b"k")


def test_a_value_larger_than_its_buffer_is_refused_and_the_connection_stays_in_step(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", b"12345", 2)
    oracle.store(b"b", b"123", 2)
    buffers = [bytearray(2), bytearray(8)]
    with pytest.raises(InvalidArgument, match="the buffer of key 0 has 2 bytes, its value has 5"):
        get_into(oracle, [b"a", b"b"], buffers)
    assert all(loan.channel.payload == b"" and loan.channel.is_open for loan in oracle.loans)
    assert buffers[1][:3] == b"123"


def test_a_mapped_value_larger_than_its_buffer_is_refused_and_its_lease_released(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", BIG, 1)
    with pytest.raises(InvalidArgument, match="key 0"):
        get_into(oracle, [b"a"], [bytearray(2)])
    assert oracle.releases() == [1]


def test_values_are_read_into_larger_buffers_and_their_sizes_told(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", BIG, 1)
    oracle.store(b"b", b"xyz", 1)
    buffers = [bytearray(BIG), bytearray(8), bytearray(1)]
    assert get_into(oracle, [b"a", b"b", b"c"], buffers) == [len(BIG), 3, None]
    assert bytes(buffers[0]) + bytes(buffers[1][:3]) == BIG + b"xyz"


def test_what_was_copied_after_the_lease_ran_out_is_thrown_away_and_read_again(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)
    lapsed = iter([2_000, 0, 0])
    reading = Reading(oracle.resources, [b"k"], FreshBytes(1), oracle.deadline(), lambda: next(lapsed))
    oracle.lease_until_ns = 1_000
    assert oracle.run(reading.run()) == [BIG]
    assert oracle.releases() == [1, 2]


def test_leases_that_always_run_out_are_an_error(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)
    oracle.lease_until_ns = 10
    with pytest.raises(LeaseExpired):
        get(oracle, b"k")


def test_a_socket_file_that_cannot_be_reached_falls_back_to_tcp(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)
    oracle.unreachable.add("unix:/run/node1")
    assert get(oracle, b"k") == [BIG]
    assert oracle.releases() == []


def test_a_slab_that_is_gone_is_read_anew_over_a_fresh_lease(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)

    def moved(channel: OracleChannel, message: Read) -> Blocks:
        blocks = oracle.answer(channel, message)
        assert isinstance(blocks, Blocks)
        blocks.slabs = [55]
        return blocks

    oracle.script[Read].append(moved)
    oracle.replicas[b"k"] = [1, 2]
    nodes[1].blocks[b"k"] = nodes[0].blocks[b"k"]
    assert get(oracle, b"k") == [BIG]
    assert [message.slabs for message in oracle.sent(Slabs)] == [[55]]
    assert not oracle.loans[2].channel.is_open


def test_a_slow_node_ends_the_operation_with_its_deadline(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.script[Read].append(DeadlineExceeded("too slow"))
    with pytest.raises(DeadlineExceeded):
        get(oracle, b"k")
    assert oracle.all_given_back()


def test_an_interrupted_read_closes_its_channel(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.script[Read].append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        get(oracle, b"k")
    assert oracle.all_given_back()
    assert not oracle.loans[-1].channel.is_open


def test_an_answer_for_other_than_the_keys_asked_is_a_protocol_error(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"v", 2)
    oracle.script[Read].append(Blocks(0, 0, 0, bytes([INLINE] * 2), [1, 1], [0, 0], b"\2\2", [0, 0], [0, 0]))
    with pytest.raises(ProtocolError):
        get(oracle, b"k")
    assert not oracle.loans[-1].channel.is_open


def test_batches_larger_than_a_frame_are_cut(nodes: Pair) -> None:
    oracle = Oracle(*nodes, frame_bytes=250_000)
    keys = [b"%d" % i for i in range(5)]
    for key in keys:
        oracle.store(key, BIG, 2)
    assert get(oracle, *keys) == [BIG] * 5
    assert [len(message.keys) for message in oracle.sent(Read)] == [2, 2, 1]


def test_what_an_answer_has_no_room_for_is_asked_for_again_at_the_same_node(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    keys = [b"a", b"b", b"c"]
    for key in keys:
        oracle.store(key, key * 1000, 2)

    def only_the_first(channel: OracleChannel, message: Read) -> Blocks:
        whole = oracle.answer(channel, Read(message.keys[:1], [message.generations[0]], message.inline_bytes, message.lease_ms))
        assert isinstance(whole, Blocks)
        rest = len(message.keys) - 1
        return Blocks(
            0, 0, 0, whole.statuses + bytes([LATER]) * rest, [*whole.sizes, *[0] * rest], [*whole.checksums, *[0] * rest],
            whole.tiers + bytes(rest), [*whole.slabs, *[0] * rest], [*whole.offsets, *[0] * rest],
        )  # fmt: skip

    oracle.script[Read] += [only_the_first, only_the_first]
    assert get(oracle, *keys) == [key * 1000 for key in keys]
    assert [len(read.keys) for read in oracle.sent(Read)] == [3, 2, 1]
    assert len(oracle.sent(Lookup)) == 1
    assert oracle.resources.counters.snapshot().stale_hints == 0
