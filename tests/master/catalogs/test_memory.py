"""Promises of memory.py: the conformance suite, as far as something that forgets can keep it."""

import pytest

from kvstore.master.catalogs.interface import Catalog, Op
from kvstore.master.catalogs.memory import MemoryCatalog
from tests.master.catalogs.conformance import OPEN_DEADLINE_S, CatalogConformance, MakeCatalog, commit


class TestMemoryCatalog(CatalogConformance):
    durable = False

    @pytest.fixture
    def place(self) -> MakeCatalog:
        return MemoryCatalog

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """There is no place to share: each has its own records."""
        rival.open(deadline_s=OPEN_DEADLINE_S)
        assert commit(former, Op(b"a", b"2")) is None
        assert list(rival.load()) == []


def test_the_epoch_is_the_wall_clock_for_operators_to_tell_masters_apart() -> None:
    assert MemoryCatalog(wall_clock_ns=lambda: 1_234).open(deadline_s=1) == 1_234


def test_done_is_told_before_commit_returns() -> None:
    told: list[object] = []
    MemoryCatalog().commit([Op(b"a", b"1")], told.append)
    assert told == [None]
