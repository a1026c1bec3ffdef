"""Three masters over an etcd of three members: what becomes of it while members die and come back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.errors import Retry
from tests.etcd_cluster import EtcdCluster
from tests.system.running import PATIENT_S, System

FLAGS = ("--lease-ttl-s", "10")
"""A machine that does much else does not end it."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path)
    cluster.start()
    yield cluster
    cluster.remove()


@pytest.fixture
def system(tmp_path: Path, etcd: EtcdCluster) -> Iterator[System]:
    with System(tmp_path / "system", etcd.url, masters=3) as system:
        for index in range(3):
            system.start_master(index, *FLAGS)
        for name in ("n0", "n1"):
            system.start_node(name, "--dram", "32MiB")
        yield system


def test_each_member_may_die_as_long_as_the_others_live(etcd: EtcdCluster, system: System) -> None:
    with system.client(deadline_s=PATIENT_S) as client:
        for index, member in enumerate(etcd.members):
            member.kill()
            assert client.put(b"while %d is dead" % index, b"value", ack="cluster")
            etcd.start([member])
        assert all(client.exists_batch([b"while %d is dead" % index for index in range(len(etcd.members))]))


def test_without_a_majority_reads_go_on_and_puts_wait_for_it(etcd: EtcdCluster, system: System) -> None:
    with system.client(deadline_s=PATIENT_S) as client:
        assert client.put(b"before", b"value", ack="cluster")
        for member in etcd.members[:2]:
            member.kill()
        assert client.get(b"before") == b"value"
        with pytest.raises(Retry):
            client.put(b"without", b"value", ack="cluster", deadline_s=1)
        etcd.start(etcd.members[:2])
        assert client.put(b"after", b"value", ack="cluster")
        assert client.get(b"before") == b"value"
