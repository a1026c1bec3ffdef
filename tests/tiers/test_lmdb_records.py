"""Headers and small values in a real LMDB: what is put is scanned and read; what is damaged fails alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash

from kvstore.protocol.errors import ChecksumMismatch, StaleHandle, TierFailed
from kvstore.tiers import lmdb_records
from kvstore.tiers.lmdb_records import Header, LmdbRead, LmdbRecords, key_of
from kvstore.tiers.nvme_env import Environment, begin_transaction
from kvstore.tiers.placements import Run

LARGE = Header(5000, 1, (Run(3, 5),), b"large")


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

    def put(self, block_id: int, header: Header, data: bytes = b"") -> None:
        self.environment.write(lambda transaction: self.records.put(transaction, block_id, header, data))

    def put_value(self, block_id: int, data: bytes) -> Header:
        header = Header(len(data), xxhash.xxh3_64_intdigest(data), (), b"tag-%d" % block_id)
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


def test_small_values_are_read_as_they_were_put(store: Store) -> None:
    store.put_value(1, b"one")
    store.put_value(2, b"two!")
    assert store.read((2, 4), (1, 3)) == [b"two!", b"one"]
    assert store.read() == []


def test_headers_are_scanned_in_order_and_in_chunks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_records, "SCAN_CHUNK", 2)
    assert (store.records.newest_key(), list(store.records.scan())) == (None, [])
    headers = {number: store.put_value(number, b"value") for number in (7, 1, 256)} | {3: LARGE}
    store.put(3, LARGE)
    expected = [(key_of(number), headers[number]) for number in sorted(headers)]
    assert list(store.records.scan()) == expected
    assert list(store.records.scan_newest()) == expected[::-1]
    assert store.records.newest_key() == key_of(256)


def test_deleted_values_are_gone_from_both_databases(store: Store) -> None:
    store.put_value(1, b"one")
    store.put(2, LARGE)

    def delete(transaction: Any) -> None:
        for key in (key_of(1), key_of(2)):
            store.records.delete(transaction, key)

    store.environment.write(delete)
    assert list(store.records.scan()) == []
    assert isinstance(store.read((1, 3))[0], StaleHandle)


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


def test_a_value_in_extents_is_not_read_here(store: Store) -> None:
    store.put(2, LARGE)
    assert isinstance(store.read((2, 5000))[0], ChecksumMismatch)


def test_a_damaged_page_fails_one_read_and_the_others_go_on(store: Store) -> None:
    for number in range(3):
        store.put_value(number, b"value")
    store.failure = lmdb.CorruptedError("damaged page")
    assert [type(answer) for answer in store.read((0, 5), (1, 5), (2, 5))] == [TierFailed, bytes, bytes]
