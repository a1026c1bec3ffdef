"""The segments of all shards: which there are, what a commit appends to them, and what is to be merged.

The key space is cut into shards by the xxh3_64 of a block's key, modulo their number, which is fixed when the catalog is made. A shard is a
log of segments. A commit appends one segment to the log of each shard that it touches, at position (n, 0), n counting up; a merge of
positions up to (n, p) writes its result behind them, at (n, p + 1) and on (merging.py). Read in the order of positions, they come to the
blocks that there are.

    segment's key    s/SHARD/N.P    in hexadecimal digits, 4, 16 and 8 of them, so that positions come in their order
    small record     r/KEY          KEY is its raw bytes
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from kvstore.master.catalogs.interface import BlockPuts, Change, Op
from kvstore.master.catalogs.segments import form
from kvstore.protocol.errors import Corrupt

SEGMENTS: Final = b"s/"
RECORDS: Final = b"r/"
SPARE_OPERATIONS: Final = 4096
"""A shard's log may be longer than what was merged by this much: a shard of few blocks is not rewritten for ever."""
MAX_RUNS: Final = 32
"""Runs of segments in a shard's log. More are merged: most commits are small, and each segment costs etcd some hundred bytes."""


class LogPosition(NamedTuple):
    """Where a segment stands in its shard's log: behind the commit `number`, and the results of how many merges since."""

    number: int
    part: int


class DueMerge(NamedTuple):
    """Segments of a shard that are to be merged: [first, last]. `whole`: there are none before them, so deletions need not be kept."""

    shard: int
    first: LogPosition
    last: LogPosition
    whole: bool


class SegmentLog:
    """See the module. Belongs to one thread at a time: the follower's, and from an election on the committer's."""

    def __init__(self, shards: int) -> None:
        self._logs: list[dict[LogPosition, int]] = [{} for _shard in range(shards)]
        """The operations of each segment, in the order of positions but for what was merged since the last `_sorted`."""
        self._numbers = [0] * shards
        self._due: dict[int, None] = {}

    def read(self, key: bytes, value: bytes) -> Sequence[Change]:
        """A segment that is there: what it says that was not known before. Raises Corrupt."""
        shard, position = self._place(key)
        merged, operations = form.head(value, key)
        known = merged and position.number <= self._numbers[shard]
        self._note(shard, position, operations)
        return () if known else form.decode(value, key).changes

    def first_read(self, key: bytes, value: bytes) -> Sequence[Change]:
        """As `read`, while all segments are being listed: nothing is known yet."""
        shard, position = self._place(key)
        segment = form.decode(value, key)
        self._note(shard, position, segment.operations)
        return segment.changes

    def removed(self, key: bytes) -> None:
        """A segment that is there no more."""
        shard, position = self._place(key)
        self._logs[shard].pop(position, None)

    def append(self, changes: Sequence[Change]) -> dict[bytes, bytes | None]:
        """What makes `changes` durable: values by key, None for what is to be deleted. They touch different keys: their order is free."""
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
        """What should be merged next, if anything. Call `merged` or nothing when that is done: it may come again."""
        while self._due:
            shard = next(iter(self._due))
            del self._due[shard]
            if (due := self._judge(shard)) is not None:
                return due
        return None

    def written(self, shard: int, position: LogPosition, operations: int) -> None:
        """A merge has written a segment."""
        self._note(shard, position, operations)

    def merged(self, due: DueMerge) -> None:
        """That is done: nothing of it is there any more. What an attempt at a commit was to write that failed never was, and no merge finds
        it: it would be due for ever."""
        log = self._logs[due.shard]
        for position in [position for position in log if due.first <= position <= due.last]:
            del log[position]

    def _place(self, key: bytes) -> tuple[int, LogPosition]:
        try:
            shard, _slash, rest = key.removeprefix(SEGMENTS).partition(b"/")
            number, _dot, part = rest.partition(b".")
            place = int(shard, 16), LogPosition(int(number, 16), int(part, 16))
        except ValueError:
            raise Corrupt(f"the catalog's key {key!r} is not one of kvstore's: is the catalog shared with something else?") from None
        if place[0] >= len(self._logs):
            raise Corrupt(f"the catalog's segment {key!r} is of a shard beyond its {len(self._logs)}")
        return place

    def _note(self, shard: int, position: LogPosition, operations: int) -> None:
        self._logs[shard][position] = operations
        self._numbers[shard] = max(self._numbers[shard], position.number)
        self._due[shard] = None

    def _judge(self, shard: int) -> DueMerge | None:
        """The newest runs of the shard's log that are too many, with each older one that is no larger than what is merged anyway: so a
        block is rewritten as often as the log doubles, not as often as it grows. All, when what came after the first run is longer.
        """
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
    """The keys [begin, end) of the segments that are to be merged."""
    return segment_key(due.shard, due.first), segment_key(due.shard, due.last) + b"\x00"


def positions_behind(due: DueMerge) -> Iterator[LogPosition]:
    """Where the results of a merge go."""
    number, part = due.last
    while True:
        part += 1
        yield LogPosition(number, part)
