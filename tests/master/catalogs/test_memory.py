"""Promises of memory.py: the conformance suite, as far as something that forgets can keep it."""

import pytest

from kvstore.master.catalogs.interface import Candidate, Catalog, Op
from kvstore.master.catalogs.memory import MemoryCatalog
from tests.master.catalogs.conformance import CatalogConformance, MakeCatalog, commit, elected
from tests.master.catalogs.following import Following


class TestMemoryCatalog(CatalogConformance):
    durable = False

    @pytest.fixture
    def place(self) -> MakeCatalog:
        return MemoryCatalog

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """There is no place to share: each has its own records."""
        assert elected(rival).records == {}
        assert commit(former, Op(b"a", b"2")) is None


def test_the_epoch_is_the_wall_clock_for_operators_to_tell_masters_apart() -> None:
    following = Following()
    MemoryCatalog(wall_clock_ns=lambda: 1_234).follow(Candidate("me", "me:1"), following)
    assert following.await_elected() == 1_234


def test_done_is_told_before_commit_returns() -> None:
    told: list[object] = []
    catalog = MemoryCatalog()
    elected(catalog)
    catalog.commit([Op(b"a", b"1")], told.append)
    assert told == [None]
