"""Tests of kvstore-node as a real process: readiness, refused settings, crash recovery."""

import signal
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.tools.cluster_checks import clock, fetch
from kvstore.client import Client as KVStoreClient
from kvstore.protocol.errors import Draining
from kvstore.protocol.message import GRANTED, TIER_BITS
from kvstore.protocol.node_messages import ReadBlocks
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.store.daemon import main
from kvstore.testing.transfer.awaited import eventually
from tests.refusals import refused_here
from tests.rpc.wires import frame
from tests.security.tls.certified import HOSTS
from tests.security.tls.certified import Cluster as Authority
from tests.store.daemons import Daemon, master_flags, node_flags, running, start, status, until_nodes_are
from tests.store.served import Client
from tests.store.small_table_node import TABLE_BYTES
from tests.telemetry.http.asking import ask as http_ask


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Daemon]:
    with running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as daemon:
        yield daemon


def connect(node: Daemon, *, tcp: bool = False) -> Client:
    address = node.facts["listen"] if tcp else f"unix:{node.facts['unix']}"
    return Client(Channel.open(parse_address(address), Hello(ROLE_CLIENT, "red"), Deadline(10)))


@pytest.mark.promise("observable")
def test_daemon_http_reports_liveness_and_readiness(tmp_path: Path) -> None:
    with running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master:
        with running("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log") as node:
            node.line()
            http = node.facts["http"]
            assert [http_ask(http, path).text for path in ("/healthz", "/readyz")] == ["ok\n", "ok\n"]
            assert [known.http for known in status(master).nodes] == [http]
            master.stop()
            eventually(lambda: http_ask(http, "/readyz").status == 503, "a node that says that it has no master")
            assert "not registered" in http_ask(http, "/readyz").text
            assert http_ask(http, "/healthz").status == 200


@pytest.mark.promise("tls-everywhere")
def test_daemon_http_uses_tls_with_a_certificate(tmp_path: Path) -> None:
    """Also a master's; its status and `kvstore doctor` report it."""
    authority = Authority(tmp_path / "authority")
    cert, key = authority.file(CertificateSubject(MASTER), hosts=HOSTS)
    https = ("--http-tls-cert", str(cert), "--http-tls-key", str(key))
    trusting = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    with running("master", *master_flags(tmp_path), *https, log=tmp_path / "master.log") as master:
        with running("node", *node_flags(tmp_path, master.facts["listen"]), *https, log=tmp_path / "node.log") as node:
            node.line()
            told = status(master)
            assert (told.http, [known.http for known in told.nodes]) == (master.facts["http"], [node.facts["http"]])
            assert master.facts["console"] == f"{master.facts['http']}/"
            for daemon in (master, node):
                assert daemon.facts["http"].startswith("https://")
                with urllib.request.urlopen(f"{daemon.facts['http']}/readyz", timeout=60, context=trusting) as answer:
                    assert answer.read() == b"ok\n"
            assert clock(told, fetch, (), time.time).found == "in step with 2 daemons"


def test_daemon_status_reports_its_blocks(tmp_path: Path, master: Daemon) -> None:
    flags = [*node_flags(tmp_path, master.facts["listen"]), "--nvme", f"{tmp_path / 'nvme'}:8MiB", "--hbm", "cpu:1MiB"]
    with running("node", *flags, log=tmp_path / "node.log") as node:
        node.line()
        reply = until_nodes_are(master, "alive")
        assert reply.nodes[0].name == "n0"
        assert [(tier.name, tier.capacity_bytes, tier.health) for tier in reply.nodes[0].tiers] == [
            ("hbm", 1 << 20, "ok"),
            ("dram", 4 << 20, "ok"),
            ("nvme", 8 << 20, "ok"),
        ]


