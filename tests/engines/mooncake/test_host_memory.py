"""Memory by its address."""

import ctypes

from kvstore.engines.mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator


def test_memory_is_zeros_writable_and_given_back_once() -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(10_000)
    assert ctypes.string_at(address, 10_000) == bytes(10_000)
    ctypes.memset(address, 7, 10_000)
    assert ctypes.string_at(address + 9_999, 1) == b"\7"
    assert (allocator.free(address), allocator.free(address)) == (0, -1)


def test_no_memory_is_no_address() -> None:
    assert [MooncakeHostMemAllocator().alloc(size) for size in (0, -1, 1 << 62, 1 << 80)] == [0] * 4


def test_a_stores_pool_holds_values(store: MooncakeDistributedStore) -> None:
    address = store.alloc_from_mem_pool(4096)
    ctypes.memset(address, 5, 4096)
    assert (store.register_buffer(address, 4096), store.put_from("key", address, 4096)) == (0, 0)
    assert store.get("key") == b"\5" * 4096
