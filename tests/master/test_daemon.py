"""Tests of daemon.py and master.py: the real process, real sockets, real catalogs."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from aetcd.rpc import rpc_pb2
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.master.daemon import main
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.frames import HEADER, unpack_header
from kvstore.protocol.master_messages import Exists, Pin
from kvstore.protocol.session_messages import Failure, Flags
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from tests.etcd_server import EtcdServer
from tests.master.blocks import Event
from tests.master.running import MASTER, TIMEOUT_S, MasterProcess, NodeSide, Places, ask, refusal
from tests.refusals import refused_here
from tests.telemetry.http.asking import ask as http_ask

Start = Callable[..., tuple[MasterProcess, Places]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts masters that do not outlive the test."""
    started: list[MasterProcess] = []

    def begin(*flags: str, **environment: str) -> tuple[MasterProcess, Places]:
        started.append(MasterProcess(tmp_path / "run", flags, environment))
        return started[-1], started[-1].start()

    yield begin
    for master in started:
        if master.process is not None and master.process.poll() is None:
            master.kill()


def one_line(errors: str) -> str:
    (line,) = [line for line in errors.splitlines() if line.startswith("kvstore-master: error: ")]
    assert "Traceback" not in errors
    return line


def exchange(places: Places, data: bytes) -> bytes:
    """All data received after `data` until the master disconnects."""
    address = parse_address(places.listen)
    with socket.create_connection((address.host, address.port), TIMEOUT_S) as sock:
        sock.sendall(data)
        answer = b""
        while got := sock.recv(4096):
            answer += got
        return answer


def still_serves(places: Places) -> None:
    client = places.client()
    assert ask(client, Exists([b"k"]), Flags).flags == b"\0"
    client.close()
    with places.stub() as stub:
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).version


def test_it_says_where_it_is_serves_and_ends_cleanly_on_a_signal(start: Start) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        master, places = start()
        still_serves(places)
        assert master.process is not None
        assert places.pid == master.process.pid
        master.process.send_signal(number)
        code, errors = master.end()
        assert (code, "Traceback" in errors) == (0, False)
        assert not Path(places.unix).exists()


def test_started_by_its_name_it_ends_cleanly_too(tmp_path: Path) -> None:
    """Forked ones leave out how Python takes apart what was loaded (tests/forked.py)."""
    flags = ["--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--run-dir", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", *MASTER, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        assert '"role": "owner"' in master.stdout.readline()
        master.terminate()
        told, errors = master.communicate(timeout=PATIENCE_S)
    assert (master.returncode, told) == (0, "")
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_its_http_port_says_whether_it_lives_and_serves(start: Start) -> None:
    master, places = start()
    assert places.console == f"http://{places.http}/"
    assert "<title>kvstore</title>" in http_ask(places.http, "/").text
    assert [http_ask(places.http, path).text for path in ("/healthz", "/readyz")] == ["ok\n", "ok\n"]
    with places.stub() as stub:
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).http == places.http
    assert health(places) == health_pb2.HealthCheckResponse.SERVING
    assert master.process is not None
    master.process.send_signal(signal.SIGTERM)
    assert f"the console is at {places.console}" in master.end()[1]


@pytest.mark.promise("observable")
def test_one_that_lost_its_catalog_lives_and_does_not_serve(start: Start, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    etcd = etcd_server_factory()
    _master, places = start("--catalog", f"etcd://{etcd.host_port}")
    etcd.kill()
    eventually(lambda: http_ask(places.http, "/readyz").status == 503, "a master that says that it lacks its catalog")
    assert "catalog" in http_ask(places.http, "/readyz").text
    eventually(lambda: health(places) == health_pb2.HealthCheckResponse.NOT_SERVING, "a master whose health says so too")
    assert http_ask(places.http, "/healthz").text == "ok\n"


def health(places: Places) -> int:
    """Of the whole master, as gRPC's health service has it."""
    with grpc.insecure_channel(places.control) as channel:
        reply = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        return int(reply.status)


def test_garbage_costs_only_its_connection(start: Start) -> None:
    _master, places = start()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(1000)):
        answer = exchange(places, garbage)
        header = unpack_header(answer)
        assert (header.type, header.request_id) == (Failure.TYPE, 0)
        assert "not a kvstore frame" in Failure.unpack(answer[HEADER.size :]).text
    control = parse_address(places.control)
    with socket.create_connection((control.host, control.port), TIMEOUT_S) as sock:
        sock.sendall(b"garbage" * 1000)
    still_serves(places)


@pytest.mark.promise("least-privilege")
def test_what_cannot_be_met_is_one_line_and_exit_code_2(start: Start, tmp_path: Path) -> None:
    _master, places = start()
    code, errors = refusal("--listen", places.listen, "--control", "127.0.0.1:0", "--run-dir", str(tmp_path / "other"))
    assert (code, "in use" in one_line(errors)) == (2, True), errors
    file = tmp_path / "file"
    file.write_text("not a folder")
    free = ("--listen", "127.0.0.1:0", "--run-dir", str(tmp_path / "other"))
    code, errors = refusal(*free, "--catalog", "etcd://127.0.0.1:1", "--catalog-timeout-s", "0.3")
    assert (code, "127.0.0.1:1" in one_line(errors)) == (2, True), errors
    for flags, what in (
        ((*free, "--control", places.control), "in use"),
        ((*free, "--catalog", f"lmdb:{file}"), "lmdb:"),
        ((*free, "--catalog", "mysql:"), "is not one of"),
        ((*free, "--tokens", str(tmp_path / "none")), "tokens"),
        (("--listen", "nowhere"), "HOST:PORT"),
        (("--listen", "0.0.0.0:0", "--control", "127.0.0.1:0"), "listen 0.0.0.0 is not loopback"),
        ((*free, "--control", "[::]:0"), "control :: is not loopback"),
        (("--listen", "unix:/tmp/x"), "HOST:PORT"),
        ((*free, "--advertise", "master-1:7440"), "neither a host without a port"),
        ((*free, "--advertise", "[::1]"), "'[::1]' is neither"),
        ((*free, "--node-ttl-s", "soon"), "--node-ttl-s"),
    ):
        line = refused_here(main, *flags)
        assert line.startswith("kvstore-master: error: ")
        assert what in line
    still_serves(places)


