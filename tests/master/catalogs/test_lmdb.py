"""Tests of lmdb.py: the conformance suite on a real LMDB, and what only a disk can do."""

import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import pytest

from kvstore.master.catalogs.group_commit import Backoff
from kvstore.master.catalogs.interface import Candidate, Catalog, Change, Op
from kvstore.master.catalogs.lmdb import MAP_BYTES, TABLE_BYTES, LmdbCatalog
from kvstore.master.catalogs.segments.log import SegmentLog
from kvstore.protocol.errors import CatalogUnavailable, ConfigError, Corrupt
from tests.address_space import address_space_limit
from tests.master.catalogs.conformance import OPEN_DEADLINE_S, CatalogConformance, MakeCatalog, Outcomes, blocks, commit, elected
from tests.master.catalogs.following import Following
from tests.master.warning_log import WarningLog

SMALL_MAP_BYTES = 256 * 1024

MakeElected = Callable[[int], tuple[LmdbCatalog, Following]]


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
        assert elected(rival).records == {b"a": b"2"}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[MakeElected]:
    """Opens catalogs on one folder, with a back-off of a millisecond, and closes them."""
    made: list[LmdbCatalog] = []

    def opened(map_bytes: int) -> tuple[LmdbCatalog, Following]:
        made.append(LmdbCatalog(tmp_path / "catalog", map_bytes=map_bytes, backoff=Backoff(first_s=0.001, longest_s=0.001)))
        return made[-1], elected(made[-1])

    yield opened
    for catalog in made:
        catalog.close()


def test_a_place_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="file: this is a file: name a folder"):
        LmdbCatalog(tmp_path / "file").open(deadline_s=1)


def test_a_folder_whose_parent_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"its parent {tmp_path / 'absent'} does not exist: mkdir -p {tmp_path / 'absent'}, or"):
        LmdbCatalog(tmp_path / "absent" / "catalog").open(deadline_s=1)


def test_a_folder_nobody_may_write_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="this folder cannot be made or written: No such file"):
        LmdbCatalog(Path("/proc/self/catalog")).open(deadline_s=1)


def test_foreign_file_is_a_config_error_and_unlocks(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not an environment" * 1_000)
    for _try in range(2):
        with pytest.raises(ConfigError, match="cannot be opened as a catalog"):
            LmdbCatalog(tmp_path).open(deadline_s=1)


def test_another_format_is_refused_not_guessed_at(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as environment, environment.begin(db=environment.open_db(b"meta"), write=True) as transaction:
        transaction.put(b"format", b"999")
    with pytest.raises(ConfigError, match="another version of kvstore"):
        LmdbCatalog(tmp_path).open(deadline_s=1)


def test_close_does_not_wait_for_a_follower_that_takes_long(tmp_path: Path) -> None:
    first = LmdbCatalog(tmp_path)
    elected(first)
    assert commit(first, Op(b"a", b"1")) is None
    first.close()
    catalog, following = LmdbCatalog(tmp_path), Following()
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    following.hold.clear()
    catalog.follow(Candidate("me", "me:1"), following)
    following.await_told("begin")
    catalog.close()
    following.hold.set()
    assert "elected" not in following.told


def test_a_damaged_segment_is_told_instead_of_an_election(tmp_path: Path) -> None:
    with (
        lmdb.open(str(tmp_path), max_dbs=2) as environment,
        environment.begin(db=environment.open_db(b"values"), write=True) as transaction,
    ):
        transaction.put(b"s/0000/0000000000000001.00000000", b"short")
    catalog, following = LmdbCatalog(tmp_path), Following()
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    catalog.follow(Candidate("me", "me:1"), following)
    following.await_told("deposed")
    assert isinstance(following.why, Corrupt)
    catalog.close()


def test_full_disk_is_refused_before_lmdb_maps_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"cannot be opened as a catalog: .*No space left on device"):
            LmdbCatalog(tmp_path / "catalog").open(deadline_s=OPEN_DEADLINE_S)
    assert not (tmp_path / "catalog" / "data.mdb").exists()
    catalog = LmdbCatalog(tmp_path / "catalog")
    elected(catalog)
    catalog.close()
    table = (tmp_path / "catalog" / "lock.mdb").stat()
    assert table.st_blocks * 512 >= table.st_size == TABLE_BYTES


def test_full_map_grows_and_stays_grown_for_the_next_owner(opened: MakeElected) -> None:
    records = [(b"%04d" % number, b"v" * 4096) for number in range(1_000)]
    catalog, _following = opened(SMALL_MAP_BYTES)
    assert commit(catalog, *map(Op._make, records)) is None
    catalog.close()
    successor, following = opened(SMALL_MAP_BYTES)
    assert following.records == dict(records)
    assert commit(successor, Op(b"more", b"")) is None


def test_commits_wait_while_the_disk_is_full(opened: MakeElected) -> None:
    """RLIMIT_FSIZE stands for a full disk: LMDB sees the same failing write."""
    (catalog, _following), outcomes = opened(1024 * SMALL_MAP_BYTES), Outcomes()
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
    catalog.close()
    assert len(opened(SMALL_MAP_BYTES)[1].records) == 1_000


def test_commits_wait_without_address_space_for_the_map(opened: MakeElected) -> None:
    map_bytes, value = 32 << 20, b"v" * 60_000
    (catalog, _following), outcomes = opened(map_bytes), Outcomes()
    for batch in range(10):
        assert commit(catalog, *[Op(b"%d-%d" % (batch, number), value) for number in range(48)]) is None
    with WarningLog("not written") as said:
        with address_space_limit(16 << 20):
            catalog.commit([Op(b"more-%d" % number, value) for number in range(100)], outcomes.done())
            said.wait()
            assert "Cannot allocate memory" in catalog.health
            assert outcomes.empty
    assert outcomes.next() == (0, None)
    assert catalog.health == "ok"
    catalog.close()
    assert len(opened(map_bytes)[1].records) == 580


def test_panicked_environment_is_reopened_without_loss(opened: MakeElected, tmp_path: Path) -> None:
    """A meta page that cannot be written is MDB_PANIC. The test makes LMDB's descriptor for meta pages read-only to get there."""
    catalog, _following = opened(SMALL_MAP_BYTES)
    assert commit(catalog, Op(b"a", b"1")) is None
    data = str(tmp_path / "catalog" / "data.mdb")
    descriptors = [int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd) == data]
    read_only = os.open(data, os.O_RDONLY)
    os.dup2(read_only, max(descriptors))
    os.close(read_only)
    with WarningLog("not written") as said:
        assert commit(catalog, Op(b"y", b"2")) is None
        said.wait()
    catalog.close()
    assert opened(SMALL_MAP_BYTES)[1].records == {b"a": b"1", b"y": b"2"}


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_listing_is_repeated_after_a_memory_error(opened: MakeElected, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, _ = opened(MAP_BYTES)
    assert commit(catalog, blocks(b"a")) is None
    catalog.close()
    first_read, left = SegmentLog.first_read, [MemoryError]

    def failing(log: SegmentLog, key: bytes, value: bytes) -> Sequence[Change]:
        if left:
            raise left.pop()
        return first_read(log, key, value)

    monkeypatch.setattr(SegmentLog, "first_read", failing)
    monkeypatch.setattr("kvstore.master.catalogs.lmdb.MEMORY_PAUSE_S", 0.001)
    _catalog, following = opened(MAP_BYTES)
    assert [*following.blocks] == [("red", b"a")]
    assert following.told == ["begin", "begin", "owned by None", "elected"]
