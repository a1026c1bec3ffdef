"""Values are placed, written and read; devices that are full or fail are the kernel's answers replaced."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.protocol.errors import Closed, TierFailed
from kvstore.tiers import value_store
from kvstore.tiers.placements import PAGE_BYTES, PageRun, Placement
from kvstore.tiers.tier import TierFull
from kvstore.tiers.value_file import DIRECT_BYTES, PIECE_BYTES
from kvstore.tiers.value_store import MIN_SEGMENT_BYTES, ExtentRead, ValueStore
from tests.tiers.test_nvme_env import file_size_limit
from tests.tiers.test_value_file import refuse

MIB = 1 << 20
SIZES = (5000, DIRECT_BYTES, PIECE_BYTES + 100, 4096, 70_000)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., ValueStore]]:
    opened: list[ValueStore] = []

    def open_one(capacity_bytes: int = 16 * MIB, *, sync: bool = True) -> ValueStore:
        opened.append(ValueStore(tmp_path / "values", capacity_bytes=capacity_bytes, sync=sync))
        opened[-1].restore([])
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def value(seed: int, size_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


def fail_flush() -> None:
    raise AssertionError("there was room")


def put(store: ValueStore, values: dict[int, bytes]) -> None:
    placed = store.place([len(data) for data in values.values()], flush=fail_flush)
    store.write(placed, list(values.values()))
    for (block_id, data), runs in zip(values.items(), placed, strict=True):
        store.placements.publish(block_id, Placement(xxhash.xxh3_64_intdigest(data), runs))


def get(store: ValueStore, sizes: dict[int, int]) -> list[bytes | Exception]:
    number = store.placements.begin_read()
    reads = []
    for block_id, size_bytes in sizes.items():
        placement = store.placements.find(block_id)
        assert placement is not None
        reads.append(ExtentRead(placement, memoryview(bytearray(size_bytes))))
    store.read(reads)
    store.placements.end_read(number)
    return [read.error or bytes(read.buffer) for read in reads]


@pytest.mark.parametrize("sync", [True, False])
def test_a_batch_is_read_as_it_was_written(open_store: Callable[..., ValueStore], sync: bool) -> None:
    store = open_store(sync=sync)
    values = {number: value(number, size) for number, size in enumerate(SIZES * 3)}
    put(store, values)
    assert get(store, {number: len(data) for number, data in values.items()}) == list(values.values())
    assert get(store, {2: len(values[2])}) == [values[2]]
    padded_bytes = sum(-(-len(data) // PAGE_BYTES) * PAGE_BYTES for data in values.values())
    assert store.written_bytes == padded_bytes


def test_the_file_grows_by_segments_and_not_beyond_its_bound(open_store: Callable[..., ValueStore], tmp_path: Path) -> None:
    store = open_store(8 * MIB)
    assert (tmp_path / "values").stat().st_size == 0
    store.place([5000], flush=fail_flush)
    assert (tmp_path / "values").stat().st_size == MIN_SEGMENT_BYTES
    store.place([3 * MIB], flush=fail_flush)
    assert (tmp_path / "values").stat().st_size == 4 * MIB
    store.place([6 * MIB - 8192], flush=fail_flush)
    assert (tmp_path / "values").stat().st_size <= 10 * MIB
    with pytest.raises(TierFull, match="the value file has no more"):
        store.place([MIB + 4096], flush=lambda: None)


def test_full_disk_error_names_file_and_remedy(open_store: Callable[..., ValueStore], tmp_path: Path) -> None:
    store = open_store(8 * MIB)
    store.place([5000], flush=fail_flush)
    with file_size_limit(MIN_SEGMENT_BYTES), pytest.raises(TierFull) as full:
        store.place([MIN_SEGMENT_BYTES], flush=lambda: None)
    assert (
        str(full.value) == f"{tmp_path}/values cannot grow beyond 1 MiB: File too large: free space there, or give the tier a smaller size"
    )


def test_without_room_deletions_are_flushed_and_pieces_are_taken(open_store: Callable[..., ValueStore]) -> None:
    store = open_store(8 * MIB)
    blocks = dict.fromkeys(range(10), MIB)
    put(store, {number: value(number, size) for number, size in blocks.items()})
    flushed: list[int] = []

    def flush() -> None:
        flushed.append(1)
        store.placements.release([1, 3, 5])

    [first, second] = store.place([MIB, 2 * MIB], flush=flush)
    assert len(flushed) == 2
    assert (len(first), len(second)) == (1, 2)
    with pytest.raises(TierFull):
        store.place([4096], flush=flush)
    store.discard([first, second])
    store.placements.check_integrity()


def test_a_write_does_not_wait_for_ever(open_store: Callable[..., ValueStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_store, "RELEASE_WAIT_S", 0.01)
    store = open_store(4 * MIB)
    put(store, {number: value(number, MIB) for number in range(5)})
    number = store.placements.begin_read()
    with pytest.raises(TierFull):
        store.place([MIB], flush=lambda: store.placements.release([0]))
    store.placements.end_read(number)


def test_a_disk_without_space_for_a_segment_grows_by_the_value(
    open_store: Callable[..., ValueStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    with monkeypatch.context() as patch:
        refuse(patch, "posix_fallocate", errno.ENOSPC, lambda _file, _begin, length: length > 8192)
        [runs] = store.place([8192], flush=fail_flush)
        with pytest.raises(TierFull):
            store.place([8193], flush=lambda: None)
    assert runs == (PageRun(0, 2),)
    store.place([8193], flush=fail_flush)


def test_a_device_that_fails_for_a_moment_is_written_again(open_store: Callable[..., ValueStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    failures = [1, 2]
    refuse(monkeypatch, "pwritev", errno.EIO, lambda *_: bool(failures and failures.pop()))
    put(store, {1: value(1, 5000), 2: value(2, DIRECT_BYTES)})
    assert get(store, {1: 5000, 2: DIRECT_BYTES}) == [value(1, 5000), value(2, DIRECT_BYTES)]
    assert store.failure == ""


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_device_that_fails_each_time_is_out_of_order(
    open_store: Callable[..., ValueStore], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = open_store()
    refuse(monkeypatch, call, errno.EIO)
    with pytest.raises(TierFailed, match="Input/output error"):
        put(store, {1: value(1, 5000), 2: value(2, DIRECT_BYTES)})
    assert store.failure.startswith("out of order: ")


def test_a_smaller_capacity_gives_back_what_no_value_has(open_store: Callable[..., ValueStore], tmp_path: Path) -> None:
    store = open_store()
    put(store, {number: value(number, MIB) for number in range(10)})
    seventh = store.placements.find(6)
    assert seventh is not None
    store.close()
    again = ValueStore(tmp_path / "values", capacity_bytes=4 * MIB, sync=True)
    assert again.restore([(6, seventh)]) == set()
    assert (tmp_path / "values").stat().st_size == 7 * MIB
    assert get(again, {6: MIB}) == [value(6, MIB)]
    again.close()


def test_closing_waits_for_reads_but_not_for_ever(open_store: Callable[..., ValueStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_store, "CLOSE_WAIT_S", 0.01)
    store = open_store()
    put(store, {1: value(1, 5000)})
    number = store.placements.begin_read()
    store.close()
    placement = store.placements.find(1)
    assert placement is not None
    read = ExtentRead(placement, memoryview(bytearray(5000)))
    store.read([read])
    assert read.error is None
    store.placements.end_read(number)
    store.close()
    with pytest.raises(Closed):
        store.placements.begin_read()
