"""Promises of memcpy.py."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from kvstore.transfer.memory.memcpy import COPY_BYTES, PARALLEL_BYTES, MemcpyPool, copy


@pytest.fixture(params=[1, 2, 3, 0])
def copier(request: pytest.FixtureRequest) -> Iterator[MemcpyPool]:
    found = MemcpyPool(request.param)
    yield found
    found.close()


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [10, 20, 30],
        [PARALLEL_BYTES],
        [PARALLEL_BYTES // 4] * 9,
        [PARALLEL_BYTES, 1, 1, 1],
        [1, 1, 1, PARALLEL_BYTES],
    ],
)
def test_every_value_is_copied_and_summed_in_order(copier: MemcpyPool, sizes: list[int]) -> None:
    sources = [os.urandom(size) for size in sizes]
    for with_sums in (False, True):
        destinations = [bytearray(size) for size in sizes]
        pairs = [(memoryview(to), memoryview(of)) for to, of in zip(destinations, sources, strict=True)]
        if with_sums:
            assert copier.copy_and_sum(pairs) == [xxhash.xxh3_64_intdigest(source) for source in sources]
        else:
            copier.copy(pairs)
        assert destinations == sources


def test_nothing_to_copy_is_no_error(copier: MemcpyPool) -> None:
    copier.copy([])
    assert copier.copy_and_sum([]) == []


def test_an_error_in_another_thread_reaches_the_caller() -> None:
    copier = MemcpyPool(2)
    half = memoryview(bytes(PARALLEL_BYTES))
    good, bad = (memoryview(bytearray(PARALLEL_BYTES)), half), (memoryview(bytearray(1)), half)
    with pytest.raises(ValueError, match="broadcast"):
        copier.copy([good, bad])
    copier.close()
    copier.close()


@pytest.mark.parametrize("size", [0, 1, COPY_BYTES - 1, COPY_BYTES, 1 << 20])
def test_copy(size: int) -> None:
    source = os.urandom(size)
    destination = bytearray(size)
    copy(memoryview(destination), memoryview(source))
    assert destination == source
