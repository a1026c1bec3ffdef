"""Log of segments of each shard: which exist, what a commit appends, and which are due for a merge.

A block's shard is the xxh3_64 of its key modulo the number of shards, which is fixed when the catalog is made. A shard
is a log of segments. A commit appends one segment to each shard that it touches, at position (n, 0), n counting up. A
merge of positions up to (n, p) writes its result behind them, at (n, p + 1) and on (merger.py). Replayed in the order
of positions, segments give the blocks.

    segment's key    s/SHARD/N.P    in hexadecimal digits, 4, 16 and 8 of them, so that keys sort by position
    small record     r/KEY          KEY is its raw bytes"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from kvstore.master.catalogs.interface import BlockPuts, Change, Op
from kvstore.master.catalogs.segments import form
from kvstore.protocol.errors import Corrupt

SEGMENTS: Final = b"s/"
RECORDS: Final = b"r/"
SPARE_OPERATIONS: Final = 4096
"""A shard's log may exceed its merged part by this much: small shards are not rewritten all the time."""
MAX_RUNS: Final = 32
"""Runs of segments in a shard's log; more are merged. Most commits are small, and each segment costs etcd some
hundred bytes."""


class LogPosition(NamedTuple):
    """Position of a segment in its shard's log: the commit's number, and a counter of merge results behind it."""

    number: int
    part: int


class DueMerge(NamedTuple):
    """Segments [first, last] of a shard to merge. `whole`: none are older, so deletions need not be kept."""

    shard: int
    first: LogPosition
    last: LogPosition
    whole: bool


class SegmentLog:
    """Log of segments of all shards. Belongs to one thread at a time: the follower's, and from an election on the
    committer's."""

    def __init__(self, shards: int) -> None:
        self._logs: list[dict[LogPosition, int]] = [{} for _shard in range(shards)]
        """Operations of each segment, by position."""
        self._numbers = [0] * shards
        self._due: dict[int, None] = {}

    def read(self, key: bytes, value: bytes) -> Sequence[Change]:
        """Record a segment and return its changes; none if it merges known ones. Raises Corrupt."""
        shard, position = self._parse_key(key)
        merged, operations = form.head(value, key)
        known = merged and position.number <= self._numbers[shard]
        self._note(shard, position, operations)
        return () if known else form.decode(value, key).changes

    def first_read(self, key: bytes, value: bytes) -> Sequence[Change]:
        """As `read`, during the first listing, when nothing is known yet."""
        shard, position = self._parse_key(key)
        segment = form.decode(value, key)
        self._note(shard, position, segment.operations)
        return segment.changes

    def removed(self, key: bytes) -> None:
        """Record that a segment was deleted."""
        shard, position = self._parse_key(key)
        self._logs[shard].pop(position, None)

    def append(self, changes: Sequence[Change]) -> dict[bytes, bytes | None]:
        """Encode `changes` as values by key, None for a deletion. Their keys differ, so their order is free."""
        records: dict[bytes, bytes | None] = {}
        touched: dict[int, form.Blocks] = {}
        for change in changes:
            if isinstance(change, Op):
                records[RECORDS + change.key] = change.value
            elif isinstance(change, BlockPuts):
                tenant = change.tenant
                for row in zip(*change[1:], strict=True):
                    shard = xxhash.xxh3_64_intdigest(row[0]) % len(self._logs)
                    touched.setdefault(shard, {}).setdefault(tenant, {})[row[0]] = row
            else:
                for key in change.keys:
                    touched.setdefault(self.shard(key), {}).setdefault(change.tenant, {})[key] = None
        for shard, blocks in touched.items():
            for part in form.cut(blocks):
                position = LogPosition(self._numbers[shard] + 1, 0)
                self._note(shard, position, sum(map(len, part.values())))
                records[segment_key(shard, position)] = form.encode(part)
        return records

    def shard(self, key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(key) % len(self._logs)

    def due(self) -> DueMerge | None:
        """Return the next merge, or None. It may be returned again if it is not completed by `merged`."""
        while self._due:
            shard = next(iter(self._due))
            del self._due[shard]
            if (due := self._judge(shard)) is not None:
                return due
        return None

    def written(self, shard: int, position: LogPosition, operations: int) -> None:
        """Record a segment that a merge has written."""
        self._note(shard, position, operations)

    def merged(self, due: DueMerge) -> None:
        """Record that a merge is complete and its sources are deleted.

        Also drops positions of failed commits, which no merge finds: they would be due for ever."""
        log = self._logs[due.shard]
        for position in [position for position in log if due.first <= position <= due.last]:
            del log[position]

    def _parse_key(self, key: bytes) -> tuple[int, LogPosition]:
        try:
            shard, _slash, rest = key.removeprefix(SEGMENTS).partition(b"/")
            number, _dot, part = rest.partition(b".")
            parsed = int(shard, 16), LogPosition(int(number, 16), int(part, 16))
        except ValueError:
            raise Corrupt(f"the catalog's key {key!r} is not one of kvstore's: is the catalog shared with something else?") from None
        if parsed[0] >= len(self._logs):
            raise Corrupt(f"the catalog's segment {key!r} is of a shard beyond its {len(self._logs)}")
        return parsed

    def _note(self, shard: int, position: LogPosition, operations: int) -> None:
        self._logs[shard][position] = operations
        self._numbers[shard] = max(self._numbers[shard], position.number)
        self._due[shard] = None

    def _judge(self, shard: int) -> DueMerge | None:
        """Choose the segments to merge: the newest runs if they are too many, with each older run that is no larger
        than the sum so far. So a block is rewritten when the log doubles, not each time that it grows. All runs, if
        those after the first are larger than it."""
        log = self._logs[shard]
        runs: list[list[int]] = []
        positions = sorted(log)
        starts: list[int] = []
        for index, position in enumerate(positions):
            if not index or position.number != positions[index - 1].number:
                runs.append([0])
                starts.append(index)
            runs[-1][0] += log[position]
        sizes = [run[0] for run in runs]
        if len(sizes) > 1 and sum(sizes[1:]) > sizes[0] + SPARE_OPERATIONS:
            start = 0
        elif len(sizes) > MAX_RUNS:
            start = len(sizes) - MAX_RUNS // 2
            total = sum(sizes[start:])
            while start and sizes[start - 1] <= total:
                start -= 1
                total += sizes[start]
        else:
            return None
        return DueMerge(shard, positions[starts[start]], positions[-1], whole=start == 0)


def segment_key(shard: int, position: LogPosition) -> bytes:
    return b"%b%04x/%016x.%08x" % (SEGMENTS, shard, position.number, position.part)


def shard_range(due: DueMerge) -> tuple[bytes, bytes]:
    """Return the key range [begin, end) of the segments to merge."""
    return segment_key(due.shard, due.first), segment_key(due.shard, due.last) + b"\x00"


def positions_behind(due: DueMerge) -> Iterator[LogPosition]:
    """Yield the positions for the results of a merge."""
    number, part = due.last
    while True:
        part += 1
        yield LogPosition(number, part)
