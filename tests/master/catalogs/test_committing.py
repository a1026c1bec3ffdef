"""Tests of `Committer` in group_commit.py."""

from pathlib import Path

import pytest

from kvstore.master.catalogs.group_commit import Committer
from kvstore.master.catalogs.interface import Op
from kvstore.master.catalogs.lmdb import LmdbCatalog
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.rpc.reactor import Reactor
from tests.master.catalogs.conformance import elected


def test_the_memory_catalog_is_answered_in_the_same_turn() -> None:
    reactor, catalog, order = Reactor(), MemoryCatalog(), list[str]()
    elected(catalog)
    Committer(reactor, catalog).commit([Op(b"k", b"v")], lambda: order.append("done"))
    assert order == ["done"]
    reactor.close()


def test_committer_calls_back_in_the_loop_in_order(tmp_path: Path) -> None:
    reactor, catalog, order = Reactor(), LmdbCatalog(tmp_path), list[int]()
    elected(catalog)
    committer = Committer(reactor, catalog)
    for n in range(5):
        committer.commit([Op(b"k", b"%d" % n)] if n % 2 == 0 else [], lambda n=n: order.append(n))  # type: ignore[misc]
    assert order == []
    while len(order) < 5:
        reactor.run_once(1.0)
    assert order == [0, 1, 2, 3, 4]
    catalog.close()
    reactor.close()


@pytest.mark.parametrize("closed", [False, True])
def test_committer_drops_callbacks_of_failed_commits(closed: bool) -> None:
    reactor, catalog, durable = Reactor(), MemoryCatalog(), list[str]()
    if closed:
        elected(catalog)
        catalog.close()
    else:
        catalog.open(deadline_s=1)
    Committer(reactor, catalog).commit([Op(b"k", b"v")], lambda: durable.append("no"))
    assert durable == []
    reactor.close()


@pytest.mark.promise("failover")
def test_after_the_end_nothing_is_written_and_nobody_is_told(tmp_path: Path) -> None:
    reactor, catalog, told = Reactor(), LmdbCatalog(tmp_path), list[str]()
    elected(catalog)
    former, later = Committer(reactor, catalog), Committer(reactor, catalog)
    former.commit([Op(b"k", b"v")], lambda: told.append("under way"))
    former.end()
    former.commit([Op(b"k", b"late")], lambda: told.append("late"))
    later.commit([], lambda: told.append("later"))
    while not told:
        reactor.run_once(1.0)
    assert told == ["later"]
    catalog.close()
    reactor.close()
    reopened = LmdbCatalog(tmp_path)
    assert elected(reopened).records[b"k"] == b"v", "what was under way, and nothing that came late"
    reopened.close()
