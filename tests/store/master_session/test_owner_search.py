"""Promises of owner_search.py, by links that find their masters: who owns the catalog is found, whoever else answers or does not."""

import signal
import socket
from dataclasses import replace
from pathlib import Path

from kvstore.rpc.address import socket_id
from tests.master.running import master_in_thread
from tests.ports import free_ports
from tests.rpc.stub_masters import stub_masters
from tests.store.daemons import master_flags, running, status
from tests.store.linked import a_link, until


def test_a_master_is_not_asked_through_a_socket_where_another_answers(tmp_path: Path) -> None:
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


def test_a_master_that_takes_no_registration_is_left_for_another_one(tmp_path: Path) -> None:
    """One that was the owner and does not know yet that it is it no longer."""
    with master_in_thread(tmp_path) as owner, stub_masters(1) as [former]:
        former.control = f"127.0.0.1:{free_ports(1)[0]}"
        with a_link(former.address, owner.listen) as (link, linked):
            link.start()
            linked.get(timeout=60)[0].close()
            assert former.hellos == 1


def test_a_master_that_takes_no_registration_and_is_the_only_one_is_asked_again(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as owner, stub_masters(1) as [master]:
        master.control = f"127.0.0.1:{free_ports(1)[0]}"
        with a_link(master.address) as (link, linked):
            link.start()
            until(lambda: master.hellos > 2)
            master.owner = owner.listen
            linked.get(timeout=60)[0].close()


def test_a_node_whose_owner_hangs_registers_with_the_next_one_and_not_before_there_is_one(tmp_path: Path) -> None:
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
