"""Tests of followed_records.py: the records of a catalog, as a directory needs them."""

import random

import pytest

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Op
from kvstore.master.directory import records
from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.directory import GENERATIONS_AHEAD, Directory
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.membership.members import NodeInfo
from kvstore.master.directory.records import Description, NodeRecord, tenant_prefix
from kvstore.master.directory.weights_records import (
    NamespaceRecord,
    Weights,
    WeightsRecord,
    WeightsVersion,
    delete_namespace,
    delete_weights,
    put_namespace,
    put_weights,
)
from kvstore.protocol.errors import Corrupt

RED = tenant_prefix("red")
S = 1_000_000_000


def puts(*keys: bytes, generation: int = 5, holders: tuple[int, ...] = (1,), tenant: str = "red") -> BlockPuts:
    count = len(keys)
    return BlockPuts(tenant, keys, [10] * count, [20] * count, [generation] * count, ["ns"] * count, [b""] * count, [holders] * count)


def stood_on(followed: FollowedRecords, *, wall_ns: int = 1000, now_ns: int = 0) -> Directory:
    directory = Directory(7, followed, DirectoryLimits(), wall_ns=wall_ns, now_ns=now_ns, rng=random.Random(1))
    directory.check_integrity()
    return directory


def test_blocks_come_and_go_as_the_catalog_says() -> None:
    followed = FollowedRecords()
    followed.take([puts(b"a", b"b"), puts(), BlockDeletes("red", [b"a", b"unknown"]), BlockDeletes("nobody", [b"a"])])
    assert followed.blocks() == 1
    followed.take([puts(b"b", generation=9, holders=(1, 2)), puts(b"c", generation=3)])
    assert (followed.blocks(), followed.last_generation) == (2, 9)
    row = followed.tenants.of("red").rows[b"b"]
    assert (followed.rows.version(row).generation, [node_id for node_id, _state in followed.rows.pairs(row)]) == (9, [1, 2])
    followed.rows.check_integrity()


def test_unmerged_changes_give_the_same_records() -> None:
    """A block that was put again, one that was deleted, and a cycle of parents of which one has gone since."""
    followed = FollowedRecords()
    a, b = puts(b"a")._replace(parents=[b"b"]), puts(b"b")._replace(parents=[b"a"])
    followed.take([a, b, puts(b"c"), puts(b"c", generation=9), BlockDeletes("red", [b"never there"])])
    followed.take([BlockDeletes("red", [b"a"]), Op(b"n", None), records.put_node("one", 1, 0)])
    assert followed.blocks() == 2
    followed.rows.check_integrity()
    followed.take([BlockDeletes("red", [b"b"])])
    assert stood_on(followed).blocks_at(1) == 1


def test_a_tenant_that_has_nothing_any_more_is_forgotten() -> None:
    followed = FollowedRecords()
    followed.take([puts(b"a"), BlockDeletes("red", [b"a"])])
    followed.run_due()
    assert followed.tenants.get("red") is None


def test_a_directory_stands_on_the_last_records_of_each_kind() -> None:
    followed = FollowedRecords()
    one, two = Description(bytes(100_000), b"x"), Description(b"[]", b"")
    followed.take([records.put_node("a", 1, 0), *records.put_description("a", one, Description()), records.put_node("b", 2, 0)])
    followed.take([*records.put_description("a", two, one), records.put_node("a", 1, 40), records.put_node("b", 2, 50)])
    followed.take([records.delete_node("b"), records.put_unknown_nodes(60, 2)])
    assert list(followed.each(NodeRecord)) == [NodeRecord("a", 1, 40)]
    directory = stood_on(followed)
    (node,) = directory.members
    assert (node.info.name, node.removal_horizon, node.description, node.is_live) == ("a", 40, two, False)
    assert directory.register(NodeInfo("c", 1), [], 0)[0].node_id == 3, "no id is given twice"


def test_no_node_is_live_at_a_new_owner() -> None:
    followed = FollowedRecords()
    followed.take([records.put_node("one", 1, 0), puts(b"a")])
    followed.rows.sets.set_live([1])
    directory = stood_on(followed)
    assert list(directory.queries.exists("red", [b"a"])) == [0], "who asks waits for the node"
    directory.register(NodeInfo("one", 1), [], 0)
    assert list(directory.queries.exists("red", [b"a"])) == [1]


def test_operator_quotas_survive_a_failover() -> None:
    followed = FollowedRecords()
    followed.take(
        [records.put_quota("red", {"pins": 1}), records.put_quota("red", {"pins": 2}), records.put_quota("blue", {"blocks": None})]
    )
    followed.take([records.delete_quota("blue"), records.delete_quota("nobody")])
    assert stood_on(followed).operator_quotas.tenants == {"red": {"pins": 2}}


