"""`mooncake.store` over kvstore: the names that programs written for Mooncake import from it.

`MooncakeDistributedStore` has Mooncake's calls with their arguments and results. What is left out, so that asking for it is an error at
once and not a surprise: segments and their mounting (memory is the nodes'), copy and move tasks, `batch_replica_clear`, the layouts of
TensorParallelism, BufferPool and the Engram store.
"""

from kvstore.engines.mooncake.config import ObjectDataType, ReplicateConfig, SoftPinAction
from kvstore.engines.mooncake.gets import BufferHandle
from kvstore.engines.mooncake.host_memory import MooncakeHostMemAllocator
from kvstore.engines.mooncake.removals import Removals
from kvstore.engines.mooncake.replicas import Replicas, ReplicaStatus
from kvstore.engines.mooncake.sessions import Sessions
from kvstore.engines.mooncake.tensors import Tensors

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]


class MooncakeDistributedStore(Sessions, Tensors, Removals, Replicas):
    """A client of a kvstore cluster. Threads may share it. `setup` first: until then calls give codes, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = MooncakeHostMemAllocator()

    def alloc_from_mem_pool(self, size: int) -> int:
        """Memory of this process: its address, 0 if there is none. It goes with the store."""
        return self._pool.alloc(size)
