"""Promises of nvme.py, one a test, after those of every durable tier: real LMDB, real full disks, real killed processes."""

import errno
import functools
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.codecs.tensor_value import encode_value
from kvstore.protocol.errors import ChecksumMismatch, ConfigError, StaleHandle, TierFailed
from kvstore.testing.tier_conformance import DurableTierConformance, get, put, read, record, value
from kvstore.testing.tier_machine import MACHINE_SETTINGS, TierMachine
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually, in_background, is_quiet
from kvstore.tiers.nvme import LMDB_BYTES, NvmeTier
from kvstore.tiers.nvme_env import begin_transaction
from kvstore.tiers.placements import PAGE_BYTES
from kvstore.tiers.tier import Slot, Tier, TierFull
from kvstore.tiers.value_codec import ValueCodec, decode_into
from kvstore.tiers.value_file import DIRECT_BYTES
from tests.tiers.test_value_file import refuse

KIB = 1 << 10


class OpenNvme:
    def open_tier(self, folder: Path, capacity_bytes: int) -> NvmeTier:
        return NvmeTier(folder, capacity_bytes=capacity_bytes, sync=False)

    def slot_bytes(self, size_bytes: int) -> int:
        return size_bytes if size_bytes <= LMDB_BYTES else -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class TestNvmeConformance(OpenNvme, DurableTierConformance):
    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        with open(values_file(tier), "rb") as file:
            file.seek(place_of(tier, slot))
            return file.read(slot.size_bytes)

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        with open(values_file(tier), "r+b") as file:
            file.seek(place_of(tier, slot))
            file.write(data)


class NvmeAgainstDict(OpenNvme, TierMachine):
    """All values in LMDB; re-opened between any two operations, too."""


class NvmeExtentsAgainstDict(OpenNvme, TierMachine):
    """Values of 300 bytes in LMDB, of 30 to 100 KB read through the page cache, of 150 KB by O_DIRECT."""

    UNIT_BYTES = 300


TestNvmeAgainstDict = NvmeAgainstDict.TestCase
TestNvmeAgainstDict.settings = MACHINE_SETTINGS
TestNvmeExtentsAgainstDict = NvmeExtentsAgainstDict.TestCase
TestNvmeExtentsAgainstDict.settings = MACHINE_SETTINGS


class Faults:
    """Begins real transactions; a reading or writing one fails as `errors` says, once each."""

    def __init__(self) -> None:
        self.errors: list[tuple[bool, Exception]] = []

    @contextmanager
    def __call__(self, environment: lmdb.Environment, write: bool) -> Iterator[Any]:
        with begin_transaction(environment, write) as transaction:
            if self.errors and self.errors[0][0] == write:
                raise self.errors.pop(0)[1]
            yield transaction


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Callable[..., NvmeTier]]:
    """Opens a tier in tmp_path/"nvme", and closes it after the test."""
    opened: list[NvmeTier] = []

    def open_one(capacity_bytes: int = 64 * KIB, **settings: Any) -> NvmeTier:
        opened.append(NvmeTier(tmp_path / "nvme", capacity_bytes=capacity_bytes, **{"sync": False, **settings}))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.check_integrity()
        tier.close()


def environment_of(tier: Tier) -> Any:
    assert isinstance(tier, NvmeTier)
    return tier._environment


def values_file(tier: Tier) -> Path:
    return Path(environment_of(tier)._path) / "values"


def place_of(tier: Tier, slot: Slot) -> int:
    """Offset of a value's bytes in the value file. It lies in one run."""
    assert isinstance(tier, NvmeTier)
    placement = tier._values.placements.find(slot.index)
    assert placement is not None
    [run] = placement.runs
    return run.begin * PAGE_BYTES


def change_header(tier: NvmeTier, slot: Slot, change: Callable[[bytearray], None]) -> None:
    environment = environment_of(tier)

    def apply(transaction: Any) -> None:
        header = bytearray(transaction.get(slot.index.to_bytes(8), db=environment.headers))
        change(header)
        transaction.put(slot.index.to_bytes(8), bytes(header), db=environment.headers)

    environment.write(apply)


