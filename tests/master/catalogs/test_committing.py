"""Promises of committing.py."""

from pathlib import Path

from kvstore.master.catalogs.by_address import make_catalog
from kvstore.master.catalogs.committing import Committer
from kvstore.master.catalogs.interface import Op
from kvstore.master.catalogs.lmdb import LmdbCatalog
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.protocol.errors import KVStoreError, StaleEpoch
from kvstore.rpc.reactor import Reactor
from tests.master.catalogs.conformance import elected, opened


def test_the_memory_catalog_is_answered_in_the_same_turn() -> None:
    reactor, catalog, order = Reactor(), MemoryCatalog(), list[str]()
    elected(catalog)
    Committer(reactor, catalog, on_fenced=lambda error: order.append("fenced")).commit([Op(b"k", b"v")], lambda: order.append("done"))
    assert order == ["done"]
    reactor.close()


def test_what_is_durable_is_told_in_the_loop_and_in_order_also_without_operations(tmp_path: Path) -> None:
    reactor, catalog, order = Reactor(), LmdbCatalog(tmp_path), list[int]()
    elected(catalog)
    committer = Committer(reactor, catalog, on_fenced=lambda error: order.append(-1))
    for n in range(5):
        committer.commit([Op(b"k", b"%d" % n)] if n % 2 == 0 else [], lambda n=n: order.append(n))  # type: ignore[misc]
    assert order == []
    while len(order) < 5:
        reactor.run_once(1.0)
    assert order == [0, 1, 2, 3, 4]
    catalog.close()
    reactor.close()


def test_a_closed_catalog_is_no_fence() -> None:
    reactor, catalog, fenced = Reactor(), MemoryCatalog(), list[KVStoreError]()
    elected(catalog)
    committer = Committer(reactor, catalog, on_fenced=fenced.append)
    catalog.close()
    committer.commit([])
    assert fenced == []
    reactor.close()


def test_a_catalog_that_another_owns_is_told_once_and_nothing_is_durable_any_more(etcd_url: str) -> None:
    reactor, fenced, durable = Reactor(), list[KVStoreError](), list[str]()
    owner, other = make_catalog(f"{etcd_url}/committing"), make_catalog(f"{etcd_url}/committing")
    elected(owner)
    opened(other)
    committer = Committer(reactor, other, on_fenced=fenced.append)
    for _ in range(2):
        committer.commit([Op(b"k", b"v")], lambda: durable.append("no"))
    while not fenced:
        reactor.run_once(1.0)
    reactor.run_once(0.0)
    assert [type(error) for error in fenced] == [StaleEpoch]
    assert durable == []
    for catalog in (owner, other):
        catalog.close()
    reactor.close()