def published_then_killed(master: MasterProcess, places: Places) -> None:
    client, node = places.client(), NodeSide(places)
    node.sync(Event(b"a"), Event(b"b"))
    node.publish(Event(b"c"))
    assert ask(client, Exists([b"a", b"b", b"c"]), Flags).flags == b"\1\1\1"
    master.kill()
    node.close()
    client.close()


def finds_all(places: Places) -> None:
    client = places.client()
    assert ask(client, Exists([b"a", b"b", b"c"]), Flags).flags == b"\0\0\0"
    node = NodeSide(places)
    assert node.registration.node_id == 1
    assert ask(client, Exists([b"a", b"b", b"c"]), Flags).flags == b"\1\1\1"
    node.sync(Event(b"a"), Event(b"c"))
    assert ask(client, Exists([b"a", b"b", b"c"]), Flags).flags == b"\1\0\1"
    node.close()
    client.close()


def test_restart_with_lmdb_finds_all_published_blocks(start: Start, tmp_path: Path) -> None:
    master, places = start("--catalog", f"lmdb:{tmp_path / 'catalog'}")
    published_then_killed(master, places)
    _again, places = start("--catalog", f"lmdb:{tmp_path / 'catalog'}")
    finds_all(places)


def test_restart_with_etcd_finds_all_published_blocks(start: Start, etcd_url: str) -> None:
    master, places = start("--catalog", f"{etcd_url}/daemon")
    published_then_killed(master, places)
    again, places = start("--catalog", f"{etcd_url}/daemon")
    while places.role != "owner":  # it follows the one that was killed until its lease is over
        places.role = again.next_line()["event"]
    finds_all(places)


def test_masters_on_one_etcd_report_owner_changes(start: Start, etcd_url: str) -> None:
    catalog = ("--catalog", f"{etcd_url}/standby", "--lease-ttl-s", "20")  # which does not end for want of a processor
    owner, places = start(*catalog)
    follower, other = start(*catalog)
    assert (places.role, other.role) == ("owner", "following")
    assert other.client_welcome().owner == places.listen
    assert owner.stop() == 0
    facts = follower.next_line()
    while facts["event"] != "owner":
        facts = follower.next_line()
    assert (facts["owner"], facts["epoch"] > 0) == (other.listen, True)
    still_serves(other)
    newcomer, third = start(*catalog)
    assert (third.role, third.client_welcome().owner) == ("following", other.listen)
    assert newcomer.stop() == 0
    assert follower.stop() == 0


def test_foreign_catalog_ends_the_master_with_one_line(start: Start, etcd: EtcdServer, etcd_url: str) -> None:
    catalog = ("--catalog", f"{etcd_url}/shared", "--lease-ttl-s", "20")
    start(*catalog)
    follower, _places = start(*catalog)
    request = rpc_pb2.TxnRequest()
    put = request.success.add().request_put
    put.key, put.value = b"/shared/r/zoo", b"elephant"
    channel = EtcdChannel([etcd.host_port], EtcdAccess())
    channel.call("Txn", request, timeout_s=TIMEOUT_S)
    channel.close()
    code, errors = follower.end()
    assert (code, "something else" in one_line(errors)) == (1, True), errors
    code, errors = refusal("--listen", "127.0.0.1:0", *catalog)
    assert (code, "something else" in one_line(errors)) == (2, True), errors


def test_unreachable_address_is_refused_with_etcd_only(start: Start, etcd_url: str) -> None:
    flags = ("--allow-unauthenticated", "--listen", "0.0.0.0:0", "--control", "127.0.0.1:0")
    code, errors = refusal(*flags, "--catalog", f"{etcd_url}/wildcard")
    assert (code, "advertise" in one_line(errors)) == (2, True), errors
    _master, places = start(*flags)
    assert places.listen.startswith("0.0.0.0:")
    _master, places = start(*flags, "--catalog", f"{etcd_url}/wildcard", "--advertise", "localhost")
    with places.stub() as stub:
        owner = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).owner
        assert owner.name == owner.address == f"localhost:{places.listen.rpartition(':')[2]}"


def test_reads_continue_and_pins_wait_without_etcd(start: Start, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    server = etcd_server_factory()
    _master, places = start("--catalog", f"etcd://{server.host_port}/away", "--lease-ttl-s", "60")
    client, node = places.client(), NodeSide(places)
    node.publish(Event(b"a"))
    server.kill()
    with pytest.raises(TimeoutError):
        ask(client, Pin([b"a"]), Flags, 0.3)
    other: Channel = places.client()
    assert ask(other, Exists([b"a"]), Flags).flags == b"\1"
    server.start()
    header, _body = node.read()
    node.answer(header, Flags(b"\1"))
    for channel in (client, other, node):
        channel.close()


def test_imports_exclude_unused_engines_and_catalogs() -> None:
    """Both take long to load, and every start of a master would."""
    program = "import sys; import kvstore.master.daemon; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "kvstore.master.catalogs.factory" in loaded
    assert not {"aetcd", "kvstore.transfer.engine"} & set(loaded)
