"""NVMe tier: headers and small values in LMDB, large values in a file beside it; every read is verified.

- LMDB holds a header per value and the bytes of values up to LMDB_BYTES (tiers/lmdb_records.py).
- Larger values lie in extents of whole pages in the value file (tiers/value_file.py).
- Write order: values, fdatasync, one transaction with the headers. A durable header therefore has its value.
- An extent is reused once the deletion of its header is durable and no read of it is in flight (tiers/placements.py).
- Without `sync` a power cut may keep a header and lose its value; the checksum detects it, and the read is a miss.
- Deletions that LMDB cannot write (its disk is full) go to `removed.ids`: tiers/deletion_log.py.

Values may be encoded (tiers/value_codec.py): sizes and checksums here are those of the bytes on disk, and a read into a
larger destination decodes.

Capacity is counted in slots: whole pages in the value file, the value's bytes in LMDB without LMDB's trees. The file
may be one segment longer than the capacity: freed extents wait there for the next transaction, so that writes do not.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.protocol.errors import Closed, ConfigError, InvalidArgument, StaleHandle, TierFailed
from kvstore.protocol.settings import format_size
from kvstore.tiers.deletion_log import DeletionLog
from kvstore.tiers.lmdb_records import LmdbRead, LmdbRecords, ValueHeader, key_of
from kvstore.tiers.nvme_env import Begin, Environment, begin_transaction
from kvstore.tiers.placements import PAGE_BYTES, Placement, Runs, pages_of
from kvstore.tiers.tier import Record, Recovered, Slot, Tier, TierFull
from kvstore.tiers.value_codec import decode_into
from kvstore.tiers.value_store import ExtentRead, ValueStore

log = logging.getLogger("kvstore.tiers")

MAX_VALUE_BYTES: Final = 1 << 30
MAX_TAG_BYTES: Final = 4096

LMDB_BYTES: Final = 1024
"""Values up to this size are stored in LMDB, where several share a page: 1,486 bytes for 1,000. From 1,350 bytes on
each takes a page of its own there too, and a cold read also walks the tree.
"""

MAX_DELETIONS = 16_384
"""Deletions per transaction. Bounds a write's wait behind a large eviction to about 50 ms; the rest go into the next
transaction.
"""

_UNKNOWN_TENANT = "\0"
"""Tenant of a recovered value before `adopt`; not a valid name."""


class NvmeTier(Tier):
    """Tier in one folder, with values that survive the process.

    Threads: as Tier; any number may call `write_batch`, `flush` and `read_batch_into`. The caller frees no slot that is
    being written. If it does, the value is not written, or deleted by the next transaction.

    A slot's index is the block's id, its generation the number of times the folder was opened. Ids are never reused
    within a process, so a freed slot stays stale.
    """

    name = "nvme"
    durable = True

    def __init__(
        self, directory: str | os.PathLike[str], *, capacity_bytes: int, sync: bool = True, begin: Begin = begin_transaction
    ) -> None:
        """Open `directory` (created if missing, used by one node at a time) for `capacity_bytes` of slots.

        Without `sync` a power cut may lose the newest batches or the whole folder; a crash of the process loses
        nothing.

        Raises:
            ConfigError: the folder or the capacity is unusable.
        """
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._size_by_id: dict[int, int] = {}
        self._groups: dict[str, int] = {_UNKNOWN_TENANT: 0}
        self._tenants = [_UNKNOWN_TENANT]
        """Tenant names by group."""
        self._tenant_bytes: dict[str, int] = {}
        self._unwritten: set[int] = set()
        """Ids allocated but not passed to `write_batch`: freeing one needs no deletion. The loop adds, writers remove."""
        self._freed: deque[bytes] = deque()
        """Keys freed but not yet deleted, oldest first. The loop appends, a writer pops."""
        self._deleting: list[bytes] = []
        """Keys taken from `_freed` whose transaction has not committed. Guarded by `_committing`."""
        self._committing = threading.Lock()
        """Held over a transaction and the changes to extents that follow it: both happen in the same order."""
        self._commits: deque[_Commit] = deque()
        """Batches whose values are written and that wait for a transaction."""
        with ExitStack() as opened:
            self._environment = Environment(directory, capacity_bytes=capacity_bytes, sync=sync, begin=begin)
            opened.callback(self._environment.close)
            self._records = LmdbRecords(self._environment)
            self._values = ValueStore(Path(directory) / "values", capacity_bytes=capacity_bytes, sync=sync)
            opened.callback(self._values.close)
            self._deletion_log = DeletionLog(Path(directory) / "removed.ids", sync=sync)
            opened.callback(self._deletion_log.close)
            self._freed.extend(sorted(self._deletion_log.ids))
            try:
                self._next_id = self._first_unused_id()
                self._lost_ids = self._restore()
            except TierFailed as damaged:
                raise ConfigError(f"{damaged}; move the folder away to start with an empty tier") from damaged
            opened.pop_all()

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
        return self._environment.failure or self._values.failure or "ok"

    @property
    def written_bytes(self) -> int:
        return self._values.written_bytes + self._environment.written_bytes

    def slot_bytes(self, size_bytes: int, *, tenant: str = "") -> int:
        """Return whole pages in the value file, or the value's size in LMDB."""
        return size_bytes if size_bytes <= LMDB_BYTES else pages_of(size_bytes) * PAGE_BYTES

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        self._check_health()
        slot_bytes = self.slot_bytes(size_bytes)
        if not 1 <= size_bytes <= MAX_VALUE_BYTES or slot_bytes > self._capacity_bytes:
            raise InvalidArgument(
                f"a value here has 1 byte to {format_size(min(MAX_VALUE_BYTES, self._capacity_bytes))}, not {size_bytes:,} bytes"
            )
        if slot_bytes > self.free_bytes:
            raise TierFull(f"{format_size(slot_bytes)} wanted, {format_size(self.free_bytes)} free")
        slot = Slot(self._next_id, self._environment.openings, size_bytes, self.group(size_bytes, tenant=tenant))
        self._next_id += 1
        self._unwritten.add(slot.index)
        self._add(slot)
        return slot

    def group(self, size_bytes: int, *, tenant: str = "") -> int:
        """Return the tenant's group: a freed slot makes space for any value of the tenant. Recovered slots are in group
        0 until `adopt`.
        """
        group = self._groups.get(tenant)
        if group is None:
            group = self._groups[tenant] = len(self._tenants)
            self._tenants.append(tenant)
        return group

    @property
    def tenant_bytes(self) -> Mapping[str, int]:
        return self._tenant_bytes

    def adopt(self, slot: Slot, *, tenant: str) -> Slot:
        self._check_slot(slot)
        adopted = slot._replace(group=self.group(slot.size_bytes, tenant=tenant))
        self._count_tenant(slot, -1)
        self._count_tenant(adopted, 1)
        return adopted

    def write_batch(self, records: Sequence[Record]) -> None:
        for record in records:
            # Before the check: a slot freed after this line is queued for deletion, one freed before it is refused.
            self._unwritten.discard(record.slot.index)
            self._check_record(record)
        self._check_health()
        try:
            self._write(records)
        except TierFull:
            # Nothing was written, so freeing these needs no deletion, nor space in the log.
            self._unwritten.update(record.slot.index for record in records if record.slot.index in self._size_by_id)
            # Deletions free space, so they must not depend on a write that fails for lack of it.
            self.flush()
            raise

    def flush(self) -> None:
        """Make every earlier `free` durable: in LMDB, or in the deletion log if LMDB cannot write.

        A crash between `free` and the next `write_batch` or `flush` brings the block back. This is harmless, as its
        bytes never change; a removal on request must be followed by `flush`.

        Raises TierFull or TierFailed when neither can be written. The deletions stay queued for the next flush.
        """
        with self._committing:
            try:
                while self._freed or self._deleting:
                    self._environment.write(self._delete)
                    self._release_deleted()
            except (TierFull, TierFailed):
                # `copy` is atomic under the GIL; the loop may append concurrently.
                self._deletion_log.add([*self._deleting, *self._freed.copy()])
            else:
                self._deletion_log.clear()

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        errors: list[Exception | None] = [None] * len(slots)
        buffers = dict[int, memoryview]()
        for index, (slot, destination) in enumerate(zip(slots, destinations, strict=True)):
            try:
                buffers[index] = self._buffer_for(slot, destination)
            except (StaleHandle, InvalidArgument) as refused:
                errors[index] = refused
        placements = self._values.placements
        number = placements.begin_read()
        try:
            found = [(index, placements.find(slots[index].index)) for index in buffers]
            in_extents = {index: ExtentRead(placement, buffers[index]) for index, placement in found if placement is not None}
            in_lmdb = [index for index, placement in found if placement is None]
            lmdb_errors = self._records.read([LmdbRead(slots[index].index, buffers[index]) for index in in_lmdb])
            self._values.read(list(in_extents.values()))
        finally:
            placements.end_read(number)
        for index, error in zip(in_lmdb, lmdb_errors, strict=True):
            errors[index] = error
        for index, read in in_extents.items():
            errors[index] = read.error
        for index, buffer in buffers.items():
            if errors[index] is None and buffer.nbytes != destinations[index].nbytes:
                errors[index] = decode_into(buffer, destinations[index])
        return errors

    def free(self, slot: Slot) -> None:
        self._check_slot(slot)
        del self._size_by_id[slot.index]
        self._used_bytes -= self.slot_bytes(slot.size_bytes)
        self._count_tenant(slot, -1)
        try:
            self._unwritten.remove(slot.index)
        except KeyError:
            self._freed.append(key_of(slot.index))

    def recover(self) -> Iterator[Recovered]:
        """Yield the values found, oldest first; each counts as used when it is yielded.

        Skips deletions in the log. Deletes, with the next `write_batch` or `flush`, values with a damaged header and,
        if the capacity was reduced, the oldest that exceed it.
        """
        oldest, too_many = self._oldest_that_fits(), 0
        for key, header in self._records.scan():
            if key in self._deletion_log.ids:
                continue
            if header is None or key < oldest or int.from_bytes(key) in self._lost_ids:
                self._freed.append(key)
                too_many += key < oldest
                continue
            slot = Slot(int.from_bytes(key), self._environment.openings, header.size_bytes)
            self._add(slot)
            yield Recovered(slot, header.checksum, header.tag)
        if too_many:
            capacity = format_size(self._capacity_bytes)
            log.warning("dropped %d values from NVMe, the oldest: the tier was larger before, and is %s now", too_many, capacity)

    def check_integrity(self) -> None:
        assert self._used_bytes == sum(map(self.slot_bytes, self._size_by_id.values())) == sum(self._tenant_bytes.values())
        assert all(used_bytes > 0 for used_bytes in self._tenant_bytes.values())
        assert 0 <= self._used_bytes <= self._capacity_bytes
        assert all(block_id < self._next_id for block_id in self._size_by_id)
        assert not {key_of(block_id) for block_id in self._size_by_id}.intersection(self._freed)
        self._values.placements.check_integrity()

    def close(self) -> None:
        """Write pending deletions if the device allows it, and close. Writers must have stopped."""
        try:
            self.flush()
        except (TierFull, TierFailed, Closed):
            pass
        finally:
            self._values.close()
            self._deletion_log.close()
            self._environment.close()

    def _add(self, slot: Slot) -> None:
        self._size_by_id[slot.index] = slot.size_bytes
        self._used_bytes += self.slot_bytes(slot.size_bytes)
        self._count_tenant(slot, 1)

    def _count_tenant(self, slot: Slot, change: int) -> None:
        tenant = self._tenants[slot.group]
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + change * self.slot_bytes(slot.size_bytes)
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def _check_slot(self, slot: Slot) -> None:
        if slot.generation != self._environment.openings or slot.index not in self._size_by_id:
            raise StaleHandle(f"{slot} was freed")

    def _check_health(self) -> None:
        if self.health != "ok":
            raise TierFailed(self.health)

    def _check_record(self, record: Record) -> None:
        self._check_slot(record.slot)
        size_bytes = memoryview(record.data).nbytes
        if size_bytes != record.slot.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes for a slot of {record.slot.size_bytes}")
        if len(record.tag) > MAX_TAG_BYTES:
            raise InvalidArgument(f"a tag has at most {MAX_TAG_BYTES} bytes, not {len(record.tag)}")

    def _write(self, records: Sequence[Record]) -> None:
        large = [record for record in records if record.slot.size_bytes > LMDB_BYTES]
        runs_of_large = self._values.place([record.slot.size_bytes for record in large], flush=self.flush)
        runs_by_id = {record.slot.index: runs for record, runs in zip(large, runs_of_large, strict=True)}
        try:
            if large:
                self._values.write(runs_of_large, [record.data for record in large])
            self._commit(records, runs_by_id)
        finally:
            self._values.discard(list(runs_by_id.values()))

    def _commit(self, records: Sequence[Record], runs_by_id: dict[int, Runs]) -> None:
        """Write headers, small values and pending deletions in one transaction with all batches that wait (group
        commit).

        Published values are removed from `runs_by_id`.
        """
        batch = _Commit(records, runs_by_id)
        self._commits.append(batch)
        with self._committing:
            if not batch.is_done:
                self._commit_group([self._commits.popleft() for _ in range(len(self._commits))])
        if batch.failure is not None:
            raise batch.failure

    def _commit_group(self, group: Sequence["_Commit"]) -> None:
        """Commit all batches or none; a failure is every batch's. Called with `_committing` held."""
        live: list[tuple[_Commit, Record]] = []

        def put(transaction: Any) -> None:
            # Skip values freed meanwhile: their deletion may be in an earlier transaction.
            live[:] = [(commit, record) for commit in group for record in commit.records if record.slot.index in self._size_by_id]
            for commit, record in live:
                slot, runs = record.slot, commit.runs_by_id.get(record.slot.index, ())
                self._records.put(transaction, slot.index, ValueHeader(slot.size_bytes, record.checksum, runs, record.tag), record.data)
            self._delete(transaction)

        failure: BaseException | None = None
        try:
            self._environment.write(put)
            for commit, record in live:
                if (runs := commit.runs_by_id.pop(record.slot.index, None)) is not None:
                    self._values.placements.publish(record.slot.index, Placement(record.checksum, runs))
            self._release_deleted()
        except BaseException as error:  # of any kind: every batch must end
            failure = error
        for commit in group:
            commit.is_done, commit.failure = True, failure

    def _delete(self, transaction: Any) -> None:
        for _ in range(min(len(self._freed), MAX_DELETIONS - len(self._deleting))):
            self._deleting.append(self._freed.popleft())
        for key in self._deleting:
            self._records.delete(transaction, key)

    def _release_deleted(self) -> None:
        self._values.placements.release(map(int.from_bytes, self._deleting))
        self._deleting.clear()

    def _buffer_for(self, slot: Slot, destination: memoryview) -> memoryview:
        """Return the buffer for the slot's bytes: the destination, or another one if they are to be decoded."""
        self._check_slot(slot)
        if destination.nbytes == slot.size_bytes:
            return destination if destination.format == "B" and destination.ndim == 1 else destination.cast("B")
        if destination.nbytes < slot.size_bytes:
            raise InvalidArgument(f"{destination.nbytes} bytes for a slot of {slot.size_bytes}")
        return np.empty(slot.size_bytes, np.uint8).data

    def _first_unused_id(self) -> int:
        newest = self._records.newest_key()
        # Nor an id in the deletion log: the next process would drop the new value.
        keys = [*self._deletion_log.ids, *([newest] if newest is not None else [])]
        return max((int.from_bytes(key) + 1 for key in keys), default=0)

    def _restore(self) -> set[int]:
        """Rebuild the extents of all values; returns the ids of values that lost theirs."""
        placements = [
            (int.from_bytes(key), Placement(header.checksum, header.runs))
            for key, header in self._records.scan()
            if header is not None and header.runs
        ]
        return self._values.restore(placements)

    def _oldest_that_fits(self) -> bytes:
        """Return the smallest key from which on all values fit the capacity."""
        left_bytes = self._capacity_bytes
        oldest = b"\xff" * 8
        for key, header in self._records.scan_newest():
            left_bytes -= self.slot_bytes(header.size_bytes) if header and key not in self._deletion_log.ids else 0
            if left_bytes < 0:
                break
            oldest = key
        return oldest


class _Commit:
    """A batch that waits for its transaction. Used by its writer and by the thread that commits it."""

    __slots__ = ("failure", "is_done", "records", "runs_by_id")

    def __init__(self, records: Sequence[Record], runs_by_id: dict[int, Runs]) -> None:
        self.records = records
        self.runs_by_id = runs_by_id
        self.is_done = False
        self.failure: BaseException | None = None
