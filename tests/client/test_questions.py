"""Questions to the master of a scripted cluster."""

import pytest

from kvstore.client.locations import Location
from kvstore.client.questions import Questions
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Exists, Lookup, MatchPrefix, Nodes, Remove
from kvstore.protocol.session_messages import Count, Flags
from tests.client.oracle import Oracle


def test_exists_tells_each_key(oracle: Oracle) -> None:
    oracle.store(b"a", b"1", 1)
    assert oracle.run(Questions(oracle.resources).exists([b"a", b"b"], oracle.deadline())) == [True, False]


def test_match_prefix_counts_up_to_the_first_gap(oracle: Oracle) -> None:
    for key in (b"a", b"b", b"d"):
        oracle.store(key, b"1", 1)
    assert oracle.run(Questions(oracle.resources).match_prefix([b"a", b"b", b"c", b"d"], oracle.deadline())) == 2
    assert oracle.run(Questions(oracle.resources).match_prefix([], oracle.deadline())) == 0


def test_a_prefix_longer_than_a_message_is_matched_in_parts(oracle: Oracle) -> None:
    oracle.script[MatchPrefix].extend([Count(MAX_BATCH), Count(3)])
    keys = [b"%d" % i for i in range(MAX_BATCH + 10)]
    assert oracle.run(Questions(oracle.resources).match_prefix(keys, oracle.deadline())) == MAX_BATCH + 3
    oracle.script[MatchPrefix].append(Count(5))
    assert oracle.run(Questions(oracle.resources).match_prefix(keys, oracle.deadline())) == 5


def test_a_batch_longer_than_a_message_is_asked_in_parts(oracle: Oracle) -> None:
    keys = [b"%d" % i for i in range(MAX_BATCH + 1)]
    assert oracle.run(Questions(oracle.resources).exists(keys, oracle.deadline())) == [False] * (MAX_BATCH + 1)
    assert [len(message.keys) for message in oracle.sent(Exists)] == [MAX_BATCH, 1]


def test_locate_names_the_nodes_and_tiers(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    [[location], none] = oracle.run(Questions(oracle.resources).locate([b"a", b"b"], oracle.deadline()))
    assert none == []
    assert (location.node, location.node_id, location.tiers, location.size_bytes, location.generation) == ("n1", 1, ("dram",), 5, 1)
    assert isinstance(location, Location)
    asked = len(oracle.sent(Nodes))
    oracle.run(Questions(oracle.resources).locate([b"a"], oracle.deadline()))
    assert len(oracle.sent(Nodes)) == asked


def test_locate_leaves_the_name_of_a_node_nobody_knows_empty(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    oracle.replicas[b"a"] = [77]
    [[location]] = oracle.run(Questions(oracle.resources).locate([b"a"], oracle.deadline()))
    assert (location.node, location.node_id) == ("", 77)


def test_remove_counts_what_is_gone_and_forgets_it(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    assert oracle.run(Questions(oracle.resources).remove([b"a", b"b"], oracle.deadline(), force=True)) == 1


def test_a_key_that_is_repeated_is_removed_and_counted_once(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    assert oracle.run(Questions(oracle.resources).remove([b"a", b"b", b"a"], oracle.deadline(), force=False)) == 1
    assert [list(message.keys) for message in oracle.sent(Remove)] == [[b"a", b"b"]]


def test_pin_tells_which_blocks_are_there(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    assert oracle.run(Questions(oracle.resources).pin([b"a", b"b"], oracle.deadline(), pinned=True)) == [True, False]


def test_one_key_is_not_a_batch(oracle: Oracle) -> None:
    with pytest.raises(InvalidArgument, match="not one key"):
        oracle.run(Questions(oracle.resources).exists(b"key", oracle.deadline()))  # type: ignore[arg-type]


def test_flags_come_as_bools(oracle: Oracle) -> None:
    oracle.script[Exists].append(Flags(b"\1\0"))
    assert oracle.run(Questions(oracle.resources).exists([b"a", b"b"], oracle.deadline())) == [True, False]
    assert oracle.sent(Lookup) == []
