"""Tests of master_link.py between real processes: a node registers with the live master, and again after any
separation."""

import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from kvstore.protocol.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.grpc_credentials import open_channel
from kvstore.testing.transfer.awaited import eventually
from tests.master.running import Places, master_in_thread
from tests.rpc.stub_masters import stub_masters
from tests.store.daemons import Daemon, master_flags, node_flags, running, status, until_nodes_are
from tests.store.linked import a_link, until
from tests.store.served import Client


def connect(node: Daemon) -> Client:
    return Client(Channel.open(parse_address(f"unix:{node.facts['unix']}"), Hello(ROLE_CLIENT, "red"), Deadline(10)))


def test_a_returning_master_gets_the_full_description(tmp_path: Path) -> None:
    with (
        running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master,
        running("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log") as node,
    ):
        node.line()
        client = connect(node)
        client.put({"a": b"a", "b": b"b"})
        master.stop(signal.SIGKILL)
        assert client.read("a", "b")[1] == [b"a", b"b"], "reads need no master"
        port = int(master.facts["listen"].rpartition(":")[2])
        with running("master", *master_flags(tmp_path, port=port), log=tmp_path / "master.log") as again:
            until_nodes_are(again, "alive")
            until(lambda: status(again).blocks == 2)
            assert client.put({"c": b"c"}) == [1]
            client.close()
            assert node.stop() == 0


