"""Hash table from keys to rows, in numpy arrays: buckets of 8 ways, grown incrementally. Not thread-safe.

Rows whose bucket is full are in `SpilledRows`, packed in bytes objects, in dictionaries of a few hundred buckets
each. Python's garbage collector visits none of it, and no dictionary is large when it grows. One dictionary of lists
stopped the loop for 0.1 s at 20 million rows in each full collection."""

from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct, pack
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.index.keys import NO_ROW, RowKeys

PART_BUCKETS: Final = 4096
"""Buckets of one dictionary: every tenth to fiftieth of them has spilled rows."""


class SpilledRows:
    """Spilled rows by bucket. Buckets without rows take no memory."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __getitem__(self, bucket: int) -> list[int]:
        """Rows of the bucket; empty if it has none."""
        rows: list[int] = memoryview(self._parts.get(bucket // PART_BUCKETS, {}).get(bucket, b"")).cast("I").tolist()
        return rows

    def __iter__(self) -> Iterator[int]:
        """Buckets with spilled rows, in no order."""
        return chain.from_iterable(self._parts.values())

    def add(self, bucket: int, *rows: int) -> None:
        """Append rows to the bucket."""
        part = self._parts.setdefault(bucket // PART_BUCKETS, {})
        part[bucket] = part.get(bucket, b"") + pack(f"{len(rows)}I", *rows)

    def pop(self, bucket: int) -> list[int]:
        """Remove and return the rows of the bucket."""
        rows = self[bucket]
        if rows:
            part = self._parts[bucket // PART_BUCKETS]
            del part[bucket]
            if not part:
                del self._parts[bucket // PART_BUCKETS]
        return rows


WAYS: Final = 8
WORDS: Final = 2 * WAYS
"""u32 words of a bucket: the tags of its ways, 0 for a free one, then their rows."""
SPILLED: Final = 2
"""Tag of the last way of a bucket with more rows than ways: the rows beyond its other ways are in SpilledRows. Rows'
tags are odd."""
FIRST_BUCKETS: Final = 8
FULL_BUCKET: Final = 4.8
"""Average rows a bucket at which the table begins to grow: then a fiftieth of the rows is spilled."""
MOVES_PER_INSERT: Final = 2
"""Buckets moved for each inserted row while the table grows: growth ends before the unmoved buckets are a tenth
fuller."""
MOVE_BATCH: Final = 256
"""Buckets moved at a time, 30 us, for single inserts."""
SMALL_BATCH: Final = 16
"""Batches up to this size are looked up key by key: numpy's calls take as long."""

_TAGS: Final = Struct(f"{WAYS}I")
_TAG_MASK: Final = (1 << 32) - 1
Found = npt.NDArray[np.intp]
Hashes = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


