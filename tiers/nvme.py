"""The NVMe tier: values in LMDB, verified on every read, recovered after a restart without reading one of them.

Two databases under one key, the block's id (8 bytes, big-endian, never used twice):

    values   the value's bytes, nothing else
    headers  digest, size, checksum (uint64 each, big-endian) and the tag

`checksum` is the xxh3_64 of the value and `digest` that of everything else (key, size, checksum, tag): LMDB notices no flipped bit,
and one in a tag would give the right bytes to the wrong key.

The bytes may be an encoded value (tiers/value_codec.py): whoever reads it with room for the value itself gets it decoded. Size and
checksum here are those of the bytes as they lie on the disk.

A deletion that LMDB cannot write down (its disk is full) goes to `removed.ids` until it can: tiers/tombstones.py.

Capacity is counted in these bytes; what LMDB adds is the disk's affair: two pages for a value of 4 KiB, 1.004 times 1 MiB.
Appending (MDB_APPEND) and native integer keys were measured and make no difference; larger batches do: a commit costs 1 to 6 ms.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstore.protocol.errors import ChecksumMismatch, Closed, ConfigError, InvalidArgument, StaleHandle, TierFailed
from kvstore.tiers.nvme_env import Begin, Environment, begin_transaction
from kvstore.tiers.tier import Record, Recovered, Slot, Tier, TierFull
from kvstore.tiers.tombstones import Tombstones
from kvstore.tiers.value_codec import decode_into

MAX_VALUE_BYTES = 1 << 30
MAX_TAG_BYTES = 4096

MAX_DELETIONS = 16_384
"""Deletions in one transaction, so that a write waits at most 50 ms for those of a great eviction; the others wait for the next."""

RECOVER_CHUNK = 4096
"""Headers read in one transaction while recovering: a caller that takes its time between blocks holds none open."""

NUMPY_COPY_BYTES = 64 << 10
"""From here on numpy copies: it releases the GIL, at 1 us a call. A memoryview is twice as fast at 4 KiB, and holds the GIL for
5 us at most below this. (Pages that are not in memory are read by `Transaction.get`, without the GIL.)"""

_HEADER = struct.Struct(">QQQ")
_UNKNOWN = "\0"
"""Whose a recovered value is before `adopt`: no tenant's name."""