@pytest.mark.promise("restart-keeps-nvme")
def test_sigterm_drains_memory_for_the_next_process(tmp_path: Path, master: Daemon) -> None:
    """With space on NVMe a plain restart of a node loses nothing."""
    flags = [*node_flags(tmp_path, master.facts["listen"]), "--nvme", f"{tmp_path / 'nvme'}:32MiB", "--drain-s", "60"]
    values = {f"{number:02}": bytes([number]) * (64 << 10) for number in range(40)}
    with running("node", *flags, log=tmp_path / "node.log") as node:
        node.line()
        client = connect(node)
        for name, value in values.items():
            assert client.put({name: value}) == [1]
        client.close()
        assert node.stop() == 0
        assert "0 blocks (0 B) are lost" in node.log.read_text()
    with running("node", *flags, log=tmp_path / "node2.log") as node:
        node.line()
        client = connect(node)
        assert client.read(*values, inline_bytes=1 << 20)[1] == list(values.values())
        client.close()


@pytest.mark.promise("restart-keeps-nvme")
def test_a_second_signal_stops_the_daemon_at_once(tmp_path: Path, master: Daemon) -> None:
    flags = [*node_flags(tmp_path, master.facts["listen"]), "--nvme", f"{tmp_path / 'nvme'}:32MiB", "--drain-s", "3600"]
    with running("node", *flags, log=tmp_path / "node.log") as node:
        node.line()
        client = connect(node)
        assert client.open({"a": 1000}).statuses == bytes([GRANTED])  # a put that stays open is waited for
        node.process.send_signal(signal.SIGTERM)
        eventually(lambda: is_draining(node), "a node that is draining")
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(60) == 0
        client.close()


def is_draining(node: Daemon) -> bool:
    """Return True if it refuses new blocks."""
    client = connect(node)
    try:
        client.put({"b": b"b"})
    except Draining:
        return True
    finally:
        client.close()
    return False


