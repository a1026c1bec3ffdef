"""Descriptions of the replicas of objects."""

import pytest

from kvstore.client.connections.locations import Location
from kvstore.engines.mooncake.replicas import Descriptor, ReplicaDescriptor, ReplicaStatus
from kvstore.engines.mooncake.store import MooncakeDistributedStore


def test_an_object_has_a_replica_in_memory(store: MooncakeDistributedStore) -> None:
    store.put("key", b"value")
    [replica] = store.get_replica_desc("key")
    assert (replica.is_memory_replica(), replica.is_disk_replica(), replica.is_local_disk_replica()) == (True, False, False)
    assert replica.status is ReplicaStatus.COMPLETE
    descriptor = replica.get_memory_descriptor().buffer_descriptor
    assert (descriptor.size, descriptor.transport_endpoint) == (5, "n0")
    assert store.batch_get_replica_desc(["nowhere", "key"]) == {"key": [replica]}


def test_one_in_nvme_alone_is_on_a_local_disk() -> None:
    replica = ReplicaDescriptor(Location("n0", 1, ("nvme",), 5, 0, 1))
    assert (replica.is_memory_replica(), replica.is_local_disk_replica()) == (False, True)
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()


def test_descriptor_has_mooncakes_text() -> None:
    assert repr(Descriptor()) == "<Descriptor size=0 buffer_address=0 transport_endpoint=>"
