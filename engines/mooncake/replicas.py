"""Where objects are, in Mooncake's terms."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.client.locations import Location
from kvstore.engines.mooncake.link import Link


class ReplicaStatus(Enum):
    """What a replica is good for. Those that are told of here are complete."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A replica's memory; its address is the node's own affair."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    buffer_descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One node that has an object."""

    location: Location
    status: ReplicaStatus = field(default=ReplicaStatus.COMPLETE)

    def is_memory_replica(self) -> bool:
        """It lies in DRAM or HBM."""
        return bool({"dram", "hbm"} & set(self.location.tiers))

    def is_disk_replica(self) -> bool:
        """It lies in a file system that all nodes share; there are none."""
        return False

    def is_local_disk_replica(self) -> bool:
        """It lies in the node's NVMe alone."""
        return not self.is_memory_replica()

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(Descriptor(self.location.size_bytes, self.location.node))


class Replicas(Link):
    """[] for an object that is not there."""

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key])[key]

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        found = self._value(lambda client: client.locate(self._keys(keys))) or [[] for _ in keys]
        return {key: [ReplicaDescriptor(location) for location in places] for key, places in zip(keys, found, strict=True)}