def test_operator_quotas_are_a_new_mapping_after_a_change() -> None:
    followed = FollowedRecords()
    followed.take([records.put_quota("red", {"pins": 1})])
    first = followed.operator_quotas()
    followed.take([records.put_node("a", 1, 0), records.delete_node("a"), records.delete_quota("nobody")])
    assert followed.operator_quotas() is first, "who looks ten times a second makes nothing anew"
    followed.take([records.put_quota("red", {"pins": 2})])
    second = followed.operator_quotas()
    followed.take([records.delete_quota("red")])
    assert (first, second, followed.operator_quotas()) == ({"red": {"pins": 1}}, {"red": {"pins": 2}}, {})


def test_absent_description_is_empty() -> None:
    followed = FollowedRecords()
    one = Description(b"{}", b"x")
    followed.take([*records.put_description("a", one, Description()), *records.put_description("a", Description(), one)])
    followed.take([Op(b"d\x00nobody", None)])
    assert followed.description("a") == Description()


def test_what_is_removed_and_pinned_is_kept_until_it_is_not() -> None:
    followed = FollowedRecords()
    followed.take([records.put_node("a", 1, 0), puts(b"a", b"b", b"c"), records.removed(RED, b"x", 70), records.removed(RED, b"y", 80)])
    followed.take([records.removed(RED, b"y", None), records.pin(RED, b"a"), records.pin(RED, b"b", until_ms=2), records.pin(RED, b"c")])
    followed.take([records.unpin(RED, b"c"), records.unpin(RED, b"unknown"), records.removed(tenant_prefix("nobody"), b"x", None)])
    directory = stood_on(followed, wall_ns=1_000_000, now_ns=S)
    assert (directory.counts().pinned, directory.pins.expire(S + 999_999).ops) == (2, [])
    (ended,) = directory.pins.expire(S + 1_000_000).ops
    assert ended == records.unpin(RED, b"b")
    assert followed.tenants.of("red").removed == {b"x": 70}


def test_generations_start_above_seen_ones_and_the_clock() -> None:
    for generation, removed, wall_ns, first in ((5, 3, 1000, 1001), (2000, 3, 1000, 2001), (5, 3000, 1000, 3001)):
        followed = FollowedRecords()
        followed.take([puts(b"a", generation=generation), records.removed(RED, b"x", removed)])
        directory = stood_on(followed, wall_ns=wall_ns)
        node, _ops = directory.register(NodeInfo("n", 1), [], 0)
        node.tiers = ()
        assert directory._reservations.last_generation == first - 1


def test_epochs_start_above_a_former_owners_grants() -> None:
    """Its clock was ahead by an hour, and nothing that it granted was published."""
    former = stood_on(FollowedRecords(), wall_ns=3600 * S)
    allowed = former.grants_ahead()
    assert former.grants_ahead() == []
    followed = FollowedRecords()
    followed.take(allowed)
    newer = stood_on(followed, wall_ns=1000)
    assert newer._reservations.last_generation >= former._reservations.last_generation + GENERATIONS_AHEAD
    node, _ops = newer.register(NodeInfo("n", 1), [], 0)
    assert node.epoch > former.register(NodeInfo("n", 1), [], 0)[0].epoch
    former._reservations.saw(former._reservations.last_generation + GENERATIONS_AHEAD // 2)
    assert former.grants_ahead() != allowed, "more are allowed before they are used up"


@pytest.mark.parametrize("op", [Op(b"z", b""), Op(b"n", b"abc"), Op(b"", b"")])
def test_a_record_of_something_else_is_refused(op: Op) -> None:
    with pytest.raises(Corrupt):
        FollowedRecords().take([op])


def test_a_deletion_of_what_is_not_ours_is_nothing() -> None:
    followed = FollowedRecords()
    followed.take([records.put_unknown_nodes(5, 9), Op(b"z", None), Op(b"f", None)])
    assert followed.unknown_nodes is not None


def test_weights_and_their_namespaces_come_and_go() -> None:
    followed = FollowedRecords()
    namespace = NamespaceRecord("red", bytes(16), bytes(16), "model", b"form")
    version = WeightsRecord(WeightsVersion(Weights("red", "base")), 1, 2, True, False, ("a",))
    followed.take([put_namespace(namespace), put_weights(version)])
    assert (list(followed.each(WeightsRecord)), list(followed.each(NamespaceRecord))) == ([version], [namespace])
    followed.take([delete_namespace("red", bytes(16)), delete_weights(version.key)])
    assert (list(followed.each(WeightsRecord)), list(followed.each(NamespaceRecord))) == ([], [])
