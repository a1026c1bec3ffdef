"""Questions to the master of a scripted cluster."""

from kvstore.client.metadata_requests import MetadataOperations
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Exists, MatchPrefix, Remove
from kvstore.protocol.session_messages import Count
from tests.client.oracle import Oracle


def test_a_prefix_longer_than_a_message_is_matched_in_parts(oracle: Oracle) -> None:
    oracle.script[MatchPrefix].extend([Count(MAX_BATCH), Count(3)])
    keys = [b"%d" % i for i in range(MAX_BATCH + 10)]
    assert oracle.run(MetadataOperations(oracle.resources).match_prefix(keys, oracle.deadline())) == MAX_BATCH + 3
    oracle.script[MatchPrefix].append(Count(5))
    assert oracle.run(MetadataOperations(oracle.resources).match_prefix(keys, oracle.deadline())) == 5


def test_a_batch_longer_than_a_message_is_asked_in_parts(oracle: Oracle) -> None:
    keys = [b"%d" % i for i in range(MAX_BATCH + 1)]
    assert oracle.run(MetadataOperations(oracle.resources).exists(keys, oracle.deadline())) == [False] * (MAX_BATCH + 1)
    assert [len(message.keys) for message in oracle.sent(Exists)] == [MAX_BATCH, 1]


def test_locate_leaves_the_name_of_a_node_nobody_knows_empty(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    oracle.replicas[b"a"] = [77]
    [[location]] = oracle.run(MetadataOperations(oracle.resources).locate([b"a"], oracle.deadline()))
    assert (location.node, location.node_id) == ("", 77)


def test_a_key_that_is_repeated_is_removed_and_counted_once(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    assert oracle.run(MetadataOperations(oracle.resources).remove([b"a", b"b", b"a"], oracle.deadline(), force=False)) == 1
    assert [list(message.keys) for message in oracle.sent(Remove)] == [[b"a", b"b"]]