CLOCK_SET_BACK = """
import runpy, sys, time
now = time.time_ns
time.time_ns = lambda: now() - 3600 * 10**9
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def had_a_master(folder: Path, catalog: str, times: int) -> None:
    for _ in range(times):
        with running("master", *master_flags(folder), "--catalog", catalog, log=folder / "master.log") as master:
            assert master.stop() == 0


@pytest.mark.promise("failover")
@pytest.mark.parametrize("change", ["clock set back", "memory to lmdb", "lmdb wiped"])
def test_a_node_accepts_another_catalog_at_any_epoch_and_logs_it(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "catalog"
    before = f"lmdb:{folder}" if change == "lmdb wiped" else "memory:"
    after = "memory:" if change == "clock set back" else f"lmdb:{folder}"
    prefix = [sys.executable, "-c", CLOCK_SET_BACK] if change == "clock set back" else []
    had_a_master(tmp_path, before, 2 if change == "lmdb wiped" else 0)
    with (
        running("master", *master_flags(tmp_path), "--catalog", before, log=tmp_path / "master.log") as master,
        running("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log") as node,
    ):
        node.line()
        client = connect(node)
        client.put({"a": b"a", "b": b"b"})
        master.stop(signal.SIGKILL)
        if change == "lmdb wiped":
            shutil.rmtree(folder)
        port = int(master.facts["listen"].rpartition(":")[2])
        with running("master", *master_flags(tmp_path, port=port), "--catalog", after, log=tmp_path / "master.log", prefix=prefix) as again:
            until_nodes_are(again, "alive")
            until(lambda: status(again).blocks == 2)
            assert client.put({"c": b"c"}) == [1]
            client.close()
            assert node.stop() == 0
    assert "has another catalog" in (tmp_path / "node.log").read_text()


@pytest.mark.promise("failover")
def test_a_former_master_of_the_same_catalog_is_refused(tmp_path: Path) -> None:
    """It was started on an old copy of the catalog."""
    folder, old = tmp_path / "catalog", tmp_path / "old"
    had_a_master(tmp_path, f"lmdb:{folder}", 1)
    shutil.copytree(folder, old)
    had_a_master(tmp_path, f"lmdb:{folder}", 2)
    log = tmp_path / "node.log"
    with (
        running("master", *master_flags(tmp_path), "--catalog", f"lmdb:{folder}", log=tmp_path / "master.log") as master,
        running("node", *node_flags(tmp_path, master.facts["listen"]), log=log) as node,
    ):
        node.line()
        master.stop(signal.SIGKILL)
        port = int(master.facts["listen"].rpartition(":")[2])
        with running("master", *master_flags(tmp_path, port=port), "--catalog", f"lmdb:{old}", log=tmp_path / "master.log") as stale:
            deadline = Deadline(30)
            while "was registered at epoch 4" not in log.read_text():
                assert deadline.left_s() > 0
            assert not [each for each in status(stale).nodes if each.state == "alive"]
        assert node.stop() == 0


def test_a_fenced_node_registers_again_and_keeps_its_blocks(tmp_path: Path) -> None:
    flags = [*master_flags(tmp_path), "--node-ttl-s", "3", "--heartbeat-interval-s", "0.05"]
    with (
        running("master", *flags, log=tmp_path / "master.log") as master,
        running("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log") as node,
    ):
        node.line()
        client = connect(node)
        client.put({"a": b"a"})
        before = until_nodes_are(master, "alive").nodes[0].registration_epoch
        node.process.send_signal(signal.SIGSTOP)
        until_nodes_are(master, "dead")
        node.process.send_signal(signal.SIGCONT)
        after = until_nodes_are(master, "alive")
        assert after.nodes[0].registration_epoch > before
        assert after.blocks == 1
        epochs = {status(master).nodes[0].registration_epoch for _ in range(300)}
        assert epochs == {after.nodes[0].registration_epoch}, "it must not register again and again"
        assert client.put({"b": b"b"}) == [1]
        client.close()
        assert node.stop() == 0


def test_description_changes_are_sent_with_a_heartbeat_at_once(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, heartbeat_interval_s=3600.0, node_ttl_s=7200.0) as places, a_link(places.listen) as (link, linked):
        link.describe(topology=b"topology", transfer=b"engine")
        link.start()
        with linked.get(timeout=10)[0]:
            assert described(places) == (b"topology", b"engine")
            link.describe(transfer=b"other")
            until(lambda: described(places) == (b"topology", b"other"))
            link.describe(topology=b"changed")
            until(lambda: described(places) == (b"changed", b"other"))


@pytest.mark.promise("observable")
def test_hot_blocks_are_reported_on_request_only(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, heartbeat_interval_s=0.01) as places, a_link(places.listen) as (link, linked):
        assert places.master is not None
        heat, reactor = places.master.partitions[0].role_manager.leader().directory.block_heat, places.master.reactor
        link.start()
        sock, _ = linked.get(timeout=10)

        def told() -> dict[bytes, float]:
            return reactor.call(lambda: heat.of("red", reactor.now_ns()), deadline_s=10)

        with sock:
            assert told() == {}
            reactor.call(lambda: heat.request_reports(reactor.now_ns()), deadline_s=10)
            until(lambda: told() == {b"k": 1024.0})  # as many as it was asked for


def test_a_refused_first_registration_stops_the_node(tmp_path: Path) -> None:
    refusals = queue.SimpleQueue[str]()
    with master_in_thread(tmp_path) as places, a_link(places.listen) as (first, linked):
        first.start()
        with linked.get(timeout=10)[0], a_link(places.listen, on_refused=refusals.put) as (second, _):
            second.start()
            assert "a live node already has the name 'n0'" in refusals.get(timeout=10)


def test_a_public_node_refuses_a_master_without_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with master_in_thread(tmp_path) as places, a_link(places.listen, needs_tickets=True) as (link, linked):
        link.start()
        eventually(lambda: "the master has no tokens file, so this node would accept" in caplog.text, "it says so")
        assert linked.empty()


def test_a_registered_node_closes_its_control_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    @contextmanager
    def noted(*args: Any) -> Iterator[grpc.Channel]:
        with open_channel(*args) as channel:
            yield channel
        ended.set()

    monkeypatch.setattr("kvstore.store.master_session.master_link.open_channel", noted)
    with master_in_thread(tmp_path, heartbeat_interval_s=0.01) as places, a_link(places.listen) as (link, linked):
        link.start()
        with linked.get(timeout=60)[0]:
            assert ended.wait(60)
            assert beats_heard(places) < beats_heard(places, besides=2), "it beats on"


def test_a_refused_heartbeat_is_logged_and_the_next_one_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[KVStoreError] = [InvalidArgument("what is that?")] * 3
    with master_in_thread(tmp_path, heartbeat_interval_s=0.01) as places, a_link(places.listen, answers=answers) as (link, linked):
        link.start()
        with linked.get(timeout=60)[0]:
            eventually(lambda: "a heartbeat failed: what is that?" in caplog.text, "it says so")
            beats_heard(places, besides=1)
            assert linked.empty()
            assert caplog.text.count("a heartbeat failed: what is that?") == 1, "a refusal that goes on is told once"


def beats_heard(places: Places, *, besides: int = 0) -> int:
    """Wait for that many further heartbeats and return the total that the master has answered."""

    def heard() -> int:
        with places.stub() as stub:
            return int(stub.Status(pb.StatusRequest(), timeout=10).counters["request_heartbeat_count"])

    first = heard()
    until(lambda: heard() >= first + besides)
    return heard()


class Registering(ControlServicer):
    """Control plane of a master with a heartbeat interval of one hour. `during` is called in the first registration."""

    def __init__(self) -> None:
        self.during: Callable[[], None] = lambda: None
        self.said: list[int] = []
        """Ids under which nodes have registered."""

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:  # noqa: N802
        self.said.append(request.node_id)
        if len(self.said) == 1:
            self.during()
        return pb.RegisterReply(node_id=1, registration_epoch=len(self.said), master_epoch=1, catalog="c", heartbeat_interval_s=3600)


def test_a_node_id_assigned_during_registration_is_sent_next() -> None:
    server, registering, given = grpc.server(ThreadPoolExecutor(1)), Registering(), [7]
    add_ControlServicer_to_server(registering, server)  # type: ignore[no-untyped-call]
    control = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with stub_masters(1) as [master]:
        master.control = control
        with a_link(master.address, node_id=lambda: given[0]) as (link, linked):

            def renew() -> None:
                given[0] = 9
                link.renew()

            registering.during = renew
            link.start()
            for _ in range(2):
                linked.get(timeout=60)[0].close()
            assert registering.said == [7, 9]
    server.stop(0).wait(60)


def test_a_lost_link_ends_while_a_heartbeat_waits(tmp_path: Path) -> None:
    flags = [*master_flags(tmp_path), "--heartbeat-interval-s", "0.05"]
    with running("master", *flags, log=tmp_path / "master.log") as master, master_in_thread(tmp_path / "next") as other:
        with stub_masters(1) as [follower]:
            follower.owner = master.facts["listen"]
            with a_link(follower.address) as (link, linked):
                link.start()
                sock, reply = linked.get(timeout=60)
                with sock:
                    master.process.send_signal(signal.SIGSTOP)
                    hellos = follower.hellos
                    until(lambda: follower.hellos > hellos)
                    follower.refusal = Unavailable("no master owns the catalog now")
                    link.lost(reply.registration_epoch)
                    hellos = follower.hellos
                    until(lambda: follower.hellos > hellos + 2)
                    follower.refusal, follower.owner = None, other.listen
                    linked.get(timeout=60)[0].close()
                    master.process.send_signal(signal.SIGCONT)


def described(places: Places) -> tuple[bytes, bytes]:
    """The master's report about its only node."""
    with places.stub() as stub:
        (found,) = stub.Topologies(pb.TopologiesRequest(), timeout=10)
    client = places.client()
    try:
        return found.topology, client.call(Nodes(), NodeTable, Deadline(10)).transfers[0]
    finally:
        client.close()


