"""Promises of memcpy.py."""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from queue import SimpleQueue

import pytest
import xxhash

from kvstore.rpc.gil_contention import FIRST_HELD, LATE_NS
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.memory import memcpy
from kvstore.transfer.memory.memcpy import (
    COPY_BYTES,
    FREE,
    HASH_HELD,
    HELD,
    HELD_BYTES,
    PARALLEL_BYTES,
    PART_BYTES,
    CopyMode,
    Gather,
    MemcpyPool,
    gather_and_sum_all,
)


@pytest.fixture(params=[1, 2, 3, 0, "beside a thread that computes"])
def copier(request: pytest.FixtureRequest) -> Iterator[MemcpyPool]:
    is_held = isinstance(request.param, str)
    found = MemcpyPool(1 if is_held else request.param)
    if is_held:
        found.gil.copied(LATE_NS)
    yield found
    found.close()


def test_the_caller_copies_alone_until_threads_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    copier = MemcpyPool(2)
    source = os.urandom(PARALLEL_BYTES)
    half = PARALLEL_BYTES // 2
    for can_start in (False, True):
        destination = bytearray(PARALLEL_BYTES)
        with monkeypatch.context() as patch:
            if not can_start:
                patch.setattr(memcpy, "begin_thread", no_thread)
            copier.copy([(memoryview(destination)[at : at + half], memoryview(source)[at : at + half]) for at in (0, half)])
        assert destination == source
        if not can_start:
            assert copier._helpers._calls.empty(), "what nobody will take is not kept"
    eventually(lambda: copier._helpers._running == 1, "a helper is there")
    copier.close()


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
            assert copier.gather_and_sum([(to, (of,)) for to, of in pairs]) == list(map(xxhash.xxh3_64_intdigest, sources))
        else:
            copier.copy(pairs)
        assert destinations == sources


@pytest.mark.parametrize("size", [10, COPY_BYTES + 7, PARALLEL_BYTES])
def test_gather_and_sum_hashes_whole_values(copier: MemcpyPool, size: int) -> None:
    sources = [os.urandom(size) for _ in range(3)]
    destinations = [bytearray(size) for _ in sources]
    cuts = ([0, 1, size // 2, size], [0, size], [0, size - 3, size - 3, size])
    gathers = [
        (memoryview(to), [memoryview(of)[begin:end] for begin, end in pairwise(cut)])
        for to, of, cut in zip(destinations, sources, cuts, strict=True)
    ]
    assert copier.gather_and_sum(gathers) == list(map(xxhash.xxh3_64_intdigest, sources))
    assert destinations == sources


@pytest.mark.parametrize("size", [10, COPY_BYTES + 7, PART_BYTES + 7, PARALLEL_BYTES])
def test_values_are_scattered_over_their_parts(copier: MemcpyPool, size: int) -> None:
    values = [os.urandom(size) for _ in range(3)]
    rooms = [bytearray(size) for _ in values]
    ends = [(size,), (size // 3, size), (1, size - 1, size)]
    scatters = [
        (memoryview(value), [memoryview(room)[begin:end] for begin, end in pairwise((0, *of_one))])
        for value, room, of_one in zip(values, rooms, ends, strict=True)
    ]
    copier.scatter(scatters)
    assert rooms == values


@pytest.mark.parametrize("rows", [1, 5, PARALLEL_BYTES // 1000 + 7])
def test_every_row_is_copied_and_summed_in_order(copier: MemcpyPool, rows: int) -> None:
    sources = [os.urandom(1000 * count) for count in (rows, 1, 3)]
    destinations = [bytearray(len(source)) for source in sources]
    pairs = [(memoryview(to), memoryview(of)) for to, of in zip(destinations, sources, strict=True)]
    every = [source[at : at + 1000] for source in sources for at in range(0, len(source), 1000)]
    assert copier.copy_and_sum_rows(pairs, 1000) == [xxhash.xxh3_64_intdigest(row) for row in every]
    assert destinations == sources


def test_an_error_in_another_thread_reaches_the_caller() -> None:
    copier = MemcpyPool(2)
    half = memoryview(bytes(PARALLEL_BYTES))
    good, bad = (memoryview(bytearray(PARALLEL_BYTES)), half), (memoryview(bytearray(1)), half)
    with pytest.raises(ValueError, match="broadcast"):
        copier.copy([good, bad])
    copier.close()
    copier.close()


def test_closed_pool_threads_take_no_part_of_a_later_copy() -> None:
    pairs = [(memoryview(bytearray(PARALLEL_BYTES)), memoryview(os.urandom(PARALLEL_BYTES))) for _ in range(3)]

    def use() -> "weakref.ref[object]":
        copier = MemcpyPool(3)
        copier.copy(pairs)
        eventually(lambda: copier._helpers._running == 2, "both threads")
        copier.close()
        copier.copy(pairs)
        return weakref.ref(copier._helpers)

    helpers = use()
    assert all(bytes(to) == of for to, of in pairs)
    eventually(lambda: helpers() is None, "the end of the threads, which hold it")


@pytest.mark.promise("interrupts-safe")
def test_no_thread_writes_after_an_interrupted_copy() -> None:
    command = [sys.executable, "-m", "tests.transfer.memory.struck_copies", "400"]
    found = subprocess.run(command, stdout=subprocess.PIPE, timeout=100, check=True)
    signals, written, wrong = json.loads(found.stdout)
    assert signals >= 400
    assert (written, wrong) == (0, 0)


@pytest.mark.parametrize(("size", "expected"), [(COPY_BYTES, HELD), (HELD_BYTES, HELD), (HELD_BYTES + 1, HASH_HELD)])
def test_after_a_late_copy_the_next_ones_keep_the_gil(size: int, expected: CopyMode) -> None:
    copier, source, destination = MemcpyPool(1), os.urandom(size), bytearray(size)
    ways: list[CopyMode] = []

    def work(gathers: Sequence[Gather], mode: CopyMode = FREE) -> list[int]:
        ways.append(mode)
        return gather_and_sum_all(gathers, mode)

    copier.gil.copied(LATE_NS)
    for _ in range(FIRST_HELD + 1):
        assert copier._spread(work, [(memoryview(destination), [memoryview(source)])]) == [[xxhash.xxh3_64_intdigest(source)]]
    assert ways == [expected] * FIRST_HELD + [FREE]
    assert destination == source


def test_what_keeps_the_gil_lets_no_other_thread_run() -> None:
    """Another thread has a turn when it gets the GIL. It never takes it: the switch interval is longer than the test."""
    calls, turns = SimpleQueue[bool](), list[bool]()
    source = memoryview(bytes(8 * HELD_BYTES))  # so much that the other thread wakes up meanwhile
    destination = memoryview(bytearray(len(source)))

    def take_turns() -> None:
        while calls.get():
            turns.append(True)

    def lets_go(call: Callable[[], object]) -> bool:
        calls.put(True)
        before = len(turns)
        call()
        return len(turns) > before

    held: list[Callable[[], object]] = [
        lambda: HELD.copy(destination, source),
        lambda: HELD.checksum(source),
        lambda: HELD.update(xxhash.xxh3_64(), source),
    ]
    interval_s, other = sys.getswitchinterval(), threading.Thread(target=take_turns)
    sys.setswitchinterval(1000)
    try:
        other.start()
        assert not any(lets_go(call) for call in held * 8)
        eventually(lambda: lets_go(lambda: FREE.copy(destination, source)), "a turn while the GIL is let go of")
    finally:
        calls.put(False)
        sys.setswitchinterval(interval_s)
        other.join()
