"""Promises of both sides of a writer's page (store/puts/ahead.py, client/local/writer_page.py): a slot is written or taken back."""

import os
import select
import time
from collections.abc import Iterator

import pytest

from kvstore.client.local.writer_page import OfferedSlot
from kvstore.protocol.errors import Broken, TierFailed
from kvstore.protocol.writer_page import PAGE_BYTES
from kvstore.store.puts.ahead import WriterPage, make_page

KEPT, MOST_S = 1_000, 10.0
"""It ends once a slot that was being written was in the way so often."""
Sides = tuple[WriterPage, OfferedSlot]


@pytest.fixture
def sides() -> Iterator[Sides]:
    """The node's and the client's."""
    page, fd = make_page()
    try:
        yield page, OfferedSlot(fd, PAGE_BYTES)
    finally:
        os.close(fd)


def test_a_slot_that_is_offered_can_be_written_by_its_size(sides: Sides) -> None:
    page, offered = sides
    assert offered.enter(100) is None
    page.offer(7, 3, 4096, 100)
    assert not offered.has(99)
    assert offered.enter(99) is None
    assert offered.has(100)
    assert offered.enter(100) == (7, 3, 4096)
    page.clear()
    assert offered.enter(100) is None


def test_it_is_taken_back_unless_it_is_being_written(sides: Sides) -> None:
    page, offered = sides
    page.offer(7, 3, 4096, 100)
    assert offered.enter(100)
    assert not page.withdraw(7)
    assert offered.has(100), "it stays offered"
    offered.leave()
    assert page.withdraw(7)
    assert offered.enter(100) is None


def test_a_slot_that_was_written_before_does_not_keep_the_next_one(sides: Sides) -> None:
    page, offered = sides
    page.offer(7, 3, 4096, 100)
    assert offered.enter(100)
    page.offer(8, 3, 8192, 100)
    assert page.withdraw(8)


def test_slabs_to_be_mapped_are_told_once(sides: Sides) -> None:
    page, offered = sides
    assert offered.new_slabs_ahead() == []
    page.offer(7, 3, 4096, 100, [0, 4, 5])
    page.offer(8, 3, 8192, 100)
    assert offered.new_slabs_ahead() == [0, 4]
    assert offered.new_slabs_ahead() == []
    page.offer(9, 4, 0, 100, [5])
    assert 5 in offered.new_slabs_ahead()


def test_what_is_no_page_is_refused() -> None:
    fd = os.memfd_create("other")
    try:
        os.ftruncate(fd, 2 * PAGE_BYTES)
        for size in (PAGE_BYTES, 2 * PAGE_BYTES):
            with pytest.raises(Broken):
                OfferedSlot(fd, size)
    finally:
        os.close(fd)


def test_a_system_without_memory_or_descriptors_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    for name in ("memfd_create", "ftruncate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(TierFailed, match="Too many open files"):
                make_page()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_slot_is_written_that_was_taken_back(sides: Sides) -> None:
    """Two processes at once. The writer leaves the number of the slot that it writes in memory of their own; who takes a slot back finds
    that word empty."""
    page, offered = sides
    reader, writer = os.pipe()
    shared_fd = os.memfd_create("shared")
    os.ftruncate(shared_fd, 4096)
    child = os.fork()
    if not child:
        os.close(writer)
        os._exit(_write_slots(offered, shared_fd, reader))
    os.close(reader)
    wrong, kept, number, until_s = 0, 0, 0, time.monotonic() + MOST_S
    with os.fdopen(writer, "wb"):
        while kept < KEPT and time.monotonic() < until_s:
            number += 1
            page.offer(number, 0, 0, 100)
            for _ in range(number % 30):  # now sooner, now later
                os.pread(shared_fd, 8, 0)
            kept += not page.withdraw(number)
            while not page.withdraw(number):
                os.sched_yield()
            for _ in range(10):  # nor is one begun to be written later
                wrong += bool(int.from_bytes(os.pread(shared_fd, 8, 0), "little"))
    _, status = os.waitpid(child, 0)
    os.close(shared_fd)
    assert os.waitstatus_to_exitcode(status) == 0, "nothing was ever written"
    assert kept
    assert not wrong


def _write_slots(offered: OfferedSlot, shared_fd: int, until_closed: int) -> int:
    """The writer's process: 0 if it has written some, once the pipe is closed."""
    written = 0
    while not select.select([until_closed], (), (), 0)[0]:
        entered = offered.enter(100)
        if entered is not None:
            os.pwrite(shared_fd, entered[0].to_bytes(8, "little"), 0)
            written += 1
            os.pwrite(shared_fd, bytes(8), 0)
            offered.leave()
    return 0 if written else 1