def test_a_link_with_a_hanging_heartbeat_is_replaced(tmp_path: Path) -> None:
    with (
        master_in_thread(tmp_path, heartbeat_interval_s=0.01) as places,
        a_link(places.listen, timeout_s=0.5, answers=[None]) as (link, linked),
    ):
        link.start()
        sock, before = linked.get(timeout=60)
        with sock:
            again, after = linked.get(timeout=60)
            again.close()
            assert after.registration_epoch > before.registration_epoch


class Refusing(ControlServicer):
    """Of a master that takes a registration, and no heartbeat."""

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:  # noqa: N802
        return pb.RegisterReply(node_id=1, registration_epoch=1, master_epoch=1, catalog="another", heartbeat_interval_s=0.01)


@pytest.mark.promise("failover")
def test_refused_heartbeats_lead_to_the_next_owner(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    add_ControlServicer_to_server(Refusing(), server)  # type: ignore[no-untyped-call]
    control = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    refusal = Unavailable("another master owns the catalog")
    with master_in_thread(tmp_path) as elected, stub_masters(2) as (follower, former):
        former.control = control
        with a_link(follower.address, answers=[refusal] * 1000) as (link, linked):
            link.start()
            with linked.get(timeout=60)[0]:
                follower.owner = elected.listen
                sock, reply = linked.get(timeout=60)
                sock.close()
                assert reply.master_epoch == elected.epoch
    server.stop(0).wait(60)
