"""Tests of memory.py: the conformance suite, as far as something that forgets can keep it."""

import pytest

from kvstore.master.catalogs.interface import Catalog, Op
from kvstore.master.catalogs.memory import MemoryCatalog
from tests.master.catalogs.conformance import CatalogConformance, MakeCatalog, commit, elected


class TestMemoryCatalog(CatalogConformance):
    durable = False

    @pytest.fixture
    def place(self) -> MakeCatalog:
        return MemoryCatalog

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """Two memory catalogs share nothing: each has its own records."""
        assert elected(rival).records == {}
        assert commit(former, Op(b"a", b"2")) is None
