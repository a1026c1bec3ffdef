"""Promises of nvme.py, one a test, after those of every durable tier: real LMDB, real full disks, real killed processes."""

import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.codecs.tensor_value import encode_value
from kvstore.protocol.errors import ChecksumMismatch, ConfigError, Corrupt, InvalidArgument, StaleHandle, TierFailed
from kvstore.tiers.conformance import DurableTierConformance, get, put, read, record, value
from kvstore.tiers.machine_conformance import MACHINE_SETTINGS, TierMachine
from kvstore.tiers.nvme import NUMPY_COPY_BYTES, NvmeTier
from kvstore.tiers.nvme_env import begin_transaction
from kvstore.tiers.tier import Slot, Tier, TierFull
from kvstore.tiers.value_codec import ValueCodec, decode_into

KIB = 1 << 10


class OpenNvme:
    def open_tier(self, folder: Path, capacity_bytes: int) -> NvmeTier:
        return NvmeTier(folder, capacity_bytes=capacity_bytes, sync=False)


class TestNvmeConformance(OpenNvme, DurableTierConformance):
    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        with environment_of(tier).read() as transaction:
            return bytes(transaction.get(slot.index.to_bytes(8), db=environment_of(tier).values))

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        environment = environment_of(tier)
        environment.write(lambda transaction: transaction.put(slot.index.to_bytes(8), data, db=environment.values))


class NvmeAgainstDict(OpenNvme, TierMachine):
    """Re-opened between any two operations, too."""


TestNvmeAgainstDict = pytest.mark.no_cover(NvmeAgainstDict.TestCase)
TestNvmeAgainstDict.settings = MACHINE_SETTINGS


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


def change_header(tier: NvmeTier, slot: Slot, change: Callable[[bytearray], None]) -> None:
    environment = environment_of(tier)

    def apply(transaction: Any) -> None:
        header = bytearray(transaction.get(slot.index.to_bytes(8), db=environment.headers))
        change(header)
        transaction.put(slot.index.to_bytes(8), bytes(header), db=environment.headers)

    environment.write(apply)


