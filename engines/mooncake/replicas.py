"""Mooncake's calls that describe replicas of objects, and the names of its copy and move tasks.

No call here returns a task: the store replicates on its own policy.
"""

from dataclasses import dataclass
from enum import Enum

from kvstore.client.connections.locations import Location
from kvstore.engines.mooncake.arguments import Text, Texts
from kvstore.engines.mooncake.link import StoreConnection


class ReplicaStatus(Enum):
    """State of a replica. Calls here return complete replicas only."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(slots=True)
class Descriptor:
    """Memory of a replica. The address is always 0: nodes do not expose it."""

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""

    def __repr__(self) -> str:
        return f"<Descriptor size={self.size} buffer_address={self.buffer_address} transport_endpoint={self.transport_endpoint}>"


@dataclass(slots=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor


@dataclass(slots=True)
class DiskDescriptor:
    """A replica in a shared file system. No object has one here."""

    file_path: str
    object_size: int


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """Replica of an object on one node."""

    _location: Location
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Return whether the node has it in DRAM or HBM."""
        return bool({"dram", "hbm"} & set(self._location.tiers))

    def is_disk_replica(self) -> bool:
        """Return False: no file system is shared."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Return whether the node has it in NVMe only."""
        return not self.is_memory_replica()

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(Descriptor(self._location.size_bytes, transport_endpoint=self._location.node))

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Raises RuntimeError: no replica is in a shared file system."""
        raise RuntimeError("Expected DiskDescriptor")


class Replicas(StoreConnection):
    """Calls that list replicas. [] for an object that does not exist."""

    def get_replica_desc(self, key: Text) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Texts) -> dict[str, list[ReplicaDescriptor]]:
        """Return the replicas of each object; missing objects are left out."""
        found = self._value(lambda client: client.locate(self._keys(keys))) or [[] for _ in keys]
        return {key: [ReplicaDescriptor(place) for place in places] for key, places in zip(keys, found, strict=True) if places}


class TaskType(Enum):
    """Kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(Enum):
    """State of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@dataclass(slots=True)
class QueryTaskResponse:
    """A task as `query_task` reports it."""

    id: tuple[int, int] = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = 0
    assigned_client: tuple[int, int] = (0, 0)
    message: str = ""
