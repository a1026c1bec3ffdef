"""Headers and small values in a real LMDB: what is put is scanned and read; what is damaged fails alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash

from kvstore.protocol.errors import ChecksumMismatch, TierFailed
from kvstore.tiers import lmdb_records
from kvstore.tiers.lmdb_records import LmdbRead, LmdbRecords, ValueHeader, key_of, pack_header, unpack_header
from kvstore.tiers.nvme_env import Environment, begin_transaction
from kvstore.tiers.placements import PageRun

LARGE = ValueHeader(5000, 1, (PageRun(3, 5),), b"large")

KEY = (7).to_bytes(8)

HEADERS = [
    ValueHeader(10, (1 << 64) - 1, (), b""),
    ValueHeader(5000, 1, (PageRun(3, 5),), b"tag"),
    ValueHeader(1 << 30, 0, (PageRun(1 << 40, (1 << 40) + 7), PageRun(0, 1)), bytes(range(256))),
]


class Store:
    """An environment with records in it; a reading transaction fails once where `failure` is set."""

    def __init__(self, folder: Path) -> None:
        self.failure: Exception | None = None
        self.environment = Environment(folder, capacity_bytes=1 << 20, sync=False, begin=self.begin)
        self.records = LmdbRecords(self.environment)

    @contextmanager
    def begin(self, environment: lmdb.Environment, write: bool) -> Iterator[Any]:
        with begin_transaction(environment, write) as transaction:
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
            yield transaction

    def put(self, block_id: int, header: ValueHeader, data: bytes = b"") -> None:
        self.environment.write(lambda transaction: self.records.put(transaction, block_id, header, data))

    def put_value(self, block_id: int, data: bytes) -> ValueHeader:
        header = ValueHeader(len(data), xxhash.xxh3_64_intdigest(data), (), b"tag-%d" % block_id)
        self.put(block_id, header, data)
        return header

    def read(self, *sizes: tuple[int, int]) -> list[Exception | bytes]:
        buffers = [bytearray(size_bytes) for _, size_bytes in sizes]
        reads = [LmdbRead(block_id, memoryview(buffer)) for (block_id, _), buffer in zip(sizes, buffers, strict=True)]
        return [answer or bytes(buffer) for answer, buffer in zip(self.records.read(reads), buffers, strict=True)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "nvme")
    yield store
    store.environment.close()


def test_headers_are_scanned_in_order_and_in_chunks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_records, "SCAN_CHUNK", 2)
    assert (store.records.newest_key(), list(store.records.scan())) == (None, [])
    headers = {number: store.put_value(number, b"value") for number in (7, 1, 256)} | {3: LARGE}
    store.put(3, LARGE)
    expected = [(key_of(number), headers[number]) for number in sorted(headers)]
    assert list(store.records.scan()) == expected
    assert list(store.records.scan_newest()) == expected[::-1]
    assert store.records.newest_key() == key_of(256)


def test_damaged_values_fail_and_their_neighbours_do_not(store: Store) -> None:
    for number in range(4):
        store.put_value(number, b"value")

    def damage(transaction: Any) -> None:
        transaction.put(key_of(0), b"valuf", db=store.environment.values)
        transaction.put(key_of(1), b"short"[:4], db=store.environment.values)
        transaction.put(key_of(2), b"not a header at all", db=store.environment.headers)

    store.environment.write(damage)
    found = store.read((0, 5), (1, 5), (2, 5), (3, 5))
    assert [type(answer) for answer in found] == [ChecksumMismatch] * 3 + [bytes]
    assert [header is None for _, header in store.records.scan()] == [False, False, True, False]


def test_a_damaged_page_fails_one_read_and_the_others_go_on(store: Store) -> None:
    for number in range(3):
        store.put_value(number, b"value")
    store.failure = lmdb.CorruptedError("damaged page")
    assert [type(answer) for answer in store.read((0, 5), (1, 5), (2, 5))] == [TierFailed, bytes, bytes]


@pytest.mark.parametrize("header", HEADERS)
def test_header_is_unpacked_as_it_was_packed(header: ValueHeader) -> None:
    assert unpack_header(KEY, pack_header(KEY, header)) == header


@pytest.mark.parametrize("header", HEADERS)
def test_header_with_any_bit_flipped_is_refused(header: ValueHeader) -> None:
    packed = pack_header(KEY, header)
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack_header(KEY, bytes(damaged)) is None
    assert unpack_header((8).to_bytes(8), packed) is None
