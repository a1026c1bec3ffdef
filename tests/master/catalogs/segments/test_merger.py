"""Tests of log.py and merger.py: after any merge, stopped at any point, the segments give the same blocks."""

import contextlib
import random
from collections.abc import Mapping
from itertools import count, islice

import pytest

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change, Op
from kvstore.master.catalogs.segments import log as logs
from kvstore.master.catalogs.segments.log import MAX_RUNS, RECORDS, SEGMENTS, SPARE_OPERATIONS, LogPosition, SegmentLog, segment_key
from kvstore.master.catalogs.segments.merger import work
from kvstore.protocol.errors import Corrupt
from tests.master.catalogs.following import Following


class Stopped(Exception):
    """The master died here."""


class Values:
    """Values in memory, whose writer dies at a write of one's choice. `page`: how many a read gives."""

    def __init__(self, values: Mapping[bytes, bytes] | None = None, *, page: int = 3) -> None:
        self.values = dict(values or {})
        self.events: list[tuple[bytes, bytes | None]] = []
        self.writes_left = -1
        self._page = page

    def read(self, begin: bytes, end: bytes, *, max_bytes: int) -> list[tuple[bytes, bytes]]:
        return sorted((key, value) for key, value in self.values.items() if begin <= key < end)[: self._page]

    def write(self, values: Mapping[bytes, bytes | None]) -> None:
        if not self.writes_left:
            raise Stopped
        self.writes_left -= 1
        assert len(values) <= 128
        self.events += values.items()
        for key, value in values.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def listed(self, shards: int) -> tuple[SegmentLog, Following]:
        """Return the state that a new master reads."""
        log, following = SegmentLog(shards), Following()
        for key, value in sorted(self.values.items(), key=lambda item: item[0]):
            following.take(log.first_read(key, value) if key.startswith(SEGMENTS) else [Op(key.removeprefix(RECORDS), value)])
        return log, following


def counts(log: SegmentLog) -> tuple[int, int]:
    """Segments, and the operations in them, of all shards."""
    return sum(map(len, log._logs)), sum(sum(one.values()) for one in log._logs)


class Catalog:
    """A place, its log, and the naive form of what is in it."""

    def __init__(self, seed: int, shards: int = 2) -> None:
        self.rng = random.Random(seed)
        self.values, self.log, self.naive = Values(), SegmentLog(shards), Following()
        self.shards = shards
        self.generations = count(1)

    def commit(self, changes: list[Change]) -> None:
        self.values.write(self.log.append(changes))
        self.naive.take(changes)

    def churn(self, commits: int, keys: int = 40) -> None:
        for _commit in range(commits):
            changes: list[Change] = []
            for _change in range(self.rng.randint(1, 3)):
                chosen = [b"%d" % key for key in self.rng.sample(range(keys), self.rng.randint(1, 6))]
                if self.rng.random() < 0.4:
                    changes.append(BlockDeletes(self.rng.choice(["red", "blue"]), chosen))
                else:
                    changes.append(puts(chosen, next(self.generations), self.rng.choice(["red", "blue"])))
            self.commit(changes)

    def merge(self) -> int:
        return sum(1 for _step in work(self.log, self.values))

    def check(self) -> SegmentLog:
        log, found = self.values.listed(self.shards)
        assert found.blocks == self.naive.blocks
        assert found.records == self.naive.records
        return log


def puts(keys: list[bytes], generation: int, tenant: str = "red") -> BlockPuts:
    size = len(keys)
    return BlockPuts(tenant, keys, [1] * size, [2] * size, [generation] * size, ["ns"] * size, [b""] * size, [(1,)] * size)


