"""Merging in the background: older segments are replaced by what they come to.

A merge of a shard's segments A..Z, Z at (n, p), reads them, writes what they come to as segments behind Z and before what is committed
meanwhile, at (n, p + 1) and on, and then deletes A..Z, the oldest first. The catalog is right whenever it stops in between, as a reader
replays all that it finds in the order of positions:

- Results written in part: A..Z are all there, and the results say again what they came to.
- All results written, A..M deleted: what M+1..Z say of a key, the results say again last. A block that Z or any before deleted is in no
  result, or deleted there too, and the segment that had put it went before the one that deleted it.
- The results keep deletions unless there is nothing older than A that they could undo.

A follower that has seen commit n has all that such a result says, and skips it. A merge that failed is forgotten: the next one of that
shard reads what is there, its own half results included.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from kvstore.master.catalogs.segments import form
from kvstore.master.catalogs.segments.log import DueMerge, SegmentLog, positions_behind, segment_key, shard_range

STEP_BYTES: Final = 1024 * 1024
"""What a step reads at most, unless a single value is larger."""
MAX_DELETIONS: Final = 128


class CatalogRecords(Protocol):
    """Where the catalog's values are, as its owner sees it."""

    def read(self, begin: bytes, end: bytes, *, max_bytes: int) -> list[tuple[bytes, bytes]]:
        """The first values of the keys [begin, end), in order: about `max_bytes`, one at least if there is one."""

    def write(self, values: Mapping[bytes, bytes | None]) -> None:
        """Make these durable, at once or not at all; None deletes. At most 128, and one segment. Raises StaleEpoch."""


class SegmentMerger:
    """The work of one ownership, a step at a time. Belongs to the committer's thread."""

    def __init__(self, log: SegmentLog, place: CatalogRecords) -> None:
        self._log = log
        self._place = place
        self._work: Iterator[None] | None = None

    def step(self) -> bool:
        """Do a step; whether there is more to do. What fails is forgotten, and its reason raised."""
        if self._work is None:
            self._work = work(self._log, self._place)
        try:
            next(self._work)
        except BaseException as end:
            self._work = None
            if isinstance(end, StopIteration):
                return False
            raise
        return True


def work(log: SegmentLog, place: CatalogRecords) -> Iterator[None]:
    """All that is to be done, a step of about a MiB at a time; ends when nothing is left."""
    while (due := log.due()) is not None:
        yield from _merge(log, place, due)


def _merge(log: SegmentLog, place: CatalogRecords, due: DueMerge) -> Iterator[None]:
    blocks: form.Blocks = {}
    found: list[bytes] = []
    begin, end = shard_range(due)
    while page := place.read(begin, end, max_bytes=STEP_BYTES):
        for key, value in page:
            form.replay(blocks, form.decode(value, key).changes)
            found.append(key)
        begin = page[-1][0] + b"\x00"
        yield
    if due.whole:
        blocks = {tenant: {key: row for key, row in rows.items() if row is not None} for tenant, rows in blocks.items()}
    for part, position in zip(_parts(blocks), positions_behind(due), strict=False):
        place.write({segment_key(due.shard, position): form.encode(part, merged=True)})
        log.written(due.shard, position, sum(map(len, part.values())))
        yield
    for at in range(0, len(found), MAX_DELETIONS):
        old = found[at : at + MAX_DELETIONS]
        place.write(dict.fromkeys(old))
        for key in old:
            log.removed(key)
        yield
    log.merged(due)


def _parts(blocks: form.Blocks) -> Iterator[form.Blocks]:
    """At least one, which keeps the log's count where nothing is left."""
    parts = form.cut(blocks)
    yield next(parts, {})
    yield from parts
