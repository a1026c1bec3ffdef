"""Tests of owner_search.py through links: the owner is found among masters that answer anything else."""

import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.rpc.address import socket_id
from tests.master.running import master_in_thread
from tests.ports import free_ports
from tests.rpc.stub_masters import stub_masters
from tests.store.daemons import master_flags, running, status
from tests.store.linked import a_link, until


@pytest.mark.promise("right-daemon")
def test_a_unix_socket_of_another_master_is_not_used(tmp_path: Path) -> None:
    for name in ("right", "next door"):
        (tmp_path / name).mkdir()
    with master_in_thread(tmp_path / "right") as right, master_in_thread(tmp_path / "next door") as other:
        assert right.master is not None
        leading = right.master.partitions[0].role_manager.leader()
        leading.frames.reachable = replace(leading.frames.reachable, host_id=socket_id(other.unix), unix=other.unix)
        with a_link(right.listen) as (link, linked):
            link.start()
            sock, reply = linked.get(timeout=10)
            with sock:
                assert (sock.family, reply.master_epoch) == (socket.AF_INET, leading.epoch)


def test_a_doubtful_owner_is_skipped_for_another(tmp_path: Path) -> None:
    """A former owner that does not know yet that it was deposed."""
    with master_in_thread(tmp_path) as owner, stub_masters(1) as [former]:
        former.control = f"127.0.0.1:{free_ports(1)[0]}"
        with a_link(former.address, owner.listen) as (link, linked):
            link.start()
            linked.get(timeout=60)[0].close()
            assert former.hellos == 1


def test_a_doubtful_single_master_is_tried_again(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as owner, stub_masters(1) as [master]:
        master.control = f"127.0.0.1:{free_ports(1)[0]}"
        with a_link(master.address) as (link, linked):
            link.start()
            until(lambda: master.hellos > 2)
            master.owner = owner.listen
            linked.get(timeout=60)[0].close()


@pytest.mark.promise("failover")
def test_a_hanging_owner_is_replaced_once_there_is_another(tmp_path: Path) -> None:
    flags = [*master_flags(tmp_path), "--heartbeat-interval-s", "0.05", "--node-ttl-s", "3600"]
    with (
        running("master", *flags, log=tmp_path / "master.log") as master,
        master_in_thread(tmp_path / "next") as elected,
        stub_masters(1) as [follower],
    ):
        follower.owner = master.facts["listen"]
        with a_link(follower.address) as (link, linked):
            link.start()
            with linked.get(timeout=60)[0]:
                master.process.send_signal(signal.SIGSTOP)
                hellos = follower.hellos
                until(lambda: follower.hellos > hellos + 2)
                assert linked.empty()
                master.process.send_signal(signal.SIGCONT)
                before = status(master).nodes[0]
                until(lambda: status(master).nodes[0].heartbeat_age_s < before.heartbeat_age_s)
                assert status(master).nodes[0].registration_epoch == before.registration_epoch, "it is the same link"
                master.process.send_signal(signal.SIGSTOP)
                follower.owner = elected.listen
                sock, reply = linked.get(timeout=60)
                sock.close()
                master.process.send_signal(signal.SIGCONT)
                assert reply.master_epoch == elected.epoch
