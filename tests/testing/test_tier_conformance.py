"""The suite passes a sound tier and fails an unsound one; the durable half is held by a tier of plain files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, StaleHandle
from kvstore.testing.tier_conformance import (
    DurableTierConformance,
    VolatileTierConformance,
)
from kvstore.testing.tier_machine import MACHINE_SETTINGS, TierMachine
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Record, Recovered, Slot, Tier, TierFull


class FileTier(Tier):
    """A file a value, named by its slot: 8 bytes of checksum, 2 of tag length, the tag, the value. Places are never reused."""

    name = "file"
    durable = True

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._capacity_bytes = capacity_bytes
        self.slots = {slot.index: slot for slot in map(slot_named, folder.iterdir())}
        self._next = max(self.slots, default=0)
        self.owners = dict.fromkeys(self.slots, "")

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.slots.values())

    @property
    def quarantined_bytes(self) -> int:
        return 0

    @property
    def tenant_bytes(self) -> dict[str, int]:
        return {
            tenant: sum(self.slots[at].size_bytes for at in self.owners if self.owners[at] == tenant) for tenant in self.owners.values()
        }

    def adopt(self, slot: Slot, *, tenant: str) -> Slot:
        self.owners[slot.index] = tenant
        return slot

    def path(self, slot: Slot) -> Path:
        if slot.index not in self.slots:
            raise StaleHandle(f"{slot}")
        return self.folder / f"{slot.index}-{slot.size_bytes}"

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        if not 1 <= size_bytes <= min(self._capacity_bytes, 1 << 30):
            raise InvalidArgument(f"{size_bytes} bytes")
        if size_bytes > self.free_bytes:
            raise TierFull(f"{size_bytes} bytes")
        self._next += 1
        self.slots[self._next] = Slot(self._next, 0, size_bytes)
        self.owners[self._next] = tenant
        return self.slots[self._next]

    def write_batch(self, records: Sequence[Record]) -> None:
        paths = [self.path(record.slot) for record in records]
        for record in records:
            if len(record.data) != record.slot.size_bytes:
                raise InvalidArgument(f"{len(record.data)} bytes for {record.slot}")
        for path, record in zip(paths, records, strict=True):
            path.write_bytes(record.checksum.to_bytes(8) + len(record.tag).to_bytes(2) + record.tag + record.data)

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        return [self.read_into(slot, destination) for slot, destination in zip(slots, destinations, strict=True)]

    def read_into(self, slot: Slot, destination: memoryview) -> Exception | None:
        try:
            content = self.path(slot).read_bytes()
        except StaleHandle as stale:
            return stale
        destination[:] = content[-slot.size_bytes :]
        return None if xxh3_64_intdigest(destination) == int.from_bytes(content[:8]) else ChecksumMismatch(f"{slot}")

    def free(self, slot: Slot) -> None:
        self.path(slot).unlink(missing_ok=True)
        del self.slots[slot.index], self.owners[slot.index]

    def recover(self) -> Iterator[Recovered]:
        for slot in self.slots.values():
            content = self.path(slot).read_bytes()
            yield Recovered(slot, int.from_bytes(content[:8]), content[10 : 10 + int.from_bytes(content[8:10])])

    def check_integrity(self) -> None:
        assert self.used_bytes <= self._capacity_bytes

    def close(self) -> None:
        pass


def slot_named(path: Path) -> Slot:
    index, size_bytes = path.name.split("-")
    return Slot(int(index), 0, int(size_bytes))


class OpenFiles:
    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return FileTier(folder / "values", capacity_bytes)


class TestFileTier(OpenFiles, DurableTierConformance):
    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        assert isinstance(tier, FileTier)
        return tier.path(slot).read_bytes()[-slot.size_bytes :]

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        assert isinstance(tier, FileTier)
        path = tier.path(slot)
        path.write_bytes(path.read_bytes()[: -slot.size_bytes] + data)


class FilesAgainstDict(OpenFiles, TierMachine):
    pass


TestFilesAgainstDict = FilesAgainstDict.TestCase
TestFilesAgainstDict.settings = MACHINE_SETTINGS


class ViewedDram(VolatileTierConformance):
    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DramTier(capacity_bytes)

    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        assert isinstance(tier, DramTier)
        return bytes(tier.view(slot))

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        assert isinstance(tier, DramTier)
        tier.view(slot)[:] = data


class TestVolatile(ViewedDram):
    """The volatile half of the suite, over slots read and written through their views."""
