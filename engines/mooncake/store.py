"""`mooncake.store` over kvstore: the names that programs written for Mooncake import from it.

`MooncakeDistributedStore` has Mooncake's calls with their arguments and results. A name that is left out is an error at once:
segments and their mounting (memory is the nodes'), copy and move tasks, `batch_replica_clear`, the layouts of TensorParallelism,
BufferPool and the Engram store.

Pools of engines that let the store allocate them are memory of this process, asked for by size and named by its address.
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
    """Whole pages, zeros at first. Thread-safe. What is not freed goes with the allocator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[mmap.mmap, ctypes.Array[ctypes.c_char]]] = {}

    def alloc(self, size: int) -> int:
        """An address, 0 if there is no memory."""
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
        """0; -1 for what was not allocated here. Nothing may use the memory any more."""
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
"""Members of enumerations that Mooncake's module has as names of its own. Of two with one name the later one counts, as there."""
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
    """A client of a kvstore cluster. Threads may share it. `setup` first: until then calls return codes, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = MooncakeHostMemAllocator()

    def alloc_from_mem_pool(self, size: Number, /) -> int:
        """Return the address of memory of this process, 0 if there is none. It is freed with the store."""
        return self._pool.alloc(size)


def _tensor_metadata_size() -> int:
    """Bytes of the header of a tensor's object."""
    return HEADER_BYTES
