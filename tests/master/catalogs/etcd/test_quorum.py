"""Tests of quorum.py, with a real etcd of three members."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.master.catalogs.etcd.channel import EtcdAccess
from kvstore.master.catalogs.etcd.quorum import EtcdQuorum, outage_of
from kvstore.testing.transfer.awaited import eventually
from tests.etcd_cluster import EtcdCluster

MEANWHILE = "; reads continue, puts are not confirmed"


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([True, None, None], ""),
        ([False, True, True], ""),
        ([False, None, None], f"etcd has no quorum: 1 of 3 answers{MEANWHILE}"),
        ([False, False, None, None], f"etcd has no quorum: 2 of 4 answer{MEANWHILE}"),
        ([False, False, None], f"etcd has no leader: 2 of 3 answer{MEANWHILE}"),
        ([False], f"etcd has no leader: 1 of 1 answers{MEANWHILE}"),
        ([None, None, None], f"etcd does not answer: 0 of 3 members can be reached{MEANWHILE}"),
        ([None], f"etcd does not answer at e0:2379{MEANWHILE}"),
    ],
)
def test_what_etcd_lacks_is_one_sentence(answers: list[bool | None], told: str) -> None:
    assert outage_of({f"e{index}:2379": answer for index, answer in enumerate(answers)}) == told


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path, syncs=False)
    cluster.start()
    yield cluster
    cluster.remove()


@pytest.mark.promise("etcd-outage")
def test_members_that_die_and_come_back_are_counted(etcd: EtcdCluster) -> None:
    quorum = EtcdQuorum([member.host_port for member in etcd.members], EtcdAccess(user="nobody", password="none"))
    try:
        eventually(lambda: not quorum.outage(), "all is well, and a login is not tried")
        etcd.members[0].kill()
        eventually(lambda: not quorum.outage(), "two of three elect a leader")
        etcd.members[1].kill()
        eventually(lambda: quorum.outage() == f"etcd has no quorum: 1 of 3 answers{MEANWHILE}", "the last one has lost its leader")
        etcd.members[2].kill()
        eventually(lambda: quorum.outage() == f"etcd does not answer: 0 of 3 members can be reached{MEANWHILE}", "none answers")
        etcd.start(etcd.members)
        eventually(lambda: not quorum.outage(), "all is well again")
    finally:
        quorum.close()
