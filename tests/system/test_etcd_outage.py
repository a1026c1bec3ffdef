"""etcd away or taken over: what still works, what fails, how, and what is there afterwards."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import CatalogUnavailable, DeadlineExceeded, Retry
from kvstore.testing.transfer.awaited import within
from tests.etcd_server import EtcdServer
from tests.ports import free_ports
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, refusal, running_system

ANSWER_MARGIN_S = 0.3
"""A node gives the reason this much before the asker stops listening."""
SIZES = (1000, 100_000)
KEYS = [b"block-%d" % number for number in range(20)]
VALUES = [value_of(key, 0, SIZES[number % 2]) for number, key in enumerate(KEYS)]


@pytest.fixture
def own_etcd(etcd_server_factory: Callable[..., EtcdServer]) -> EtcdServer:
    return etcd_server_factory()


@pytest.fixture
def running(tmp_path: Path, own_etcd: EtcdServer) -> Iterator[System]:
    with running_system(tmp_path, "--dram 32MiB", catalog=f"etcd://{own_etcd.host_port}", master="--lease-ttl-s 20") as started:
        yield started


@pytest.mark.promise("settings-checked")
def test_etcd_down_at_start_is_one_line_and_code_2() -> None:
    [port] = free_ports(1)
    flags = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--catalog-timeout-s", "1")
    line = refusal("tests.tuned_daemon", "kvstore-master", *flags, "--catalog", f"etcd://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in line


def put_fails(client: Client, key: bytes, value: bytes, deadline_s: float) -> None:
    """The put waits for most of its deadline and fails as one that may be tried again."""
    before_s = time.monotonic()
    with within(deadline_s), pytest.raises((CatalogUnavailable, DeadlineExceeded)) as failure:
        client.put(key, value, deadline_s=deadline_s)
    assert isinstance(failure.value, Retry)
    assert time.monotonic() - before_s > deadline_s - ANSWER_MARGIN_S


@pytest.mark.promise("etcd-outage")
@pytest.mark.promise("no-partial-blocks")
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_etcd_outage_keeps_reads_and_acknowledged_puts(running: System, own_etcd: EtcdServer, how: str) -> None:
    with running.client() as client, running.remote_client() as remote:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        own_etcd.kill() if how == "killed" else own_etcd.freeze()
        for reader in (client, remote):
            assert reader.get_batch(KEYS) == VALUES
            assert reader.exists_batch([*KEYS, b"other"]) == [True] * len(KEYS) + [False]
            assert reader.match_prefix(KEYS) == len(KEYS)
        for size in SIZES:
            key = b"while away, %d bytes" % size
            put_fails(client, key, value_of(key, 0, size), deadline_s=1.0)
            assert remote.exists(key) is False, "no other host sees what is not durable; the node shows its own what it holds"
        own_etcd.start() if how == "killed" else own_etcd.thaw()
        assert client.put(b"afterwards", VALUES[0], deadline_s=DEADLINE_S) is True
        for size in SIZES:
            key = b"while away, %d bytes" % size
            client.put(key, value_of(key, 1, size), deadline_s=DEADLINE_S)  # False if the first one took effect after all
            assert client.get(key) in (value_of(key, 0, size), value_of(key, 1, size))
        running.masters[0].stop()
        running.start_master()
        running.await_alive("n0")
        assert remote.get_batch([*KEYS, b"afterwards"]) == [*VALUES, VALUES[0]]
        assert client.exists_batch(KEYS) == [True] * len(KEYS)