class NvmeTier(Tier):
    """Slots in an LMDB environment of one folder.

    Threads: as Tier says; `flush` belongs to the thread that calls `write_batch`, and any number of threads may read. The caller
    frees no slot that is being written. Even if it did, the value would not outlast the next transaction: deletions follow the
    writes within one, and wait in a queue for the next.

    A slot's index is the block's id, its generation the count of times the folder was opened. An id is never used again within a
    process, so a slot that was given back is stale for ever.
    """

    name = "nvme"
    durable = True

    def __init__(
        self, directory: str | os.PathLike[str], *, capacity_bytes: int, sync: bool = True, begin: Begin = begin_transaction
    ) -> None:
        """Open `directory` (created where missing; one node at a time may use it) to hold `capacity_bytes` of values.

        Without `sync` a power cut may lose the newest batches, or the whole folder; the death of the process still loses nothing.

        Raises:
            ConfigError: the folder or the capacity cannot be used; the message says why.
        """
        self._environment = Environment(directory, capacity_bytes=capacity_bytes, sync=sync, begin=begin)
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._size_by_id: dict[int, int] = {}
        self._groups: dict[str, int] = {_UNKNOWN: 0}
        self._tenants = [_UNKNOWN]
        """By group."""
        self._tenant_bytes: dict[str, int] = {}
        self._unwritten: set[int] = set()
        """Allocated and never given to `write_batch`: freeing one leaves nothing to delete. Added to by the loop, the writer removes."""
        self._freed: deque[bytes] = deque()
        """Keys given back and not yet deleted, oldest first. Appended by the loop, taken by the writer."""
        self._deleting: list[bytes] = []
        """Keys taken from `_freed` whose transaction has not been committed. The writer's own."""
        try:
            self._tombstones = Tombstones(Path(directory) / "removed.ids", sync=sync)
        except BaseException:
            self._environment.close()
            raise
        self._freed.extend(sorted(self._tombstones.ids))
        try:
            self._next_id = self._first_unused_id()
        except TierFailed as damaged:
            self._tombstones.close()
            self._environment.close()
            raise ConfigError(f"{damaged}; move the folder away to start afresh") from damaged

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def quarantined_bytes(self) -> int:
        return 0

    @property
    def health(self) -> str:
        return self._environment.failure or "ok"

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        if self._environment.failure:
            raise TierFailed(self._environment.failure)
        if not 1 <= size_bytes <= min(MAX_VALUE_BYTES, self._capacity_bytes):
            raise InvalidArgument(f"a value here has 1 to {min(MAX_VALUE_BYTES, self._capacity_bytes)} bytes, not {size_bytes}")
        if size_bytes > self.free_bytes:
            raise TierFull(f"{size_bytes} bytes wanted, {self.free_bytes} free")
        slot = Slot(self._next_id, self._environment.openings, size_bytes, self.group(size_bytes, tenant=tenant))
        self._next_id += 1
        self._unwritten.add(slot.index)
        self._take(slot)
        return slot

    def group(self, size_bytes: int, *, tenant: str = "") -> int:
        """One a tenant: any slot makes room for any value, but keys are told apart within a tenant only. Recovered slots are in group 0
        until they are adopted."""
        group = self._groups.get(tenant)
        if group is None:
            group = self._groups[tenant] = len(self._tenants)
            self._tenants.append(tenant)
        return group

    @property
    def tenant_bytes(self) -> Mapping[str, int]:
        return self._tenant_bytes

    def adopt(self, slot: Slot, *, tenant: str) -> Slot:
        self._require(slot)
        adopted = slot._replace(group=self.group(slot.size_bytes, tenant=tenant))
        self._count(slot, -slot.size_bytes)
        self._count(adopted, slot.size_bytes)
        return adopted

    def write_batch(self, records: Sequence[Record]) -> None:
        for record in records:
            # Before the check: a slot freed after this line is queued for deletion, one freed before it is refused.
            self._unwritten.discard(record.slot.index)
            self._check(record)

        def put(transaction: Any) -> None:
            for record in records:
                key = _key(record.slot.index)
                transaction.put(key, record.data, db=self._environment.values)
                transaction.put(key, _pack_header(key, record), db=self._environment.headers)
            self._delete(transaction)

        try:
            self._environment.write(put)
        except TierFull:
            # Nothing was written, so freeing these leaves nothing to delete, and no tombstone is spent on them.
            self._unwritten.update(record.slot.index for record in records)
            # Deletions are what makes room, so they must not depend on the success of a write that lacks it.
            self.flush()
            raise
        self._deleting.clear()

    def flush(self) -> None:
        """Make every `free` before this call durable: in LMDB or, where that cannot write, as tombstones.

        Between `free` and the next `write_batch` or `flush` a crash brings the block back: harmless, for its bytes never change;
        but a block that must not come back (removed on request) needs this.

        Raises TierFull, TierFailed: not even that could be done. The deletions stay queued, and the next flush begins with them.
        """
        try:
            while self._freed or self._deleting:
                self._environment.write(self._delete)
                self._deleting.clear()
        except (TierFull, TierFailed):
            # One step of the interpreter, as the loop may append meanwhile.
            self._tombstones.add([*self._deleting, *self._freed.copy()])
        else:
            self._tombstones.clear()

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        pairs = list(zip(slots, destinations, strict=True))
        answers: list[Exception | None] = []
        while len(answers) < len(pairs):
            try:
                with self._environment.read() as transaction:
                    for slot, destination in pairs[len(answers) :]:
                        answers.append(self._read(transaction, slot, destination))  # noqa: PERF401 - the answers so far outlive an exception
            except TierFailed as error:
                # LMDB refuses every further read of a transaction that met a damaged page: the neighbours need another one.
                answers.append(error)
        return answers

    def free(self, slot: Slot) -> None:
        self._require(slot)
        del self._size_by_id[slot.index]
        self._used_bytes -= slot.size_bytes
        self._count(slot, -slot.size_bytes)
        try:
            self._unwritten.remove(slot.index)
        except KeyError:
            self._freed.append(_key(slot.index))

    def recover(self) -> Iterator[Recovered]:
        """The values found, oldest first, each counted as used when it is yielded.

        Where they are more than the capacity (it was larger once), the newest that fit; the others are deleted, as are those
        with a damaged header: both by the next `write_batch` or `flush`. Those with a tombstone are not there.
        """
        oldest = self._oldest_that_fits()
        for chunk in self._header_chunks():
            for key, raw in chunk:
                header = _unpack_header(key, raw)
                if key in self._tombstones.ids:
                    continue
                if header is None or key < oldest:
                    self._freed.append(key)
                    continue
                size_bytes, checksum, tag = header
                slot = Slot(int.from_bytes(key), self._environment.openings, size_bytes)
                self._take(slot)
                yield Recovered(slot, checksum, tag)

    def check_integrity(self) -> None:
        assert self._used_bytes == sum(self._size_by_id.values()) == sum(self._tenant_bytes.values())
        assert all(size_bytes > 0 for size_bytes in self._tenant_bytes.values())
        assert 0 <= self._used_bytes <= self._capacity_bytes
        assert all(block_id < self._next_id for block_id in self._size_by_id)
        assert not {_key(block_id) for block_id in self._size_by_id}.intersection(self._freed)

    def close(self) -> None:
        """Delete what was freed, if the device still lets us, and close. The thread that writes must have stopped."""
        try:
            self.flush()
        except (TierFull, TierFailed, Closed):
            pass
        finally:
            self._tombstones.close()
            self._environment.close()

    def _take(self, slot: Slot) -> None:
        self._size_by_id[slot.index] = slot.size_bytes
        self._used_bytes += slot.size_bytes
        self._count(slot, slot.size_bytes)

    def _count(self, slot: Slot, more_bytes: int) -> None:
        tenant = self._tenants[slot.group]
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + more_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def _require(self, slot: Slot) -> None:
        if slot.generation != self._environment.openings or slot.index not in self._size_by_id:
            raise StaleHandle(f"{slot} was given back")

    def _check(self, record: Record) -> None:
        self._require(record.slot)
        size_bytes = memoryview(record.data).nbytes
        if size_bytes != record.slot.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes for a slot of {record.slot.size_bytes}")
        if len(record.tag) > MAX_TAG_BYTES:
            raise InvalidArgument(f"a tag has at most {MAX_TAG_BYTES} bytes, not {len(record.tag)}")

    def _delete(self, transaction: Any) -> None:
        for _ in range(min(len(self._freed), MAX_DELETIONS - len(self._deleting))):
            self._deleting.append(self._freed.popleft())
        for key in self._deleting:
            transaction.delete(key, db=self._environment.headers)
            transaction.delete(key, db=self._environment.values)

    def _read(self, transaction: Any, slot: Slot, destination: memoryview) -> Exception | None:
        try:
            self._require(slot)
        except StaleHandle as stale:
            return stale
        stored = destination
        if destination.nbytes != slot.size_bytes:
            if destination.nbytes < slot.size_bytes:
                return InvalidArgument(f"{destination.nbytes} bytes for a slot of {slot.size_bytes}")
            stored = memoryview(bytearray(slot.size_bytes))
        key = _key(slot.index)
        raw = transaction.get(key, db=self._environment.headers)
        if raw is None:
            return StaleHandle(f"{slot} was never written")
        header = _unpack_header(key, bytes(raw))
        value = transaction.get(key, db=self._environment.values)
        if header is None or value is None or len(value) != slot.size_bytes:
            return ChecksumMismatch(f"{slot} has a damaged header or length")
        _copy(value, stored)
        if xxhash.xxh3_64_intdigest(stored) != header[1]:
            return ChecksumMismatch(f"{slot} does not hold the bytes that were written")
        return None if stored is destination else decode_into(stored, destination)

    def _first_unused_id(self) -> int:
        with self._environment.read() as transaction:
            cursor = transaction.cursor(self._environment.headers)
            newest = [bytes(cursor.key())] if cursor.last() else []
        # Not one with a tombstone either: the next process would take the new value for the deleted one.
        return max((int.from_bytes(key) + 1 for key in [*newest, *self._tombstones.ids]), default=0)

    def _header_chunks(self) -> Iterator[list[tuple[bytes, bytes]]]:
        after = b""
        while True:
            with self._environment.read() as transaction:
                cursor = transaction.cursor(self._environment.headers)
                # The key after `after` in LMDB's order is the same with a zero byte behind it.
                found = cursor.set_range(after + b"\0") if after else cursor.first()
                chunk = [(bytes(key), bytes(raw)) for key, raw in islice(cursor.iternext(), RECOVER_CHUNK)] if found else []
            if not chunk:
                return
            after = chunk[-1][0]
            yield chunk

    def _oldest_that_fits(self) -> bytes:
        """The key from which on everything fits the capacity."""
        room_bytes = self._capacity_bytes
        oldest = b"\xff" * 8
        with self._environment.read() as transaction:
            cursor = transaction.cursor(self._environment.headers)
            for key, raw in cursor.iterprev():
                header = _unpack_header(bytes(key), bytes(raw))
                room_bytes -= header[0] if header and bytes(key) not in self._tombstones.ids else 0
                if room_bytes < 0:
                    break
                oldest = bytes(key)
        return oldest


def _key(block_id: int) -> bytes:
    return block_id.to_bytes(8)


def _pack_header(key: bytes, record: Record) -> bytes:
    rest = struct.pack(">QQ", record.slot.size_bytes, record.checksum) + record.tag
    return xxhash.xxh3_64_digest(key + rest) + rest


def _unpack_header(key: bytes, raw: bytes) -> tuple[int, int, bytes] | None:
    """(size in bytes, checksum, tag), or None where a bit of the key or the header has changed."""
    if xxhash.xxh3_64_digest(key + raw[8:]) != raw[:8]:
        return None
    _digest, size_bytes, checksum = _HEADER.unpack_from(raw)
    return size_bytes, checksum, raw[_HEADER.size :]


def _copy(source: memoryview, destination: memoryview) -> None:
    """Copy between buffers of one length."""
    if len(source) < NUMPY_COPY_BYTES:
        destination.cast("B")[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
