"""Tests of shared_reuse.py: which groups a node reports, and which policies get what others know."""

from collections.abc import Callable

import pytest

from kvstore.protocol.message import MAX_REUSE_TENANTS
from kvstore.store.block_table.shared_reuse import SharedReuse
from kvstore.tiers.policies.prefix.policy import PrefixFamily
from kvstore.tiers.policies.prefix.visits import CLASSES
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics
from tests.store.tables import Store

MakeStore = Callable[..., Store]
RED = "red"


def report(store: Store, *, is_first: bool = False) -> dict[str, bytes]:
    return dict(store.table.shared_reuse.report(store.table.accesses, is_first=is_first))


@pytest.fixture
def learned(make_store: MakeStore) -> bytes:
    """Statistics of a node that has stored 40 blocks."""
    store = make_store(4000, policy="prefix")
    for number in range(40):
        store.put(f"block {number}")
    return report(store)[RED]


def observations(store: Store) -> float:
    """Of other nodes, as tenant red's policies use them."""
    family = store.table._families.family("red")
    assert isinstance(family, PrefixFamily)
    return family._model.estimate._of_others.observations


def test_report_names_the_tenants_with_most_blocks(make_store: MakeStore) -> None:
    store = make_store(100_000, policy="prefix")
    for tenant in range(MAX_REUSE_TENANTS + 4):
        for number in range(1 + (tenant < MAX_REUSE_TENANTS)):
            store.put(f"{tenant} {number}", tenant=f"tenant-{tenant}")
    assert set(report(store)) == {f"tenant-{tenant}" for tenant in range(MAX_REUSE_TENANTS)}


def test_nothing_is_reported_twice_but_to_a_new_master(make_store: MakeStore) -> None:
    store = make_store(4000, policy="prefix")
    store.put("a")
    assert report(store)
    assert not report(store)
    assert report(store, is_first=True)
    store.put("b")
    assert report(store)


def test_policies_that_learn_nothing_report_nothing(make_store: MakeStore) -> None:
    store = make_store(4000, policy="lru")
    store.put("a")
    assert not report(store)
    store.table.shared_reuse.apply([])


def test_others_statistics_are_used_until_the_next_answer(make_store: MakeStore, learned: bytes) -> None:
    store = make_store(4000, policy="prefix")
    store.put("a")
    report(store)
    reuse: SharedReuse = store.table.shared_reuse
    reuse.apply([(RED, learned), ("blue", learned)])
    assert observations(store) == pytest.approx(ReuseStatistics.unpack(learned, CLASSES).observations)
    assert reuse.exchanges == 1
    reuse.apply([])
    assert (observations(store), reuse.exchanges) == (0, 1)


def test_unusable_answer_is_counted_and_ignored(make_store: MakeStore) -> None:
    store = make_store(4000, policy="prefix")
    store.put("a")
    report(store)
    store.table.shared_reuse.apply([(RED, b"short")])
    assert (observations(store), store.table.shared_reuse.refused) == (0, 1)


def test_a_tenant_that_returns_begins_with_what_is_known(make_store: MakeStore, learned: bytes) -> None:
    store = make_store(4000, policy="prefix")
    block = store.put("a")
    report(store)
    store.table.shared_reuse.apply([(RED, learned)])
    store.table.copies.drop(block)
    assert store.table._families.family("red") is None
    store.put("b")
    assert observations(store) > 0
