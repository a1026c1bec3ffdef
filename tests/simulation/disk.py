"""The NVMe tier of a simulated host, without a disk: values outlive their process, deletions only once they are flushed.

As kvstore.tiers.nvme promises it: a value that was written is there after the process dies, and so is one that was freed and not flushed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, StaleHandle, TierFailed
from kvstore.tiers.tier import Record, Recovered, Slot, Tier, TierFull


@dataclass
class Disk:
    """Storage that outlives processes: values by id, with checksum and tag."""

    values: dict[int, tuple[bytes, int, bytes]] = field(default_factory=dict)
    next_id: int = 0
    openings: int = 0
    failure: TierFailed | None = None
    """Error that every write raises at present."""


class DiskTier(Tier):
    """Of one process on its host's disk."""

    name = "nvme"
    durable = True

    def __init__(self, disk: Disk, *, capacity_bytes: int) -> None:
        self._disk = disk
        disk.openings += 1
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}
        self._used_bytes = 0
        self._groups: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        """By id; "" until a recovered value is adopted."""
        self._freed: list[int] = []

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
    def tenant_bytes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for index, tenant in self._owners.items():
            found[tenant] = found.get(tenant, 0) + self._sizes[index]
        return found

    def adopt(self, slot: Slot, *, tenant: str) -> Slot:
        self._owners[slot.index] = tenant
        return slot._replace(group=self.group(slot.size_bytes, tenant=tenant))

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        if not 1 <= size_bytes <= self._capacity_bytes:
            raise InvalidArgument(f"a value here has 1 to {self._capacity_bytes} bytes, not {size_bytes}")
        if size_bytes > self.free_bytes:
            raise TierFull(f"{size_bytes} bytes wanted, {self.free_bytes} free")
        slot = Slot(self._disk.next_id, self._disk.openings, size_bytes, self.group(size_bytes, tenant=tenant))
        self._disk.next_id += 1
        self._take(slot, tenant)
        return slot

    def group(self, size_bytes: int, *, tenant: str = "") -> int:
        return self._groups.setdefault(tenant, len(self._groups))

    def write_batch(self, records: Sequence[Record]) -> None:
        for record in records:
            self._require(record.slot)
            if memoryview(record.data).nbytes != record.slot.size_bytes:
                raise InvalidArgument(f"{memoryview(record.data).nbytes} bytes for a slot of {record.slot.size_bytes}")
        if self._disk.failure is not None:
            raise self._disk.failure
        for record in records:
            self._disk.values[record.slot.index] = bytes(record.data), record.checksum, record.tag
        self.flush()

    def flush(self) -> None:
        """Make earlier deletions durable."""
        if self._disk.failure is not None:
            raise self._disk.failure
        for index in self._freed:
            self._disk.values.pop(index, None)
        self._freed.clear()

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        return [self._read(slot, destination) for slot, destination in zip(slots, destinations, strict=True)]

    def free(self, slot: Slot) -> None:
        self._require(slot)
        self._used_bytes -= self._sizes.pop(slot.index)
        del self._owners[slot.index]
        self._freed.append(slot.index)

    def recover(self) -> Iterator[Recovered]:
        room_bytes = self._capacity_bytes
        for index, (value, checksum, tag) in sorted(self._disk.values.items(), reverse=True):
            room_bytes -= len(value)
            if room_bytes < 0:
                return
            slot = Slot(index, self._disk.openings, len(value))
            self._take(slot, "")
            yield Recovered(slot, checksum, tag)

    def check_integrity(self) -> None:
        assert self._used_bytes == sum(self._sizes.values()) <= self._capacity_bytes
        assert self._sizes.keys().isdisjoint(self._freed)

    def close(self) -> None:
        if self._disk.failure is None:
            self.flush()

    def _take(self, slot: Slot, tenant: str) -> None:
        self._owners[slot.index] = tenant
        self._sizes[slot.index] = slot.size_bytes
        self._used_bytes += slot.size_bytes

    def _require(self, slot: Slot) -> None:
        if slot.generation != self._disk.openings or slot.index not in self._sizes:
            raise StaleHandle(f"{slot} was given back")

    def _read(self, slot: Slot, destination: memoryview) -> Exception | None:
        try:
            self._require(slot)
        except StaleHandle as stale:
            return stale
        found = self._disk.values.get(slot.index)
        if found is None:
            return StaleHandle(f"{slot} was never written")
        if len(found[0]) != destination.nbytes:
            return InvalidArgument(f"{destination.nbytes} bytes for a slot of {slot.size_bytes}")
        destination[:] = found[0]
        return None if xxhash.xxh3_64_intdigest(destination) == found[1] else ChecksumMismatch(f"{slot} is damaged")
