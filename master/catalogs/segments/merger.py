"""Background merge of segments: older segments are replaced by one that has their result.

A merge of a shard's segments A..Z, Z at (n, p), reads them and writes their result behind Z and before later commits,
at (n, p + 1) and on. Then it deletes A..Z, the oldest first. A reader replays all segments in the order of positions,
so the catalog is correct after a crash at any point:

- Some results written: A..Z all exist, and the results repeat their outcome.
- All results written, A..M deleted: the results, replayed last, override M+1..Z. A block that was deleted is in no
  result, or deleted there too, and the segment with its put was deleted before the one with its deletion.
- The results keep deletions unless nothing older than A exists.

A follower that has seen commit n has all changes of the result, and skips it. A failed merge is dropped: the next
one of that shard reads all segments, its partial results included."""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from kvstore.master.catalogs.segments import form
from kvstore.master.catalogs.segments.log import DueMerge, SegmentLog, positions_behind, segment_key, shard_range

STEP_BYTES: Final = 1024 * 1024
"""Bytes that a step reads, unless a single value is larger."""
MAX_DELETIONS: Final = 128


class CatalogRecords(Protocol):
    """Storage of the catalog's values, as its owner reads and writes it."""

    def read(self, begin: bytes, end: bytes, *, max_bytes: int) -> list[tuple[bytes, bytes]]:
        """Return the first values of the keys [begin, end), in order: about `max_bytes`, and at least one if any
        exists."""

    def write(self, values: Mapping[bytes, bytes | None]) -> None:
        """Write the values durably and atomically; None deletes. At most 128 values, and one segment. Raises
        StaleEpoch."""


class SegmentMerger:
    """Merges of one ownership, in steps. Belongs to the committer's thread."""

    def __init__(self, log: SegmentLog, storage: CatalogRecords) -> None:
        self._log = log
        self._storage = storage
        self._work: Iterator[None] | None = None

    def step(self) -> bool:
        """Do one step; return True if more is left. A failed merge is dropped and its error raised."""
        if self._work is None:
            self._work = work(self._log, self._storage)
        try:
            next(self._work)
        except BaseException as end:
            self._work = None
            if isinstance(end, StopIteration):
                return False
            raise
        return True


def work(log: SegmentLog, storage: CatalogRecords) -> Iterator[None]:
    """Run all due merges, in steps of about 1 MiB."""
    while (due := log.due()) is not None:
        yield from _merge(log, storage, due)


def _merge(log: SegmentLog, storage: CatalogRecords, due: DueMerge) -> Iterator[None]:
    blocks: form.Blocks = {}
    found: list[bytes] = []
    begin, end = shard_range(due)
    while page := storage.read(begin, end, max_bytes=STEP_BYTES):
        for key, value in page:
            form.replay(blocks, form.decode(value, key).changes)
            found.append(key)
        begin = page[-1][0] + b"\x00"
        yield
    if due.whole:
        blocks = {tenant: {key: row for key, row in rows.items() if row is not None} for tenant, rows in blocks.items()}
    for part, position in zip(_parts(blocks), positions_behind(due), strict=False):
        storage.write({segment_key(due.shard, position): form.encode(part, merged=True)})
        log.written(due.shard, position, sum(map(len, part.values())))
        yield
    for at in range(0, len(found), MAX_DELETIONS):
        old = found[at : at + MAX_DELETIONS]
        storage.write(dict.fromkeys(old))
        for key in old:
            log.removed(key)
        yield
    log.merged(due)


def _parts(blocks: form.Blocks) -> Iterator[form.Blocks]:
    """At least one part, possibly empty, which keeps the log's commit number."""
    parts = form.cut(blocks)
    yield next(parts, {})
    yield from parts