def flip_bit(data: bytearray, bit: int) -> None:
    data[bit // 8] ^= 1 << bit % 8


def test_an_encoded_value_is_decoded_into_a_larger_destination(open_tier: Callable[..., NvmeTier]) -> None:
    """Also by a tier that was opened without a word of any codec; its neighbours are given as they are."""
    values = [encode_value(torch.full((1, 2, 1, 16, 8), float(number)), NONE) for number in range(3)]
    codec = ValueCodec(CacheScheme.parse("int8"))
    encoded = [made.data for value in values if (made := codec.encode(value)) is not None]
    decoded = [bytearray(value.nbytes) for value in values]
    assert [decode_into(data, memoryview(room)) for data, room in zip(encoded, decoded, strict=True)] == [None] * 3
    tier = open_tier()
    slots = put(tier, [*encoded, value(9)])
    assert tier.used_bytes == sum(len(data) for data in encoded) + len(value(9))
    assert get(tier, slots) == [*map(bytes, encoded), value(9)]
    tier.close()
    tier = open_tier()
    found = [found.slot for found in tier.recover()]
    rooms = [memoryview(bytearray(one.nbytes)) for one in [*values, memoryview(value(9))]]
    assert tier.read_batch_into(found, rooms) == [None] * 4
    assert rooms == [*decoded, value(9)]


def test_a_handle_from_before_a_restart_is_stale(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    (slot,) = put(tier, [value(1)])
    tier.close()
    tier = open_tier()
    (found,) = tier.recover()
    assert found.slot.index == slot.index
    assert isinstance(read(tier, slot), StaleHandle)


def test_a_folder_with_unreadable_headers_is_refused(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    faults.errors = [(False, lmdb.CorruptedError("damaged page"))]
    with pytest.raises(ConfigError, match="damaged page; move the folder away"):
        open_tier(begin=faults)
    open_tier()


def test_flush_makes_a_deletion_durable(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    slots = put(tier, [value(1), value(2), value(3, 10), value(4, 10)])
    tier.free_batch(slots[::2])
    tier.flush()
    tier.flush()
    with environment_of(tier).read() as transaction:
        assert transaction.stat(environment_of(tier).headers)["entries"] == 2
        assert transaction.stat(environment_of(tier).values)["entries"] == 1


def test_a_smaller_capacity_keeps_the_newest_that_fit(open_tier: Callable[..., NvmeTier], caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier()
    put(tier, [value(number, 10) for number in range(7)], tags=[b"%d" % number for number in range(7)])
    tier.close()
    tier = open_tier(35)
    recovered = list(tier.recover())
    assert [found.tag for found in recovered] == [b"4", b"5", b"6"]
    assert "dropped 4 values from NVMe, the oldest: the tier was larger before, and is 35 B now" in caplog.text
    assert tier.used_bytes == 30
    assert get(tier, [found.slot for found in recovered]) == [value(number, 10) for number in (4, 5, 6)]
    tier.close()
    assert [found.tag for found in open_tier().recover()] == [b"4", b"5", b"6"]


def test_any_flipped_bit_of_a_header_is_noticed(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    kept, slot = put(tier, [value(1, 10), value(2, 10)], tags=[b"kept", b"tag"])
    for bit in range(8 * (24 + 3)):
        change_header(tier, slot, lambda header, bit=bit: flip_bit(header, bit))  # type: ignore[misc]
        assert isinstance(read(tier, slot), ChecksumMismatch)
        change_header(tier, slot, lambda header, bit=bit: flip_bit(header, bit))  # type: ignore[misc]
    assert get(tier, [slot]) == [value(2, 10)]
    change_header(tier, slot, lambda header: flip_bit(header, 200))
    tier.close()
    tier = open_tier()
    (found,) = tier.recover()
    assert (found.tag, found.slot.index) == (b"kept", kept.index)
    (newcomer,) = put(tier, [value(3, 10)])
    assert get(tier, [newcomer]) == [value(3, 10)]


@pytest.mark.parametrize(("size_bytes", "name"), [(LMDB_BYTES, "data.mdb"), (4096, "values"), (DIRECT_BYTES, "values")])
def test_flipped_bits_are_detected(open_tier: Callable[..., NvmeTier], tmp_path: Path, size_bytes: int, name: str) -> None:
    tier = open_tier(8 << 20)
    values = [np.random.default_rng(number).bytes(size_bytes) for number in range(32)]
    slots = put(tier, values)
    chance = random.Random(1)
    with (tmp_path / "nvme" / name).open("r+b") as file:
        content = file.read(8 << 20)
        for number in chance.sample(range(32), 20):
            within, bit = chance.randrange(size_bytes), 1 << chance.randrange(8)
            found = -1
            while (found := content.find(values[number], found + 1)) >= 0:  # LMDB's splits of pages leave copies that nothing points to
                file.seek(found + within)
                file.write(bytes([content[found + within] ^ bit]))
            file.flush()
            assert isinstance(read(tier, slots[number]), ChecksumMismatch)
    errors = [read(tier, slot) for slot in slots]
    assert sum(isinstance(error, ChecksumMismatch) for error in errors) == 20
    assert get(tier, [slot for slot, error in zip(slots, errors, strict=True) if error is None])


@pytest.mark.promise("bit-flips")
def test_a_failed_read_fails_only_its_slot(open_tier: Callable[..., NvmeTier], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(1 << 20)
    slots = put(tier, [value(1), value(2), value(3, DIRECT_BYTES), value(4, DIRECT_BYTES), value(5, 10)])
    bad = {place_of(tier, slots[0]), place_of(tier, slots[2])}
    refuse(monkeypatch, "preadv", errno.EIO, lambda _file, _parts, offset: offset in bad)
    errors = tier.read_batch_into(slots, [memoryview(bytearray(slot.size_bytes)) for slot in slots])
    assert [type(error) for error in errors] == [TierFailed, type(None), TierFailed, type(None), type(None)]
    assert tier.health == "ok"


def test_a_failing_device_takes_nothing_more_and_says_so(open_tier: Callable[..., NvmeTier]) -> None:
    """LMDB gives up; what lies in the value file can still be read."""
    faults = Faults()
    tier = open_tier(begin=faults)
    lmdb_errors, slot = put(tier, [value(1, 10), value(2)])
    late = tier.allocate(4096)
    faults.errors = [(True, lmdb.Error("Input/output error")), (True, lmdb.Error("Input/output error"))]
    with pytest.raises(TierFailed):
        tier.write_batch([record(late, value(3))])
    assert "Input/output error" in tier.health
    with pytest.raises(TierFailed):
        tier.allocate(10)
    assert isinstance(read(tier, lmdb_errors), TierFailed)
    assert get(tier, [slot]) == [value(2)]
    tier.free(slot)
    with file_size_limit(0), pytest.raises(TierFailed):
        tier.flush()


@contextmanager
def little_room(folder: Path, room_bytes: int) -> Iterator[None]:
    """A file system of `room_bytes` at `folder` where we may mount one; else a limit on the length of every file we write."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room_bytes}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)  # lazily: a failed test has files open
    else:
        yield


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.promise("resources-exhausted")
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_full_disk_loses_nothing_and_reuses_freed_space(tmp_path: Path, batch: int) -> None:
    """Two pages for each value of 4 KiB: the disk is full at about half of the capacity."""
    room_bytes = 2 << 20
    with little_room(tmp_path, room_bytes):
        tier = NvmeTier(tmp_path, capacity_bytes=room_bytes, sync=True)
        with nullcontext() if os.path.ismount(tmp_path) else file_size_limit(room_bytes):
            held: dict[Slot, bytes] = {}
            refused, number = 0, 0
            while refused < 5:
                slots = [tier.allocate(4096) for _ in range(batch)]
                values = [value(number + i) for i in range(batch)]
                number += batch
                try:
                    tier.write_batch([record(slot, data) for slot, data in zip(slots, values, strict=True)])
                    held.update(zip(slots, values, strict=True))
                except TierFull:
                    refused += 1
                    tier.free_batch(slots)
                    for slot in list(held)[: 4 * batch]:
                        tier.free(slot)
                        del held[slot]
                assert number < 4000
            assert tier.health == "ok"
            assert get(tier, list(held)) == list(held.values())
            tier.check_integrity()
            tier.close()
        tier = NvmeTier(tmp_path, capacity_bytes=room_bytes, sync=True)
        recovered = [found.slot for found in tier.recover()]
        assert get(tier, recovered) == list(held.values())
        tier.close()


def test_deletions_do_not_depend_on_a_failed_write(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    (slot,) = put(tier, [value(1)])
    tier.free(slot)
    faults.errors = [(True, lmdb.MapFullError("no room")), (True, lmdb.MapFullError("still none"))]
    with pytest.raises(TierFull):
        put(tier, [value(2)])
    with environment_of(tier).read() as transaction:
        assert transaction.stat(environment_of(tier).values)["entries"] == 0


NO_ROOM = lmdb.MapFullError("no room")


@pytest.mark.promise("remove-stays-removed")
def test_a_deletion_that_lmdb_cannot_write_outlives_the_process(open_tier: Callable[..., NvmeTier], tmp_path: Path) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    kept, gone, newest = put(tier, [value(1), value(2), value(3)])
    tier.free(gone)
    tier.free(newest)
    faults.errors = [(True, NO_ROOM)] * 2
    tier.flush()
    shutil.copytree(tmp_path / "nvme", tmp_path / "as killed here")

    killed = NvmeTier(tmp_path / "as killed here", capacity_bytes=tier.used_bytes, sync=False)
    assert [found.slot.index for found in killed.recover()] == [kept.index], "and it alone fits"
    killed.check_integrity()
    assert killed.free_bytes == 0
    killed.flush()
    killed.close()
    after = NvmeTier(tmp_path / "as killed here", capacity_bytes=64 * KIB, sync=False)
    with environment_of(after).read() as transaction:
        assert transaction.stat(environment_of(after).headers)["entries"] == 1
    [found] = after.recover()
    assert get(after, [found.slot]) == [value(1)]
    after.close()


def test_an_id_in_the_deletion_log_is_not_reused(open_tier: Callable[..., NvmeTier], tmp_path: Path) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    (gone,) = put(tier, [value(1)])
    tier.free(gone)
    faults.errors = [(True, NO_ROOM)] * 2
    tier.flush()
    shutil.copytree(tmp_path / "nvme", tmp_path / "as killed here")
    again = NvmeTier(tmp_path / "as killed here", capacity_bytes=64 * KIB, sync=False)
    assert list(again.recover()) == []
    assert again.allocate(100).index > gone.index
    again.close()


def test_a_deletion_that_can_be_written_nowhere_is_told_of(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    (gone,) = put(tier, [value(1)])
    tier.free(gone)
    faults.errors = [(True, NO_ROOM)] * 2
    with file_size_limit(0), pytest.raises(TierFailed, match="cannot be logged"):
        tier.flush()
    tier.flush()
    with environment_of(tier).read() as transaction:
        assert transaction.stat(environment_of(tier).headers)["entries"] == 0


def test_closing_ends_though_a_deletion_can_be_written_nowhere(open_tier: Callable[..., NvmeTier]) -> None:
    """It was never told to be done: the value is there again."""
    faults = Faults()
    tier = open_tier(begin=faults)
    (gone,) = put(tier, [value(1)])
    tier.free(gone)
    faults.errors = [(True, NO_ROOM)] * 2
    with file_size_limit(0):
        tier.close()
    again = open_tier()
    assert [found.slot.index for found in again.recover()] == [gone.index]


@pytest.mark.promise("slots-not-reused-early")
def test_extents_are_not_reused_while_they_are_read(open_tier: Callable[..., NvmeTier], monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is freed, its deletion is durable, and others want its room: the read gets the bytes that were there as it began."""
    tier = open_tier(2 << 20)
    slots = put(tier, [value(number, 512 * KIB) for number in range(4)])
    is_reading, may_read = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        is_reading.set()
        may_read.wait(PATIENCE_S)
        return preadv(descriptor, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", slow)
        reading = in_background(lambda: get(tier, [slots[1]]))
        assert is_reading.wait(PATIENCE_S)
        tier.free_batch(slots)
        tier.flush()
        replaced = [tier.allocate(512 * KIB) for _ in range(4)]
        values = [value(number, 512 * KIB) for number in range(10, 14)]
        records = [record(slot, data) for slot, data in zip(replaced, values, strict=True)]
        writing = in_background(lambda: tier.write_batch(records))
        assert is_quiet(writing)
        may_read.set()
        assert reading.result(PATIENCE_S) == [value(1, 512 * KIB)]
        writing.result(PATIENCE_S)
    assert get(tier, replaced) == values


def test_writers_and_readers_at_once_leave_all_values(open_tier: Callable[..., NvmeTier]) -> None:
    """Four threads write and read, one frees and flushes: the tier has no room to spare."""
    tier = open_tier(4 << 20)
    sizes = [10, 4096, 70_000, 200_000]
    kept: list[tuple[Slot, bytes]] = []
    taking = threading.Lock()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(25):
            made: list[tuple[Slot, bytes]] = []
            with taking:  # the loop's own calls
                for size_bytes in chance.choices(sizes, k=3):
                    while tier.free_bytes < tier.slot_bytes(size_bytes) and kept:
                        tier.free(kept.pop(chance.randrange(len(kept)))[0])
                    if tier.free_bytes >= tier.slot_bytes(size_bytes):
                        made.append((tier.allocate(size_bytes), np.random.default_rng([seed, number]).bytes(size_bytes)))
            tier.write_batch([record(slot, data) for slot, data in made])
            assert get(tier, [slot for slot, _ in made]) == [data for _, data in made]
            if number % 5 == 0:
                tier.flush()
            with taking:
                kept.extend(made)

    for worker in [in_background(functools.partial(work, seed)) for seed in range(4)]:
        worker.result(PATIENCE_S)
    assert get(tier, [slot for slot, _ in kept]) == [data for _, data in kept]
    tier.flush()
    tier.check_integrity()


class Held:
    """Begins real transactions; each writing one is counted, and waits for `go` before its commit."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.has_begun = threading.Event()
        self.writes = 0
        self.error: Exception | None = None

    @contextmanager
    def __call__(self, environment: lmdb.Environment, write: bool) -> Iterator[Any]:
        with begin_transaction(environment, write) as transaction:
            yield transaction
            if write:
                self.writes += 1
                self.has_begun.set()
                self.go.wait(PATIENCE_S)
                if self.error is not None and self.writes > 1:
                    raise self.error


@pytest.mark.parametrize("error", [None, NO_ROOM])
def test_batches_that_wait_for_a_transaction_share_the_next_one(open_tier: Callable[..., NvmeTier], error: Exception | None) -> None:
    """Its failure is that of each of them."""
    held = Held()
    tier = open_tier(1 << 20, begin=held)
    held.go.clear()
    held.has_begun.clear()
    held.writes, held.error = 0, error
    slots = [tier.allocate(size_bytes) for size_bytes in (4096, 10, 4096, 10)]
    values = [value(number, slot.size_bytes) for number, slot in enumerate(slots)]

    def write(number: int) -> None:
        tier.write_batch([record(slots[number], values[number])])

    first = in_background(lambda: write(0))
    assert held.has_begun.wait(PATIENCE_S)
    others = [in_background(functools.partial(write, number)) for number in (1, 2, 3)]
    eventually(lambda: len(tier._commits) == 3, "three batches wait")
    held.go.set()
    first.result(PATIENCE_S)
    if error is None:
        for other in others:
            other.result(PATIENCE_S)
        assert get(tier, slots) == values
        assert held.writes == 2
    else:
        for other in others:
            with pytest.raises(TierFull):
                other.result(PATIENCE_S)
        assert get(tier, slots[:1]) == values[:1]
        held.error = None
        for number in (1, 2, 3):
            write(number)
        assert get(tier, slots) == values


def test_a_slot_freed_during_its_write_does_not_come_back(open_tier: Callable[..., NvmeTier], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    slot, other = tier.allocate(4096), tier.allocate(10)
    pwritev = os.pwritev

    def free_meanwhile(*arguments: Any) -> int:
        tier.free(slot)
        tier.flush()
        return pwritev(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", free_meanwhile)
        tier.write_batch([record(slot, value(1)), record(other, value(2, 10))])
    tier.check_integrity()
    tier.close()
    assert [found.slot.index for found in open_tier().recover()] == [other.index]


def test_a_restart_reads_no_value(open_tier: Callable[..., NvmeTier], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(1 << 20)
    put(tier, [value(1), value(2, DIRECT_BYTES), value(3, 10)])
    tier.close()
    reads: list[int] = []
    preadv = os.preadv

    def counted(file: int, parts: Sequence[memoryview], offset: int) -> int:
        reads.append(sum(map(len, parts)))
        return preadv(file, parts, offset)

    monkeypatch.setattr(os, "preadv", counted)
    again = open_tier(1 << 20)
    assert len(list(again.recover())) == 3
    assert reads == [PAGE_BYTES], "whether the file system takes O_DIRECT"


def test_a_value_file_that_is_gone_is_so_many_misses(open_tier: Callable[..., NvmeTier], tmp_path: Path) -> None:
    tier = open_tier()
    put(tier, [value(1), value(2, 10)], tags=[b"gone", b"kept"])
    tier.close()
    (tmp_path / "nvme" / "values").unlink()
    again = open_tier()
    assert [found.tag for found in again.recover()] == [b"kept"]
    put(again, [value(3)], tags=[b"new"])
    again.close()
    assert [found.tag for found in open_tier().recover()] == [b"kept", b"new"]


class PowerCut(BaseException):
    """No part of the program catches it."""


class VolatileWrites:
    """Writes to the value file that a power cut may undo: those since the last fdatasync, each or not as `chance` says."""

    def __init__(self, patch: pytest.MonkeyPatch, chance: random.Random, cut_at: int) -> None:
        self._chance = chance
        self._events_left = cut_at
        self._undo: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in ("pwritev", "fdatasync")}
        patch.setattr(os, "pwritev", self.pwritev)
        patch.setattr(os, "fdatasync", self.fdatasync)

    def _step(self) -> None:
        self._events_left -= 1
        if self._events_left < 0:
            raise PowerCut

    def pwritev(self, file: int, parts: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._step()
            with open(f"/proc/self/fd/{file}", "rb") as before:  # noqa: PTH123 - one that is not opened for O_DIRECT
                before.seek(offset)
                self._undo.append((offset, before.read(sum(map(len, parts)))))
            written: int = self._real["pwritev"](file, parts, offset)
            return written

    def fdatasync(self, file: int) -> None:
        with self._lock:
            self._step()
            self._real["fdatasync"](file)
            self._undo.clear()

    @contextmanager
    def begin(self, environment: lmdb.Environment, write: bool) -> Iterator[Any]:
        with begin_transaction(environment, write) as transaction:
            yield transaction
            if write:
                with self._lock:
                    self._step()  # before the commit

    def cut(self, file: Path) -> None:
        with file.open("r+b") as raw:
            for offset, before in reversed(self._undo):
                if self._chance.random() < 0.7:
                    raw.seek(offset)
                    raw.write(before)


@pytest.mark.promise("slots-not-reused-early")
@pytest.mark.parametrize("sync", [True, False])
def test_a_power_cut_loses_nothing_acknowledged(tmp_path: Path, sync: bool) -> None:
    """Cut at each step of a writer's, with what was not synced undone in part. Without `sync` values may be lost, and are then misses."""
    lost = 0
    for cut_at in range(0, 60, 3):
        folder, chance = tmp_path / f"cut-{cut_at}", random.Random(cut_at)
        acknowledged: dict[bytes, tuple[Slot, int]] = {}
        with pytest.MonkeyPatch.context() as patch:
            disk = VolatileWrites(patch, chance, cut_at)
            tier = NvmeTier(folder, capacity_bytes=64 * KIB, sync=sync, begin=disk.begin)
            try:
                for number in range(40):
                    size_bytes = chance.choice([10, 4096, 9000])
                    while tier.free_bytes < 3 * 12_288:
                        tier.free(acknowledged.pop(chance.choice(list(acknowledged)))[0])
                    slots = [tier.allocate(size_bytes) for _ in range(3)]
                    tags = [b"%d" % (3 * number + i) for i in range(3)]
                    tier.write_batch([record(slot, value(int(tag), size_bytes), tag) for slot, tag in zip(slots, tags, strict=True)])
                    acknowledged |= {tag: (slot, size_bytes) for tag, slot in zip(tags, slots, strict=True)}
                    if number % 7 == 3:
                        tier.flush()
            except PowerCut:
                pass
            shutil.copytree(folder, tmp_path / "after")
            disk.cut(tmp_path / "after" / "values")
        with suppress(PowerCut):
            tier.close()
        after = NvmeTier(tmp_path / "after", capacity_bytes=64 * KIB, sync=sync)
        found = {found.tag: found.slot for found in after.recover()}
        after.check_integrity()
        for tag, slot in found.items():
            buffer = bytearray(slot.size_bytes)
            [error] = after.read_batch_into([slot], [memoryview(buffer)])
            lost += error is not None
            assert error is None or (isinstance(error, ChecksumMismatch) and not sync)
            assert error is not None or buffer == value(int(tag), slot.size_bytes)
        assert not sync or set(acknowledged) <= set(found)
        after.close()
        shutil.rmtree(tmp_path / "after")
    assert (lost > 0) == (not sync), "the cuts reach what was not synced"


WRITER = """
import sys
import threading
from kvstore.testing.tier_conformance import record, value
from kvstore.tiers.nvme import NvmeTier

SIZE = int(sys.argv[2])
tier = NvmeTier(sys.argv[1], capacity_bytes=128 << 20, sync=False)
numbers = {int(found.tag): found.slot for found in tier.recover()}
number = max(numbers, default=0)
while True:
    batch = range(number + 1, number + 9)
    tier.write_batch([record(tier.allocate(SIZE), value(i, SIZE), b"%d" % i) for i in batch])
    number += 8
    print(number, flush=True)
"""


@pytest.mark.parametrize("size_bytes", [1000, 5000, 150_000])
def test_kill_9_of_the_writer_loses_nothing_acknowledged(tmp_path: Path, size_bytes: int) -> None:
    chance = random.Random(2)
    for _cycle in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(size_bytes)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = [int(writer.stdout.readline()) for _ in range(chance.randrange(1, 18))]
            writer.kill()
        tier = NvmeTier(tmp_path, capacity_bytes=128 << 20, sync=False)
        recovered = {int(found.tag): found.slot for found in tier.recover()}
        assert len(recovered) % 8 == 0
        assert sorted(recovered) == list(range(1, len(recovered) + 1))
        assert len(recovered) >= acknowledged[-1]
        assert get(tier, list(recovered.values())) == [value(number, size_bytes) for number in recovered]
        tier.check_integrity()
        tier.close()
