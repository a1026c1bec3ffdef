"""Several masters on one etcd: after every failure of the owner another master takes over, and no acknowledged block is lost."""

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import Retry
from tests.etcd_server import EtcdServer
from tests.master.catalogs.etcd.faulty_etcd import FaultyEtcd
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until

MASTERS = 3
LEASE = ("--lease-ttl-s", "5")
"""So long that no lease ends for want of a processor."""
SIZE = 2000
PUTS = 20
"""Puts that must succeed in each case."""
PAUSE_S = 0.02
"""After each put: all the while that a lease ends, three masters and etcd would be kept busy."""


@pytest.fixture
def standing(tmp_path: Path, etcd_url: str) -> Iterator[System]:
    """Three masters on one etcd, the first of which owns the catalog, and two nodes."""
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=MASTERS) as system:
        system.start_masters(*LEASE)
        system.start_nodes("--dram", "32MiB")
        yield system


class Load(threading.Thread):
    """Puts blocks one after the other, each until it is acknowledged to be there for all, and reads those before, until it is ended."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._name = uuid.uuid4().bytes
        self._over = threading.Event()
        self.wrong: list[bytes] = []
        self.acknowledged: list[bytes] = []
        self.start()

    def run(self) -> None:
        number = 0
        while not self._over.wait(PAUSE_S):
            key = b"%b-%d" % (self._name, number)
            try:
                self._client.put(key, value_of(key, 0, SIZE))
            except Retry:  # while there is no owner, or its successor does not know the nodes yet
                continue
            self.acknowledged.append(key)
            number += 1
            with suppress(Retry):
                asked = self.acknowledged[number // 2]
                if self._client.get(asked) not in (None, value_of(asked, 0, SIZE)):
                    self.wrong.append(asked)

    def goes_on(self) -> None:
        """Wait for puts that began from now on."""
        count = len(self.acknowledged)
        until(lambda: len(self.acknowledged) > count + PUTS, "puts that succeed")

    def end(self) -> None:
        self._over.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()
        assert self.wrong == []


def owner_of(system: System, *indexes: int) -> int | None:
    """Return the index of the master that owns the catalog, or None."""
    return next((index for index in indexes if system.owned(index)), None)


def await_owner(system: System, *indexes: int) -> int:
    found: list[int] = []

    def is_owned() -> bool:
        if (owner := owner_of(system, *indexes)) is not None:
            found.append(owner)
        return bool(found)

    until(is_owned, f"one of {indexes} owns the catalog", every_s=STATUS_POLL_S)
    return found[0]


def role_of(system: System, index: int) -> str:
    told = system.status_of(index)
    return told.role if told is not None else ""


def epoch_followed(system: System, index: int) -> int | None:
    """Of the owner, as that one master knows it."""
    told = system.status_of(index)
    return told.owner.epoch if told is not None else None


def finds_all(system: System, load: Load) -> None:
    """Every client finds all that was acknowledged, once the nodes have told what they hold."""
    load.end()
    with system.client() as client, system.remote_client() as remote:
        for reader in (client, remote):
            until(lambda: all(reader.exists_batch(load.acknowledged)), "all blocks are known")  # noqa: B023
            assert reader.get_batch(load.acknowledged) == [value_of(key, 0, SIZE) for key in load.acknowledged]


@pytest.mark.promise("failover")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_failover_keeps_all_acknowledged_blocks(standing: System, how: str) -> None:
    with standing.client() as client:
        load = Load(client)
        load.goes_on()
        standing.masters[0].kill() if how == "killed" else standing.masters[0].stop()
        load.goes_on()
        second = await_owner(standing, 1, 2)
        standing.masters[second].kill() if how == "killed" else standing.masters[second].stop()
        load.goes_on()
        assert await_owner(standing, 1, 2) != second
        finds_all(standing, load)


@pytest.mark.promise("put-ack-cluster")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_put_ack_cluster_waits_for_the_next_owner(standing: System, how: str) -> None:
    with standing.client(deadline_s=DEADLINE_S) as client, standing.remote_client(deadline_s=DEADLINE_S) as remote:
        client.put(b"first", b"value", ack="cluster")
        remote.get(b"first")
        standing.masters[0].kill() if how == "killed" else standing.masters[0].stop()
        assert client.put(b"second", b"value", ack="cluster")
        assert remote.put(b"third", b"value", ack="cluster")
        await_owner(standing, 1, 2)


@pytest.mark.promise("failover")
def test_stopped_owner_is_fenced_when_it_resumes(standing: System) -> None:
    with standing.client() as client:
        load = Load(client)
        load.goes_on()
        first = standing.status_of(0)
        assert first is not None
        os.kill(standing.masters[0].pid, signal.SIGSTOP)
        load.goes_on()
        newest = await_owner(standing, 1, 2)
        os.kill(standing.masters[0].pid, signal.SIGCONT)

        until(lambda: role_of(standing, 0) == "following", "the woken one follows", every_s=STATUS_POLL_S)
        until(lambda: epoch_followed(standing, 0) == epoch_followed(standing, newest), "it follows the next one", every_s=STATUS_POLL_S)
        assert (epoch_followed(standing, newest) or 0) > first.epoch
        load.goes_on()
        assert owner_of(standing, 0) is None
        finds_all(standing, load)


@pytest.mark.promise("failover")
def test_owner_cut_off_from_etcd_is_replaced(tmp_path: Path, etcd: EtcdServer, etcd_url: str) -> None:
    prefix = uuid.uuid4()
    with FaultyEtcd(etcd) as way, System(tmp_path, f"{etcd_url}/{prefix}", masters=MASTERS) as system:
        system.start_master(0, "--catalog", f"etcd://{way.host_port}/{prefix}", *LEASE)
        for index in range(1, MASTERS):
            system.start_master(index, *LEASE)
        system.start_nodes("--dram", "32MiB")
        with system.client() as client:
            load = Load(client)
            load.goes_on()
            way.on_call = lambda _method: grpc.StatusCode.UNAVAILABLE
            way.hang_up()
            newest = await_owner(system, 1, 2)
            load.goes_on()
            until(lambda: role_of(system, 0) == "following", "it has heard of no owner, and its nodes have left it", every_s=STATUS_POLL_S)
            way.on_call = lambda _method: None
            until(lambda: epoch_followed(system, 0) == epoch_followed(system, newest), "it follows the next one", every_s=STATUS_POLL_S)
            load.goes_on()
            finds_all(system, load)


@pytest.mark.promise("failover")
def test_follower_restart_disturbs_no_client(standing: System) -> None:
    with standing.client() as client:
        load = Load(client)
        load.goes_on()
        standing.masters[1].kill()
        load.goes_on()
        assert await_owner(standing, 0) == 0
        standing.start_master(1, *LEASE)
        load.goes_on()
        again = standing.status_of(1)
        assert again is not None
        assert (again.role, again.owner.address) == ("following", f"127.0.0.1:{standing._master_ports[0][0]}")
        finds_all(standing, load)
