"""Aligned buffers: their alignment, their reuse and their bound."""

import mmap
import threading

from kvstore.tiers.value_file import AlignedBuffers, address_of
from kvstore.transfer.testing.waiting import PATIENCE_S, in_background


def test_buffers_are_aligned_and_used_again() -> None:
    buffers = AlignedBuffers(2, 8192)
    with buffers.lease() as first, buffers.lease() as second:
        addresses = {address_of(first), address_of(second)}
        assert len(addresses) == 2
        assert len(first) == 8192
        assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    with buffers.lease() as third:
        assert address_of(third) in addresses


def test_no_more_buffers_than_the_bound_are_leased() -> None:
    buffers = AlignedBuffers(1, 4096)
    has_lease = threading.Event()

    def lease() -> None:
        with buffers.lease():
            has_lease.set()

    with buffers.lease():
        waiting = in_background(lease)
        assert not has_lease.wait(0.05)
    waiting.result(PATIENCE_S)
    assert has_lease.is_set()


def test_address_is_that_of_the_first_byte() -> None:
    memory = memoryview(bytearray(100))
    assert address_of(memory[7:]) == address_of(memory) + 7
