"""Promises of lmdb.py: the conformance suite on a real LMDB, and what only a disk can do."""

import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.interface import Catalog, Op
from kvstore.master.catalogs.lmdb import LmdbCatalog
from kvstore.protocol.errors import CatalogUnavailable, ConfigError
from tests.master.catalogs.conformance import OPEN_DEADLINE_S, CatalogConformance, MakeCatalog, Outcomes, commit
from tests.master.warning_log import WarningLog

SMALL_MAP_BYTES = 256 * 1024


class TestLmdbCatalog(CatalogConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> MakeCatalog:
        return lambda: LmdbCatalog(tmp_path / "catalog")

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """The lock keeps the second out until the first is closed."""
        with pytest.raises(CatalogUnavailable, match="another master has it open"):
            rival.open(deadline_s=OPEN_DEADLINE_S)
        assert commit(former, Op(b"a", b"2")) is None
        former.close()
        rival.open(deadline_s=OPEN_DEADLINE_S)
        assert list(rival.load()) == [(b"a", b"2")]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[int], LmdbCatalog]]:
    """Opens catalogs on one folder, with a back-off of a millisecond, and closes them."""
    made: list[LmdbCatalog] = []

    def opened(map_bytes: int) -> LmdbCatalog:
        made.append(LmdbCatalog(tmp_path / "catalog", map_bytes=map_bytes, backoff=Backoff(first_s=0.001, longest_s=0.001)))
        made[-1].open(deadline_s=OPEN_DEADLINE_S)
        return made[-1]

    yield opened
    for catalog in made:
        catalog.close()


def test_a_place_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be a catalog's folder: File exists"):
        LmdbCatalog(tmp_path / "file").open(deadline_s=1)


def test_a_folder_whose_parent_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        LmdbCatalog(tmp_path / "absent" / "catalog").open(deadline_s=1)


def test_a_folder_nobody_may_write_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be a catalog's folder"):
        LmdbCatalog(Path("/proc/self/catalog")).open(deadline_s=1)


def test_a_file_that_is_not_lmdbs_is_a_config_error_and_the_lock_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not an environment" * 1_000)
    for _try in range(2):
        with pytest.raises(ConfigError, match="cannot be opened as a catalog"):
            LmdbCatalog(tmp_path).open(deadline_s=1)


def test_another_format_is_refused_not_guessed_at(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as environment, environment.begin(db=environment.open_db(b"meta"), write=True) as transaction:
        transaction.put(b"format", b"999")
    with pytest.raises(ConfigError, match="another version of kvstore"):
        LmdbCatalog(tmp_path).open(deadline_s=1)


def test_loading_a_catalog_that_is_not_open_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailable, match="not open"):
        list(LmdbCatalog(tmp_path).load())


def test_a_load_that_outlives_the_catalog_ends_with_an_error(opened: Callable[[int], LmdbCatalog]) -> None:
    catalog = opened(SMALL_MAP_BYTES)
    assert commit(catalog, Op(b"a", b"1"), Op(b"b", b"2")) is None
    loading = catalog.load()
    assert next(loading) == (b"a", b"1")
    catalog.close()
    with pytest.raises(CatalogUnavailable, match="closed while it was being read"):
        list(loading)


def test_a_full_map_grows_by_itself_and_stays_grown_for_the_next_owner(opened: Callable[[int], LmdbCatalog]) -> None:
    records = [(b"%04d" % number, b"v" * 4096) for number in range(1_000)]
    catalog = opened(SMALL_MAP_BYTES)
    assert commit(catalog, *itertools.starmap(Op, records)) is None
    catalog.close()
    successor = opened(SMALL_MAP_BYTES)
    assert list(successor.load()) == records
    assert commit(successor, Op(b"more", b"")) is None


def test_a_map_that_fills_during_a_load_grows_when_the_load_has_ended(opened: Callable[[int], LmdbCatalog]) -> None:
    catalog = opened(SMALL_MAP_BYTES)
    assert commit(catalog, Op(b"a", b"1"), Op(b"b", b"2")) is None
    loading, outcomes = catalog.load(), Outcomes()
    next(loading)
    with WarningLog("the map is full and grows once the load has ended") as said:
        catalog.commit([Op(b"%04d" % number, b"v" * 4096) for number in range(1_000)], outcomes.done())
        said.wait()
    assert outcomes.empty
    assert list(loading) == [(b"b", b"2")]
    assert outcomes.next() == (0, None)


def test_while_the_disk_takes_no_more_commits_wait_and_health_says_so(opened: Callable[[int], LmdbCatalog]) -> None:
    """RLIMIT_FSIZE stands for a full disk: LMDB sees the same failing write."""
    catalog, outcomes = opened(1024 * SMALL_MAP_BYTES), Outcomes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with WarningLog("not written") as said:
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 * 1024, hard))
        try:
            catalog.commit([Op(b"%04d" % number, b"v" * 4096) for number in range(1_000)], outcomes.done())
            said.wait()
            assert "not written" in catalog.health
            assert outcomes.empty
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcomes.next() == (0, None)
    assert catalog.health == "ok"
    assert sum(1 for _record in catalog.load()) == 1_000


def test_an_environment_that_lmdb_gives_up_is_opened_again_and_nothing_acknowledged_is_lost(
    opened: Callable[[int], LmdbCatalog], tmp_path: Path
) -> None:
    """A meta page that cannot be written is MDB_PANIC. The test makes LMDB's descriptor for meta pages read-only to get there."""
    catalog = opened(SMALL_MAP_BYTES)
    assert commit(catalog, Op(b"a", b"1")) is None
    data = str(tmp_path / "catalog" / "data.mdb")
    descriptors = [int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd) == data]
    read_only = os.open(data, os.O_RDONLY)
    os.dup2(read_only, max(descriptors))
    os.close(read_only)
    with WarningLog("not written") as said:
        assert commit(catalog, Op(b"b", b"2")) is None
        said.wait()
    assert list(catalog.load()) == [(b"a", b"1"), (b"b", b"2")]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