class KeyIndex:
    """Row of each key. Seeded as Python's hashes are, per process. Not thread-safe.

    `keys` must have a row's key from before its insertion until after its removal."""

    def __init__(self, keys: RowKeys) -> None:
        self._keys = keys
        self._count = 0
        self._due_moves = 0
        """Buckets to be moved for inserted rows."""
        self._split = 0
        """While the table grows, buckets below this one are in the larger table, each as two."""
        self._spilled = SpilledRows()
        """Rows without a way in their bucket."""
        self._use(np.zeros((FIRST_BUCKETS, WORDS), np.uint32))
        self._larger: Words | None = None
        self._larger_view = self._view

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.get(key) != NO_ROW

    def __getitem__(self, key: bytes) -> int:
        row = self.get(key)
        if row == NO_ROW:
            raise KeyError(key)
        return row

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over keys and rows, in no order."""
        tables = [self._table[self._split :]]
        if self._larger is not None:
            tables += [self._larger[: self._split], self._larger[self._buckets : self._buckets + self._split]]
        for table in tables:
            rows = table[:, WAYS:]
            for row in rows[rows != NO_ROW].tolist():
                yield self._keys[row], row
        for bucket in self._spilled:
            for row in self._spilled[bucket]:
                yield self._keys[row], row

    def get(self, key: bytes, default: int = NO_ROW) -> int:
        """Return the row of `key`, or `default`."""
        tag = hash(key) & _TAG_MASK | 1
        bucket = tag >> 1 & self._mask
        view = self._view
        if bucket < self._split:
            bucket, view = tag >> 1 & self._larger_mask, self._larger_view
        begin = bucket * WORDS
        tags = _TAGS.unpack_from(view, 4 * begin)
        if tag in tags:
            row: int = view[begin + WAYS + tags.index(tag)]
            if self._keys[row] == key:
                return row
            for way in range(WAYS):
                if tags[way] == tag and self._keys[view[begin + WAYS + way]] == key:
                    return view[begin + WAYS + way]
        if tags[-1] == SPILLED:
            return self._among_spilled(bucket, key, default)
        return default

    def find(self, keys: Sequence[bytes]) -> Found:
        """Return the row of each key, NO_ROW for missing ones."""
        if len(keys) <= SMALL_BATCH:
            return np.fromiter(map(self.get, keys), np.intp, len(keys))
        lengths = list(map(len, keys))
        if lengths.count(lengths[0]) == len(keys):
            return self._find_alike(keys)
        found = np.zeros(len(keys), np.intp)
        of_length: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            of_length.setdefault(length, []).append(number)
        for numbers in of_length.values():
            found[numbers] = self._find_alike([keys[number] for number in numbers])
        return found

    def has_any(self, keys: Sequence[bytes]) -> bool:
        """Return True if any of the keys has a row."""
        if len(keys) <= SMALL_BATCH:
            return any(map(self.get, keys))
        return bool(self.find(keys).any())

    def insert(self, key: bytes, row: int) -> None:
        """Insert `key`, which must have no row."""
        self._grow_for(1)
        self._insert(hash(key), row)

    def insert_all(self, keys: Sequence[bytes], rows: Words) -> None:
        """As `insert`, of different keys with a row each."""
        self._grow_for(len(keys))
        hashes = _hashes(keys)
        while len(hashes):
            buckets = self._numbers(hashes)
            _, chosen = np.unique(buckets, return_index=True)  # one row a bucket at a time: the next ones see what it took
            is_free = self._gather(hashes[chosen])[:, :WAYS] == 0
            has_free_way = is_free.any(axis=1)
            for number in chosen[~has_free_way].tolist():
                self._insert(int(hashes[number]), int(rows[number]))
            left = np.ones(len(hashes), np.bool_)
            left[chosen] = False
            chosen = chosen[has_free_way]
            self._write(buckets[chosen], is_free[has_free_way].argmax(axis=1), _tags(hashes[chosen]), rows[chosen])
            hashes, rows = hashes[left], rows[left]

    def remove(self, key: bytes, row: int) -> None:
        """Remove `key`, which must have this row."""
        bucket, view = self._bucket_of(hash(key))
        self._count -= 1
        begin = bucket * WORDS
        spilled = self._spilled.pop(bucket)
        if row in spilled:
            spilled.remove(row)
        else:
            way = begin + view[begin + WAYS : begin + WORDS].tolist().index(row)
            view[way] = view[way + WAYS] = 0
        if spilled:
            view[begin + WAYS - 1] = 0
            for other in spilled:
                self._insert(hash(self._keys[other]), other)

    def remove_all(self, keys: Sequence[bytes], rows: Words) -> None:
        """As `remove`, of different keys."""
        hashes = _hashes(keys)
        buckets = self._gather(hashes)
        is_spilled = buckets[:, WAYS - 1] == SPILLED
        for number in np.flatnonzero(is_spilled).tolist():
            self.remove(keys[number], int(rows[number]))
        hashes, buckets, rows = hashes[~is_spilled], buckets[~is_spilled], rows[~is_spilled]
        nothing = np.zeros(len(rows), np.uint32)
        self._write(self._numbers(hashes), (buckets[:, WAYS:] == rows[:, None]).argmax(axis=1), nothing, nothing)
        self._count -= len(rows)

    def check_integrity(self) -> None:
        """Assert that each key is found at its row, and is counted. For tests; O(rows)."""
        items = list(self.items())
        assert len({key for key, _row in items}) == len(items) == self._count
        assert all(self.get(key) == row for key, row in items)
        assert all(len(self._spilled[bucket]) > 1 for bucket in self._spilled)
        tables = [(self._table, list(range(self._split, self._buckets)))]
        if self._larger is not None:
            tables.append((self._larger, [*range(self._split), *range(self._buckets, self._buckets + self._split)]))
        spilled = {bucket for table, buckets in tables for bucket in buckets if table[bucket, WAYS - 1] == SPILLED}
        assert spilled == set(self._spilled)

    def _use(self, table: Words) -> None:
        self._table = table
        self._view = table.reshape(-1).data
        self._buckets = len(table)
        self._mask, self._larger_mask = self._buckets - 1, 2 * self._buckets - 1

    def _find_alike(self, keys: Sequence[bytes]) -> Found:
        """`find`, of keys of one length."""
        length = len(keys[0])
        if not length:
            return np.zeros(len(keys), np.intp)
        hashes = _hashes(keys)
        tags = _tags(hashes)
        buckets = self._gather(hashes)
        hits = np.flatnonzero(buckets[:, :WAYS] == tags[:, None])
        asked = hits // WAYS
        rows = buckets.reshape(-1)[hits + (asked * WAYS + WAYS)]
        wanted = np.frombuffer(b"".join(keys), f"S{length}")
        is_one_each = len(hits) == len(keys) and bool((asked == np.arange(len(keys))).all())
        same = self._keys.are(rows, wanted if is_one_each else wanted[asked], length)
        if is_one_each and same.all():  # as a rule
            found: Found = rows.astype(np.intp)
            return found
        found = np.zeros(len(keys), np.intp)
        found[asked[same]] = rows[same]
        if self._spilled:
            numbers = self._numbers(hashes)
            for number in np.flatnonzero((buckets[:, WAYS - 1] == SPILLED) & (found == NO_ROW)).tolist():
                found[number] = self._among_spilled(int(numbers[number]), keys[number])
        return found

    def _numbers(self, hashes: Hashes) -> Found:
        """Return the bucket of each hash."""
        numbers: Found = hashes >> 1 & self._mask
        if self._split:
            numbers = np.where(numbers < self._split, hashes >> 1 & self._larger_mask, numbers)
        return numbers

    def _gather(self, hashes: Hashes) -> Words:
        """Return a copy of the bucket of each hash."""
        numbers = hashes >> 1 & self._mask
        buckets = self._table.take(numbers, axis=0)
        if self._larger is not None:
            moved = np.flatnonzero(numbers < self._split)
            buckets[moved] = self._larger.take(hashes[moved] >> 1 & self._larger_mask, axis=0)
        return buckets

    def _bucket_of(self, hashed: int) -> "tuple[int, memoryview[int]]":
        bucket = hashed >> 1 & self._mask
        if bucket < self._split:
            return hashed >> 1 & self._larger_mask, self._larger_view
        return bucket, self._view

    def _among_spilled(self, bucket: int, key: bytes, default: int = NO_ROW) -> int:
        return next((row for row in self._spilled[bucket] if self._keys[row] == key), default)

    def _insert(self, hashed: int, row: int) -> None:
        bucket, view = self._bucket_of(hashed)
        begin = bucket * WORDS
        tags = _TAGS.unpack_from(view, 4 * begin)
        if 0 in tags:
            way = begin + tags.index(0)
            view[way], view[way + WAYS] = hashed & _TAG_MASK | 1, row
        elif tags[-1] == SPILLED:
            self._spilled.add(bucket, row)
        else:
            last = begin + WAYS - 1
            self._spilled.add(bucket, view[last + WAYS], row)
            view[last], view[last + WAYS] = SPILLED, NO_ROW

    def _write(self, buckets: Found, ways: Found, tags: Words, rows: Words) -> None:
        """Write entries into free ways of different buckets."""
        is_moved = (buckets < self._split) | (buckets >= self._buckets)
        for table, part in ((self._table, ~is_moved), (self._larger, is_moved)):
            if table is not None:
                table[buckets[part], ways[part]] = tags[part]
                table[buckets[part], ways[part] + WAYS] = rows[part]

    def _grow_for(self, count: int) -> None:
        """Count `count` inserted rows, and grow the table."""
        self._count += count
        if self._larger is None and self._count <= FULL_BUCKET * self._buckets:
            return
        self._due_moves += MOVES_PER_INSERT * count
        while self._larger is not None or self._count > FULL_BUCKET * self._buckets:
            if self._larger is None:
                self._larger = np.zeros((2 * self._buckets, WORDS), np.uint32)
                self._larger_view = self._larger.reshape(-1).data
            part = (
                min(MOVE_BATCH, self._buckets - self._split)
                if self._due_moves < 2 * MOVE_BATCH
                else min(self._due_moves, self._buckets - self._split)
            )
            if self._due_moves < part:
                return
            self._due_moves -= part
            self._move(self._split + part)
        self._due_moves = 0

    def _move(self, end: int) -> None:
        """Move the buckets below `end` to the larger table, each as two."""
        assert self._larger is not None
        begin, self._split = self._split, end
        part = self._table[begin:end]
        tags, rows = part[:, :WAYS], part[:, WAYS:]
        goes_up = tags >> np.uint32(1) & np.uint32(self._buckets) != 0
        for first, is_there in ((begin, ~goes_up), (begin + self._buckets, goes_up)):
            half = self._larger[first : first + len(part)]
            np.multiply(tags, is_there, out=half[:, :WAYS])
            np.multiply(rows, is_there, out=half[:, WAYS:])
        is_spilled = np.flatnonzero(tags[:, WAYS - 1] == SPILLED)
        self._larger[begin + is_spilled, WAYS - 1] = 0
        for bucket in (begin + is_spilled).tolist():
            for row in self._spilled.pop(bucket):
                self._insert(hash(self._keys[row]), row)
        if end == self._buckets:
            self._use(self._larger)
            self._larger, self._split = None, 0
            self._larger_view = self._view


def _hashes(keys: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(hash, keys), np.int64, len(keys))


def _tags(hashes: Hashes) -> Words:
    return hashes.astype(np.uint32) | np.uint32(1)