@pytest.fixture
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge early, so that a few commits cause many merges."""
    monkeypatch.setattr(logs, "SPARE_OPERATIONS", 30)
    monkeypatch.setattr(logs, "MAX_RUNS", 6)


@pytest.mark.promise("records-durable")
@pytest.mark.usefixtures("small_logs")
@pytest.mark.parametrize("seed", range(5))
def test_commits_and_merges_come_to_the_blocks_that_there_are(seed: int) -> None:
    catalog, merged = Catalog(seed), 0
    for _round in range(60):
        catalog.churn(catalog.rng.randint(1, 8))
        merged += catalog.merge()
        catalog.check()
    segments, operations = counts(catalog.log)
    assert merged > 100
    assert segments <= 2 * 7
    assert operations <= 2 * (2 * 80 + 30)


@pytest.mark.usefixtures("small_logs")
def test_steps_of_a_merge_and_commits_take_turns() -> None:
    catalog = Catalog(7)
    for _round in range(20):
        catalog.churn(8)
        for _step in work(catalog.log, catalog.values):
            catalog.churn(1)
            catalog.check()
            if catalog.rng.random() < 0.1:
                break


@pytest.mark.promise("records-durable")
@pytest.mark.usefixtures("small_logs")
@pytest.mark.parametrize("seed", range(3))
def test_crash_during_a_merge_loses_nothing(seed: int) -> None:
    catalog = Catalog(seed)
    for _round in range(60):
        catalog.churn(catalog.rng.randint(1, 12))
        catalog.values.writes_left = catalog.rng.randint(0, 4)
        try:
            catalog.merge()
        except Stopped:
            catalog.values.writes_left = -1
            catalog.log = catalog.check()
        catalog.values.writes_left = -1
        catalog.check()


@pytest.mark.usefixtures("small_logs")
def test_failed_merge_with_applied_write_is_repeated() -> None:
    catalog = Catalog(3)
    for _round in range(40):
        catalog.churn(9)
        before = dict(catalog.values.values)
        catalog.values.writes_left = 2
        with contextlib.suppress(Stopped):
            catalog.merge()
        catalog.values.writes_left = -1
        if catalog.rng.random() < 0.5:
            catalog.values.values |= {key: value for key, value in before.items() if key in catalog.values.values}
        catalog.check()
        catalog.merge()
        catalog.check()


@pytest.mark.usefixtures("small_logs")
@pytest.mark.parametrize("failures", [1, 40])
def test_merging_ends_after_attempts_at_a_commit_that_failed(failures: int) -> None:
    catalog = Catalog(0, shards=1)
    catalog.commit([puts([b"%d" % key for key in range(100)], 1)])
    catalog.values.writes_left = 0
    for _failure in range(failures):
        with pytest.raises(Stopped):
            catalog.values.write(catalog.log.append([puts([b"0"], 2)]))
    catalog.values.writes_left = -1
    catalog.commit([puts([b"0"], 2)])
    for generation in range(3, 20):
        catalog.commit([puts([b"%d" % key for key in range(10)], generation)])
    steps = sum(1 for _step in islice(work(catalog.log, catalog.values), 1000))
    assert steps < 1000
    assert counts(catalog.log) == counts(catalog.check())


@pytest.mark.usefixtures("small_logs")
def test_follower_skips_known_merged_segments_only() -> None:
    catalog = Catalog(11)
    catalog.churn(30)
    log, following = catalog.values.listed(2)
    catalog.values.events.clear()
    catalog.churn(3)
    catalog.merge()
    catalog.churn(3)
    events, fresh = catalog.values.events, 0
    for key, value in events:
        if value is None:
            log.removed(key)
        else:
            changes = log.read(key, value)
            fresh += bool(changes)
            following.take(changes)
    assert 0 < fresh < sum(value is not None for _key, value in events)
    assert following.blocks == catalog.naive.blocks
    assert counts(log) == counts(catalog.log)
    log.removed(events[0][0])


def test_group_is_one_segment_a_shard_and_one_record_a_key() -> None:
    log = SegmentLog(4)
    keys = [b"%d" % number for number in range(100)]
    values = log.append([Op(b"a", b"1"), puts(keys, 1), Op(b"a", b"2"), Op(b"c", None), BlockDeletes("red", keys[:50])])
    assert (values.pop(b"r/a"), values.pop(b"r/c")) == (b"2", None)
    assert sorted(values) == [segment_key(shard, LogPosition(1, 0)) for shard in range(4)]
    assert counts(log) == (4, 100)
    assert log.append([]) == {}


def test_shard_is_rewritten_when_its_log_outgrows_its_blocks() -> None:
    log, values = SegmentLog(1), Values(page=100)
    size = SPARE_OPERATIONS // 2
    for number in range(3):
        values.write(log.append([puts([b"%d.%d" % (number, key) for key in range(size)], 1)]))
        assert sum(1 for _step in work(log, values)) == 0
    values.write(log.append([puts([b"last"], 1)]))
    assert log.due() is None
    values.write(log.append([puts([b"more %d" % key for key in range(size)], 1)]))
    assert sum(1 for _step in work(log, values)) > 0
    assert sorted(values.values) == [segment_key(0, LogPosition(5, 1))]
    assert counts(log) == (1, 4 * size + 1)


def test_small_commits_are_merged_without_the_large_ones() -> None:
    log, values = SegmentLog(1), Values(page=100)
    values.write(log.append([puts([b"%d" % key for key in range(3000)], 1)]))
    for number in range(MAX_RUNS):
        assert log.due() is None
        values.write(log.append([puts([b"new %d" % number], 1), BlockDeletes("red", [b"%d" % number])]))
    large = values.values[segment_key(0, LogPosition(1, 0))]
    assert sum(1 for _step in work(log, values)) > 0
    assert sorted(values.values) == [segment_key(0, LogPosition(1, 0)), segment_key(0, LogPosition(MAX_RUNS + 1, 1))]
    assert values.values[segment_key(0, LogPosition(1, 0))] == large
    _log, found = values.listed(1)
    assert len(found.blocks) == 3000, "the deletions were kept, since what they undo is older"


def test_a_shard_whose_blocks_are_all_gone_keeps_its_count() -> None:
    log, values = SegmentLog(1), Values(page=100)
    values.write(log.append([puts([b"k"], 1)]))
    values.write(log.append([BlockDeletes("red", [b"%d" % key for key in range(SPARE_OPERATIONS)] + [b"k"])]))
    values.write(log.append([puts([b"k"], 1), BlockDeletes("red", [b"k"])]))
    assert sum(1 for _step in work(log, values)) > 0
    log, found = values.listed(1)
    assert found.blocks == {}
    assert sorted(log.append([puts([b"k"], 2)])) == [segment_key(0, LogPosition(4, 0))]


@pytest.mark.parametrize("key", [b"s/0000/1", b"s/zz/1.0", b"s/0002/%016x.%08x" % (1, 0)])
def test_a_key_that_is_no_segments_is_refused(key: bytes) -> None:
    with pytest.raises(Corrupt, match="s/"):
        SegmentLog(2).read(key, b"")