def flip_bit(data: bytearray, bit: int) -> None:
    data[bit // 8] ^= 1 << bit % 8


def test_it_is_durable_and_keeps_the_loop_waiting(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier(sync=True)
    assert (tier.name, tier.durable, tier.blocking, tier.mappable) == ("nvme", True, True, False)
    assert get(tier, put(tier, [value(1)])) == [value(1)]


@pytest.mark.parametrize("size_bytes", [NUMPY_COPY_BYTES - 1, NUMPY_COPY_BYTES, 1_000_003])
def test_both_ways_of_copying_give_the_bytes_written(open_tier: Callable[..., NvmeTier], size_bytes: int) -> None:
    tier = open_tier(1 << 20)
    assert get(tier, put(tier, [value(1, size_bytes)])) == [value(1, size_bytes)]


def test_a_value_can_be_read_into_memory_of_any_item_type(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    (slot,) = put(tier, [value(7)])
    floats = np.zeros(512, np.float64)
    assert tier.read_batch_into([slot], [floats.data]) == [None]
    assert floats.tobytes() == value(7)


def test_a_destination_of_another_size_is_misuse(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    (slot,) = put(tier, [value(1)])
    assert isinstance(tier.read_batch_into([slot], [memoryview(bytearray(1))])[0], InvalidArgument)


def test_an_encoded_value_takes_its_own_bytes_and_is_decoded_into_memory_of_the_values_size(open_tier: Callable[..., NvmeTier]) -> None:
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


def test_damaged_encoded_bytes_are_not_decoded_and_what_is_not_encoded_fills_no_larger_memory(open_tier: Callable[..., NvmeTier]) -> None:
    tensor = encode_value(torch.ones(1, 2, 1, 16, 8), NONE)
    encoded = ValueCodec(CacheScheme.parse("int8")).encode(tensor)
    assert encoded is not None
    tier = open_tier()
    slot, other = put(tier, [encoded.data, value(1)])
    environment = environment_of(tier)
    damaged = bytearray(encoded.data)
    flip_bit(damaged, 1000)
    environment.write(lambda transaction: transaction.put(slot.index.to_bytes(8), bytes(damaged), db=environment.values))
    rooms = [memoryview(bytearray(tensor.nbytes)), memoryview(bytearray(len(value(1)) + 1))]
    answers = tier.read_batch_into([slot, other], rooms)
    assert [type(answer) for answer in answers] == [ChecksumMismatch, Corrupt]
    assert not any(rooms[0])


def test_a_tag_beyond_its_limit_is_misuse(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    with pytest.raises(InvalidArgument, match="at most 4096"):
        tier.write_batch([record(tier.allocate(1), b"x", b"t" * 4097)])


def test_a_slot_never_written_is_not_read(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    assert isinstance(read(tier, tier.allocate(10)), StaleHandle)


def test_a_handle_from_before_a_restart_is_stale(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    (slot,) = put(tier, [value(1)])
    tier.close()
    tier = open_tier()
    (found,) = tier.recover()
    assert found.slot.index == slot.index
    assert isinstance(read(tier, slot), StaleHandle)


def test_a_folder_whose_headers_cannot_be_read_is_refused_and_released(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    faults.errors = [(False, lmdb.CorruptedError("damaged page"))]
    with pytest.raises(ConfigError, match="damaged page; move the folder away"):
        open_tier(begin=faults)
    open_tier()


def test_flush_makes_a_deletion_durable(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    slots = put(tier, [value(1), value(2)], tags=[b"one", b"two"])
    tier.free(slots[0])
    tier.flush()
    tier.flush()
    with environment_of(tier).read() as transaction:
        assert transaction.stat(environment_of(tier).headers)["entries"] == 1
        assert transaction.stat(environment_of(tier).values)["entries"] == 1


def test_a_great_eviction_is_spread_over_transactions_and_flush_ends_it(
    open_tier: Callable[..., NvmeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.nvme.MAX_DELETIONS", 3)
    tier = open_tier()
    tier.free_batch(put(tier, [value(number, 10) for number in range(8)]))
    entries = []
    for act in (lambda: put(tier, [b"x"]), tier.flush):
        act()
        with environment_of(tier).read() as transaction:
            entries.append(transaction.stat(environment_of(tier).values)["entries"])
    assert entries == [8 - 3 + 1, 1]


def test_a_slot_freed_before_it_was_written_leaves_nothing_to_delete(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    tier.free_batch([tier.allocate(10) for _ in range(3)])
    faults.errors = [(True, AssertionError("a transaction was begun"))]
    tier.flush()
    faults.errors.clear()


def test_a_slot_freed_while_it_is_written_does_not_come_back(tmp_path: Path) -> None:
    @contextmanager
    def free_after_the_checks(environment: lmdb.Environment, write: bool) -> Iterator[Any]:
        with begin_transaction(environment, write) as transaction:
            if write:
                tier.free_batch(slots)
                slots.clear()
            yield transaction

    tier = NvmeTier(tmp_path, capacity_bytes=KIB, sync=False, begin=free_after_the_checks)
    slots = [tier.allocate(3)]
    tier.write_batch([record(slots[0], b"abc")])
    tier.close()
    tier = NvmeTier(tmp_path, capacity_bytes=KIB, sync=False)
    assert list(tier.recover()) == []
    tier.close()


def test_recovery_is_oldest_first_and_in_chunks(open_tier: Callable[..., NvmeTier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.nvme.RECOVER_CHUNK", 3)
    tier = open_tier()
    tags = [b"%d" % number for number in range(7)]
    put(tier, [value(number, 9) for number in range(7)], tags=tags)
    tier.close()
    assert [found.tag for found in open_tier().recover()] == tags


def test_a_smaller_capacity_keeps_the_newest_that_fit(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    put(tier, [value(number, 10) for number in range(7)], tags=[b"%d" % number for number in range(7)])
    tier.close()
    tier = open_tier(35)
    recovered = list(tier.recover())
    assert [found.tag for found in recovered] == [b"4", b"5", b"6"]
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


def test_a_value_of_another_length_or_none_is_noticed(open_tier: Callable[..., NvmeTier]) -> None:
    tier = open_tier()
    short, gone = put(tier, [value(1, 10), value(2, 10)])
    environment = environment_of(tier)
    environment.write(lambda transaction: transaction.put(short.index.to_bytes(8), b"short", db=environment.values))
    environment.write(lambda transaction: transaction.delete(gone.index.to_bytes(8), db=environment.values))
    assert isinstance(read(tier, short), ChecksumMismatch)
    assert isinstance(read(tier, gone), ChecksumMismatch)


def test_bits_flipped_in_the_file_are_found_and_wrong_bytes_never_given(open_tier: Callable[..., NvmeTier], tmp_path: Path) -> None:
    tier = open_tier(256 * KIB)
    values = [np.random.default_rng(number).bytes(4096) for number in range(32)]
    slots = put(tier, values)
    chance = random.Random(1)
    with (tmp_path / "nvme" / "data.mdb").open("r+b") as file:
        content = file.read(8 << 20)
        for number in chance.sample(range(32), 20):
            offset_bytes = content.index(values[number]) + chance.randrange(4096)
            file.seek(offset_bytes)
            file.write(bytes([content[offset_bytes] ^ 1 << chance.randrange(8)]))
            file.flush()
            assert isinstance(read(tier, slots[number]), ChecksumMismatch)
    answers = [read(tier, slot) for slot in slots]
    assert sum(isinstance(answer, ChecksumMismatch) for answer in answers) == 20
    assert get(tier, [slot for slot, answer in zip(slots, answers, strict=True) if answer is None])


def test_a_damaged_page_fails_its_slot_and_not_the_neighbours(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    slots = put(tier, [value(1), value(2)])
    faults.errors = [(False, lmdb.PageNotFoundError("damaged page"))]
    first, second = tier.read_batch_into(slots, [memoryview(bytearray(4096)) for _ in slots])
    assert isinstance(first, TierFailed)
    assert second is None
    assert tier.health == "ok"


def test_a_failing_device_takes_nothing_more_and_says_so(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    (slot,) = put(tier, [value(1)])
    late = tier.allocate(4096)
    faults.errors = [(True, lmdb.Error("Input/output error")), (True, lmdb.Error("Input/output error"))]
    with pytest.raises(TierFailed):
        tier.write_batch([record(late, value(2))])
    assert "Input/output error" in tier.health
    with pytest.raises(TierFailed):
        tier.allocate(10)
    assert isinstance(read(tier, slot), TierFailed)
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
            subprocess.run(["umount", str(folder)], check=True)
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


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_full_disk_is_full_loses_nothing_and_takes_values_for_those_freed(tmp_path: Path, batch: int) -> None:
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


def test_deletions_that_a_failed_write_would_have_carried_are_done_without_it(open_tier: Callable[..., NvmeTier]) -> None:
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


def test_an_id_that_waits_for_its_deletion_is_not_given_to_another_value(open_tier: Callable[..., NvmeTier], tmp_path: Path) -> None:
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


def test_a_write_for_which_there_was_no_room_leaves_nothing_to_delete(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    slot = tier.allocate(100)
    faults.errors = [(True, NO_ROOM)] * 2
    with pytest.raises(TierFull):
        tier.write_batch([record(slot, value(1, 100))])
    tier.free(slot)
    faults.errors = [(True, RuntimeError("nothing is written"))]
    tier.flush()
    assert faults.errors != []
    faults.errors = []


def test_a_deletion_that_can_be_written_nowhere_is_told_of(open_tier: Callable[..., NvmeTier]) -> None:
    faults = Faults()
    tier = open_tier(begin=faults)
    (gone,) = put(tier, [value(1)])
    tier.free(gone)
    faults.errors = [(True, NO_ROOM)] * 2
    with file_size_limit(0), pytest.raises(TierFailed, match="cannot be written down"):
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


def test_a_folder_without_room_for_tombstones_is_refused_and_released(open_tier: Callable[..., NvmeTier], tmp_path: Path) -> None:
    (tmp_path / "nvme" / "removed.ids").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"removed.ids cannot be written"):
        open_tier()
    (tmp_path / "nvme" / "removed.ids").rmdir()
    open_tier()


WRITER = """
import sys
from kvstore.tiers.conformance import record, value
from kvstore.tiers.nvme import NvmeTier

tier = NvmeTier(sys.argv[1], capacity_bytes=32 << 20, sync=False)
numbers = {int(found.tag): found.slot for found in tier.recover()}
number = max(numbers, default=0)
while True:
    batch = range(number + 1, number + 9)
    tier.write_batch([record(tier.allocate(5000), value(i, 5000), b"%d" % i) for i in batch])
    number += 8
    print(number, flush=True)
"""


def test_kill_9_of_the_writer_loses_nothing_acknowledged_and_tears_nothing(tmp_path: Path) -> None:
    chance = random.Random(2)
    for _cycle in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = [int(writer.stdout.readline()) for _ in range(chance.randrange(1, 40))]
            writer.kill()
        tier = NvmeTier(tmp_path, capacity_bytes=32 << 20, sync=False)
        recovered = {int(found.tag): found.slot for found in tier.recover()}
        assert len(recovered) % 8 == 0
        assert sorted(recovered) == list(range(1, len(recovered) + 1))
        assert len(recovered) >= acknowledged[-1]
        assert get(tier, list(recovered.values())) == [value(number, 5000) for number in recovered]
        tier.check_integrity()
        tier.close()