def memory_bytes(node: Daemon, field: str) -> int:
    """A line of the process's status: VmHWM, RssAnon."""
    lines = Path(f"/proc/{node.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.promise("space-accounted")
@pytest.mark.parametrize("prompt_blocks", [1, 50])
def test_block_table_memory_of_small_blocks_is_bounded(tmp_path: Path, master: Daemon, prompt_blocks: int) -> None:
    """Including remembered blocks, several times as many. At most a third more than estimated, without uncommitted
    blocks."""
    flags = [*node_flags(tmp_path, master.facts["listen"]), "--dram", "32MiB", "--table-share", "0"]
    log = tmp_path / "node.log"
    with running("small-table node", *flags, log=log) as node, KVStoreClient(master.facts["listen"], deadline_s=60) as client:
        node.line()
        keys = [b"%016d" % number for number in range(62_500)]
        parents = [key if number % prompt_blocks else None for number, key in enumerate([b"", *keys[:-1]])]
        assert client.put(b"first", b"v")
        before = memory_bytes(node, "RssAnon")
        for at in range(0, len(keys), 2500):
            client.put_batch(keys[at : at + 2500], [b"v" * 64] * 2500, parents=parents[at : at + 2500])
            client.flush()
        assert memory_bytes(node, "RssAnon") - before < TABLE_BYTES * 4 / 3
        counters = until_nodes_are(master, "alive").nodes[0].counters
        assert counters["table_bytes"] <= counters["max_table_bytes"] == TABLE_BYTES


@pytest.mark.promise("memory-bounded")
def test_memory_of_large_nvme_reads_is_bounded_and_returned(tmp_path: Path, master: Daemon) -> None:
    flags = [*node_flags(tmp_path, master.facts["listen"]), "--nvme", f"{tmp_path / 'nvme'}:64MiB"]
    flags += ["--peer-bytes", str(32 << 20), "--read-bytes", str(64 << 20), "--demotion-wait-s", "60"]
    with running("node", *flags, log=tmp_path / "node.log") as node:
        node.line()
        client = connect(node)
        names = [f"{number:02}" for number in range(16)]
        for name in names:
            client.put({name: name.encode() * (512 << 10)})
        low = [name for name in names if client.read(name, inline_bytes=1 << 30)[0].tiers == bytes([TIER_BITS["nvme"]])]
        before = memory_bytes(node, "VmHWM")
        askers = [connect(node, tcp=True).channel.detach() for _ in range(4)]
        for asker in askers:
            asker.settimeout(10)
            asker.sendall(b"".join(frame(ReadBlocks([low[0].encode()] * 1000, [0] * 1000, 1 << 30, 1000)) for _ in range(2)))
        assert askers[0].recv(1)
        assert client.put({"small": b"x"}) == [1], "all of it has been heard by now"
        assert memory_bytes(node, "VmHWM") - before < 192 << 20
        for asker in askers:
            asker.close()
        until_memory_is(node, before + (32 << 20))
        client.close()


def until_memory_is(node: Daemon, limit_bytes: int) -> None:
    """The node's own memory, without what it maps, comes below the limit within 2,000 looks."""
    for _ in range(2000):
        if memory_bytes(node, "RssAnon") < limit_bytes:
            return
        time.sleep(0.01)
    raise AssertionError(f"it stays at {memory_bytes(node, 'RssAnon') >> 20} MiB, above {limit_bytes >> 20}")


def test_daemon_survives_a_closed_standard_output(tmp_path: Path, master: Daemon) -> None:
    process = start("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log")
    assert process.stdout is not None
    process.stdout.close()
    until_nodes_are(master, "alive")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def refusal(tmp_path: Path, *flags: str) -> str:
    """Start with bad settings: the one line that it says."""
    log = tmp_path / "refused.log"
    process = start("node", "--run-dir", str(tmp_path / "n"), "--dram", "1MiB", *flags, log=log)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    (line,) = log.read_text().splitlines()
    assert line.startswith("kvstore-node: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dram", "1KiB"], "give at least 4 KiB"),
        (["--dram", "1GiB", "--memory", "2GiB"], "leave out one"),
        (["--dram", "0", "--memory", "100MiB"], "give at least 180 MiB"),
        (["--dram", "1024TiB"], "does not fit into this machine"),
        (["--dram", "lots"], "not a size"),
        (["--nvme", "/proc/nowhere:1MiB"], "/proc/nowhere"),
        (["--nvme", "FOLDER:900TiB"], "nvme"),
        (["--nvme", "FOLDER:0"], "capacity"),
        (["--nvme", "FOLDER"], "LOCATION:SIZE"),
        (["--nvme", "FOLDER:big"], "not a size"),
        (["--listen", "nonsense"], "HOST:PORT"),
        (["--listen", "unix:/tmp/x"], "HOST:PORT"),
        (["--listen", "192.0.2.1:0", "--allow-unauthenticated"], "cannot listen"),
        (["--listen", "192.0.2.1:0"], "allow_unauthenticated"),
        (["--advertise", "unix:/tmp/x"], "HOST:PORT"),
        (["--master", "nonsense"], "HOST:PORT"),
        (["--policy", "random"], "one of default, arc, gdsf"),
        (["--hbm", "cuda:99:1MiB"], "HBM"),
        (["--hbm", "nodevice:1MiB"], "HBM"),
        (["--hbm", "cpu"], "LOCATION:SIZE"),
        (["--low-watermark", "0.9", "--high-watermark", "0.5"], "low_watermark"),
        (["--run-dir", "/proc/nowhere"], "/proc/nowhere"),
        (["--run-dir", "/tmp/" + "x" * 120], "107"),
        (["--config", "/nowhere.toml"], "settings file"),
        (["--listen", "0.0.0.0:0", "--allow-unauthenticated"], "advertise"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:40],
)
def test_invalid_settings_exit_with_one_line_and_code_2(tmp_path: Path, flags: list[str], said: str) -> None:
    given = [flag.replace("FOLDER", str(tmp_path / "nvme")) for flag in flags]
    line = refused_here(main, "--run-dir", str(tmp_path / "n"), "--dram", "1MiB", *given)
    assert line.startswith("kvstore-node: error: ")
    assert said in line


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        assert "in use" in refusal(tmp_path, "--listen", f"127.0.0.1:{owner.getsockname()[1]}")


def test_an_nvme_folder_in_use_is_refused(tmp_path: Path, master: Daemon) -> None:
    nvme = ["--nvme", f"{tmp_path / 'nvme'}:1MiB"]
    with running("node", *node_flags(tmp_path, master.facts["listen"]), *nvme, log=tmp_path / "node.log"):
        assert str(tmp_path / "nvme") in refusal(tmp_path, *nvme)
