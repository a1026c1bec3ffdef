"""Promises of client.py, against real masters; where blocks matter, against real nodes and what clients have put to them."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.connections.routes import KnownNodes, ShmDiagnostics
from kvstore.client.instances.client import (
    EngineCacheChange,
    InstanceReport,
    InstanceReportReply,
    InstanceRole,
    RequestPlacement,
    SchedulerClient,
    _SchedulerConnection,
)
from kvstore.master.health import MasterHealth
from kvstore.protocol.control_pb2_grpc import SchedulerStub
from kvstore.protocol.errors import DeadlineExceeded, Full, InvalidArgument, Unauthorized, Unavailable
from kvstore.rpc.address import is_local_socket, local_socket_problem
from kvstore.rpc.deadline import Deadline
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample
from kvstore.testing.transfer.awaited import eventually
from tests.client.embedded import embedded
from tests.credentials import ENGINE, tokens_file
from tests.master.running import Places, master_in_thread
from tests.ports import free_ports
from tests.rpc.stub_masters import stub_masters
from tests.store.daemons import master_flags, running
from tests.system.running import stopped

PREFILL = InstanceReport(name="p", role=InstanceRole.PREFILL, address="http://p")
DECODE = InstanceReport(name="d", role=InstanceRole.DECODE, address="http://d")
TIMEOUT_S = 60.0


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, instance_ttl_s=60.0, report_interval_s=0.125) as found:
        yield found


@pytest.fixture
def client(places: Places) -> Iterator[SchedulerClient]:
    with SchedulerClient(ClientSettings(master=places.listen, tenant="red")) as found:
        yield found


def tied(master: str, node_id: int) -> Client:
    """A client that prefers the node of this id, of two on its host."""
    client = Client(master)
    client._operations.resources.daemons.nodes = KnownNodes(is_local_socket, node_id - 1, ShmDiagnostics(local_socket_problem))
    return client


def test_schedule_follows_blocks_and_moves_them(tmp_path: Path) -> None:
    first, second = [b"x%d" % number for number in range(8)], [b"y%d" % number for number in range(5)]
    (tmp_path / "config.toml").write_text("[master]\ninstance_ttl_s = 600\n")  # each reports once
    with (
        embedded(ClusterPlan(dram="4MiB", nodes=2, config=str(tmp_path / "config.toml"), is_private=True)) as cluster,
        SchedulerClient(ClientSettings(master=cluster.address)) as client,
    ):
        with cluster.control() as control:
            names = {node.node_id: node.name for node in control.status().nodes}
        for node_id, keys in ((1, first), (2, second)):
            with tied(cluster.address, node_id) as writer:
                writer.put_batch(keys, [key * 5000 for key in keys], ack="cluster")
        one = dataclasses.replace(PREFILL, name="p1", node=names[1])
        for report in (one, dataclasses.replace(PREFILL, name="p2", node=names[2]), DECODE):
            client.report(report)

        def ask(keys: list[bytes]) -> RequestPlacement:
            placed = client.schedule([*keys, b"new"], block_tokens=10_000, input_tokens=90_001)
            assert isinstance(placed, RequestPlacement)
            return placed

        placed = ask(first)
        assert (placed.prefill, placed.decode, placed.prefix_blocks, placed.transfer_from) == ("p1", "d", 8, "")
        assert (ask(second).prefill, ask(second).prefix_blocks) == ("p2", 5)
        client.report(dataclasses.replace(one, queue_s=1000.0))
        placed = ask(first)
        assert (placed.prefill, placed.prefix_blocks, placed.transfer_from, placed.transfer_blocks) == ("p2", 8, "p1", 8)
        deadline = Deadline(TIMEOUT_S)
        while ask(first).transfer_from:
            deadline.left_s()
        with Client(cluster.address) as reader:
            assert reader.get_batch(first) == [key * 5000 for key in first]


def test_every_field_of_a_report_reaches_the_master(client: SchedulerClient) -> None:
    report = dataclasses.replace(
        DECODE,
        node="n",
        queue_s=1.0,
        send_backlog_bytes=2,
        send_bytes_per_s=3.0,
        batch=4,
        context_tokens=5,
        capacity_tokens=6,
        seen_request_ids=[7],
        seen_after_s=0.5,
        engine_cache=EngineCacheChange(tenant="t", base_version=0, version=8, added=[b"key1", b"key2"], removed=[b"key3"]),
        prefill_samples=[PrefillSample(100 * n, 10, n) for n in range(1, 33)],
        decode_samples=[DecodeSample(n, 100 * n * (1 + n % 3), n) for n in range(1, 33)],
    )
    assert client.report(report) == InstanceReportReply(0.125, 8)
    found = client.instances()
    kept = {field.name: getattr(found.instances[0].report, field.name) for field in dataclasses.fields(report)}
    lists = ("seen_request_ids", "engine_cache", "prefill_samples", "decode_samples")
    assert {name: value for name, value in kept.items() if name not in lists} == {
        name: getattr(report, name) for name in kept if name not in lists
    }
    assert found.estimators.count("fitted to 32 samples") == 2


def test_what_an_engine_has_itself_counts_as_its_prefix(client: SchedulerClient) -> None:
    keys = [b"k%d" % number for number in range(9)]
    cache = EngineCacheChange(tenant=client.settings.tenant, base_version=0, version=1, added=keys[:5])
    both = dataclasses.replace(PREFILL, role=InstanceRole.BOTH, engine_cache=cache)
    assert client.report(both) == InstanceReportReply(0.125, 1)
    placed = client.schedule(keys, block_tokens=16, input_tokens=150)
    assert isinstance(placed, RequestPlacement)
    assert (placed.prefill, placed.decode, placed.prefix_blocks) == ("p", "p", 5)
    assert client.report(
        dataclasses.replace(both, engine_cache=dataclasses.replace(cache, base_version=3, version=4))
    ) == InstanceReportReply(0.125, 1)


def test_what_the_master_refuses_is_a_typed_error(tmp_path: Path) -> None:
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path), max_instances=1) as places:
        settings = ClientSettings(master=places.listen, tenant="red", token="secret", instance_token=ENGINE)
        with SchedulerClient(settings) as client:
            client.report(PREFILL)
            with pytest.raises(Full):
                client.report(DECODE)
            with pytest.raises(InvalidArgument, match="3 keys of blocks"):
                client.schedule([b"a", b"b", b"c"], block_tokens=10, input_tokens=29)
            with pytest.raises(DeadlineExceeded):
                client.leave("p", deadline=Deadline(0))
        with SchedulerClient(dataclasses.replace(settings, token="guess")) as client, pytest.raises(Unauthorized):
            client.schedule([], block_tokens=1, input_tokens=1)


def test_another_master_is_found_when_the_first_is_gone(tmp_path: Path) -> None:
    with master_in_thread(tmp_path / "b") as second:
        with master_in_thread(tmp_path / "a") as first:
            client = SchedulerClient(ClientSettings(master=f"{first.listen},{second.listen}"))
            client.report(PREFILL)
            assert [each.report.name for each in client.instances().instances] == ["p"]
        assert not client.instances().instances
        client.report(DECODE)
        assert [each.report.name for each in client.instances().instances] == ["d"]
        client.close()


@pytest.mark.promise("failover")
def test_hanging_scheduler_is_left_after_a_failover(tmp_path: Path) -> None:
    with (
        running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as hanging,
        master_in_thread(tmp_path / "next") as elected,
        stub_masters(1) as [follower],
    ):
        follower.owner = hanging.facts["listen"]
        with SchedulerClient(ClientSettings(master=follower.address, owner_patience_s=0.1, deadline_s=TIMEOUT_S)) as client:
            client.report(PREFILL)
            # To the end: it would say that it is the owner still, and be believed where the elected one takes long to answer.
            with stopped(hanging.process.pid), ThreadPoolExecutor(1) as thread:
                hellos, report = follower.hellos, thread.submit(client.report, DECODE)
                eventually(lambda: follower.hellos > hellos + 1, "it has asked who owns the catalog")
                follower.owner = elected.listen
                report.result(TIMEOUT_S)
                assert [each.report.name for each in client.instances().instances] == ["d"]


@pytest.mark.promise("failover")
def test_scheduler_is_awaited_among_several_masters(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as elected, stub_masters(2) as masters:
        for master in masters:
            master.owner, master.control = "", f"127.0.0.1:{free_ports(1)[0]}"
        known = ",".join(master.address for master in masters)
        with SchedulerClient(ClientSettings(master=known, deadline_s=1.0)) as client, pytest.raises(Unavailable):
            client.instances()
        with SchedulerClient(ClientSettings(master=known, deadline_s=TIMEOUT_S)) as client, ThreadPoolExecutor(1) as thread:
            hellos, instances = masters[0].hellos, thread.submit(client.instances)
            eventually(lambda: masters[0].hellos > hellos + 2, "it has asked again")
            masters[0].owner = elected.listen
            assert not instances.result(TIMEOUT_S).instances


def test_no_master_is_unavailable_and_so_is_one_that_stays_away(tmp_path: Path) -> None:
    with SchedulerClient(ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}")) as client, pytest.raises(Unavailable):
        client.instances()
    with master_in_thread(tmp_path) as places:
        client = SchedulerClient(ClientSettings(master=places.listen))
        client.instances()
    with client, pytest.raises(Unavailable):
        client.instances()


def test_check_skips_a_scheduler_that_does_not_serve(client: SchedulerClient) -> None:
    client.check()
    server, health = grpc.server(ThreadPoolExecutor(1)), MasterHealth()
    health.set("kvstore.v1.Scheduler", is_serving=False)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    former, client._connection = client._connection, _SchedulerConnection(channel, SchedulerStub(channel))  # type: ignore[no-untyped-call]
    client.check()
    assert client._connection is not None
    assert client._connection.channel is not channel
    assert former is not None
    former.channel.close()
    server.stop(0).wait(TIMEOUT_S)
