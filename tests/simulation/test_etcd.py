"""Promises of etcd.py and catalog.py: the conformance suite that the real catalogs pass, and what the model loses on its way."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.master.catalogs.interface import Candidate, Catalog, Change, Done, Follower, Op
from kvstore.protocol.errors import KVStoreError, StaleEpoch
from tests.master.catalogs.conformance import CatalogConformance, MakeCatalog, commit, elected, opened
from tests.master.catalogs.following import Following
from tests.simulation.catalog import ModelCatalog
from tests.simulation.etcd import HOST, LEASE_NS, Etcd
from tests.simulation.memory import Descriptors
from tests.simulation.network import Network
from tests.simulation.world import Host, S, World

SETTLE_NS = 10 * S


class Pumped(Catalog):
    """A model's catalog in a process of its own, whose world runs on after each call until all is said."""

    scheme = "etcd"

    def __init__(self, etcd: Etcd, *, is_shared: bool = False) -> None:
        self.world = etcd.network.world
        self.process = self.world.start(Host(f"h{len(self.world.processes)}"), "master")
        self._catalog: ModelCatalog = self._call(lambda: ModelCatalog(etcd, is_shared=is_shared))

    def _call(self, call: Callable[[], Any], settle_ns: int = SETTLE_NS) -> Any:
        results: list[Any] = []
        errors: list[KVStoreError] = []

        def run() -> None:
            try:
                results.append(call())
            except KVStoreError as error:
                errors.append(error)

        thread = self.process.spawn(run, "caller")
        self.world.run(self.world.now_ns + settle_ns)
        assert thread.is_over
        if errors:
            raise errors[0]
        return results[0]

    def open(self, *, deadline_s: float) -> None:
        self._call(lambda: self._catalog.open(deadline_s=deadline_s), int(2 * deadline_s * S))

    @property
    def identity(self) -> str:
        return self._catalog.identity

    def follow(self, me: Candidate, follower: Follower) -> None:
        self._call(lambda: self._catalog.follow(me, follower))

    @property
    def live_masters(self) -> frozenset[str]:
        return self._catalog.live_masters

    def give_up(self) -> None:
        self._call(self._catalog.give_up)

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        self._call(lambda: self._catalog.commit(changes, done), S // 20)

    @property
    def has_written_all(self) -> bool:
        return self._catalog.has_written_all

    @property
    def health(self) -> str:
        return self._catalog.health

    def close(self) -> None:
        if self.process.is_alive:
            self._call(self._catalog.close)


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    world = World(1)
    yield Etcd(Network(world, Descriptors()), f"{world.rng.getrandbits(64):016x}")
    world.close()
    assert not world.findings


class TestModelCatalog(CatalogConformance):
    @pytest.fixture
    def place(self, etcd: Etcd) -> MakeCatalog:
        return lambda: Pumped(etcd)

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        following = opened(rival)
        assert following.epoch == 0
        assert following.owner is not None
        assert isinstance(commit(rival, Op(b"a", b"2")), StaleEpoch)
        assert commit(former, Op(b"b", b"1")) is None
        assert isinstance(former, Pumped)
        former.process.die()
        former.world.run(former.world.now_ns + SETTLE_NS)
        assert following.epoch > 0
        assert following.records == {b"a": b"1", b"b": b"1"}


def cut(catalog: Pumped, etcd: Etcd, *, is_answer: bool = False) -> tuple[Host, Host]:
    """Nothing gets to etcd any more, or nothing back."""
    way = (Host(HOST), catalog.process.host) if is_answer else (catalog.process.host, Host(HOST))
    etcd.network.cut(*way)
    return way


def test_etcd_cut_off_owner_resigns_before_an_election(etcd: Etcd) -> None:
    former, rival = Pumped(etcd), Pumped(etcd)
    first = elected(former, "first")
    second = opened(rival, "second")
    way = cut(former, etcd)
    world = etcd.network.world
    world.run(world.now_ns + LEASE_NS, until=lambda: first.epoch == 0)
    assert first.epoch == 0
    assert second.epoch == 0
    world.run(world.now_ns + LEASE_NS, until=lambda: second.epoch > 0)
    assert second.epoch > 0
    etcd.network.heal(*way)
    world.run(world.now_ns + SETTLE_NS)
    assert first.told[-3:] == ["deposed", "begin", "owned by second"]


def test_etcd_write_with_lost_reply_is_retried_once(etcd: Etcd) -> None:
    catalog = Pumped(etcd)
    following: Following = elected(catalog)
    assert catalog.has_written_all
    way = cut(catalog, etcd, is_answer=True)
    told: list[KVStoreError | None] = []
    catalog.commit([Op(b"a", b"1")], told.append)
    assert etcd.records == {b"a": b"1"}
    assert told == []
    assert not catalog.has_written_all
    etcd.network.heal(*way)
    world = etcd.network.world
    world.run(world.now_ns + S, until=lambda: bool(told))
    assert told == [None]
    assert catalog.has_written_all
    assert following.epoch > 0


def test_etcd_write_of_old_epoch_or_fence_is_refused(etcd: Etcd) -> None:
    epoch = etcd.campaign(Candidate("me", "me:1"), 0)
    etcd.write(epoch, etcd.fence, [Op(b"a", b"1")])
    former = etcd.fence
    etcd.move_fence(epoch)
    for of, fence in ((epoch, former), (epoch - 1, etcd.fence)):
        with pytest.raises(StaleEpoch):
            etcd.write(of, fence, [Op(b"a", b"2")])
    assert etcd.records == {b"a": b"1"}


def test_etcd_delayed_write_after_an_election_is_refused(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.catalog.LATE_SHARE", 1.0)
    former, rival = Pumped(etcd), Pumped(etcd)
    elected(former, "first")
    second = opened(rival, "second")
    came: list[int] = []
    write = etcd.write

    def noticed(epoch: int, fence: int, changes: Sequence[Change]) -> None:
        came.append(epoch)
        write(epoch, fence, changes)

    etcd.write = noticed  # type: ignore[method-assign]
    way = cut(former, etcd)
    former.commit([Op(b"a", b"late")], lambda error: None)
    world = etcd.network.world
    world.run(world.now_ns + 2 * LEASE_NS, until=lambda: second.epoch > 0)
    assert came == []
    etcd.network.heal(*way)
    world.run(world.now_ns + S, until=lambda: bool(came))
    assert 0 < came[0] < second.epoch
    assert etcd.records == {}


def test_etcd_resigned_lease_is_free_at_once(etcd: Etcd) -> None:
    former, rival = Pumped(etcd), Pumped(etcd)
    first, second = elected(former, "first"), opened(rival, "second")
    former._catalog.wait_s = lambda: 1.0
    epoch = first.epoch
    former.give_up()
    assert second.epoch > epoch
    assert first.told[-4:] == ["deposed", "begin", "owned by None", "owned by second"]
    assert isinstance(commit(former, Op(b"a", b"1")), StaleEpoch)
    assert commit(rival, Op(b"a", b"2")) is None
