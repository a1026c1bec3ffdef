"""`mooncake.store` over kvstore: the names that programs written for Mooncake import from it.

`MooncakeDistributedStore` has Mooncake's calls with their arguments and results. Missing on purpose, so that their use
fails at once: segments and their mounting (nodes own the memory), copy and move tasks, `batch_replica_clear`, the
layouts of TensorParallelism, BufferPool and the Engram store.
"""

import ctypes
import mmap
import threading
from typing import Final

from kvstore.engines.mooncake.arguments import Number, ObjectDataType, ReplicateConfig, SoftPinAction, arguments_converted
from kvstore.engines.mooncake.gets import BufferHandle
from kvstore.engines.mooncake.removals import ObjectRemovals
from kvstore.engines.mooncake.replicas import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    Replicas,
    ReplicaStatus,
    TaskStatus,
    TaskType,
)
from kvstore.engines.mooncake.sessions import ObjectSessions
from kvstore.engines.mooncake.tensor_values import HEADER_BYTES
from kvstore.engines.mooncake.tensor_values import deserialized as _deserialize_tensor
from kvstore.engines.mooncake.tensor_values import serialized as _serialize_tensor
from kvstore.engines.mooncake.tensors import Shards


class MooncakeHostMemAllocator:
    """Allocator of zeroed pages of this process, for engines' pools. Thread-safe. Memory that is not freed is
    released with the allocator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[mmap.mmap, ctypes.Array[ctypes.c_char]]] = {}

    def alloc(self, size: int) -> int:
        """Return an address, 0 if there is no memory."""
        try:
            pages = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        view = (ctypes.c_char * size).from_buffer(pages)
        address = ctypes.addressof(view)
        with self._lock:
            self._held[address] = pages, view
        return address

    def free(self, ptr: int) -> int:
        """Return 0; -1 for an address that was not allocated here. The memory must not be used afterwards."""
        with self._lock:
            found = self._held.pop(ptr, None)
        if found is None:
            return -1
        pages, view = found
        del found, view
        pages.close()
        return 0


MEMBERS: Final = {
    name: member for kind in (ObjectDataType, ReplicaStatus, TaskType, TaskStatus) for name, member in kind.__members__.items()
}
"""Members of enumerations that Mooncake's module also exports as names. Of equal names the later one counts, as
there."""
globals().update(MEMBERS)
__all__ = [
    "BufferHandle",
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "QueryTaskResponse",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "_deserialize_tensor",
    "_serialize_tensor",
    "_tensor_metadata_size",
]
__all__ += list(MEMBERS)


@arguments_converted
class MooncakeDistributedStore(ObjectSessions, Shards, ObjectRemovals, Replicas):
    """Mooncake's client, on a kvstore cluster. Threads may share it. Call `setup` first; before it, calls return
    codes or empty results."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = MooncakeHostMemAllocator()

    def alloc_from_mem_pool(self, size: Number, /) -> int:
        """Return the address of memory of this process, 0 if there is none. It is freed with the store."""
        return self._pool.alloc(size)


def _tensor_metadata_size() -> int:
    """Return the bytes of a tensor object's header."""
    return HEADER_BYTES
