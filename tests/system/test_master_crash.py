"""A master killed with SIGKILL: after its restart every acknowledged block is found and can be read, in each state of the node."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer
from tests.system.history import value_of
from tests.system.running import System
from tests.system.test_node_crash import is_on_nvme

BLOCK_BYTES = 128 << 10
DRAM_BLOCKS, ALL_BLOCKS = 16, 48
KEYS = [b"block-%d" % number for number in range(ALL_BLOCKS)]
VALUES = [value_of(key, 0, BLOCK_BYTES) for key in KEYS]


def start_node(system: System, *, dram_blocks: int = DRAM_BLOCKS) -> None:
    system.start_node("n0", "--dram", str(dram_blocks * BLOCK_BYTES), "--nvme", f"{system.folder / 'nvme'}:32MiB")


@pytest.fixture(params=["memory", "lmdb", pytest.param("etcd", marks=pytest.mark.slow)])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of each kind; etcd is a real one."""
    if request.param == "etcd":
        return f"{request.getfixturevalue('etcd_url')}/{tmp_path.name}"
    return {"memory": "memory:", "lmdb": f"lmdb:{tmp_path / 'catalog'}"}[request.param]


@pytest.fixture
def running(tmp_path: Path, catalog: str) -> Iterator[System]:
    with System(tmp_path, catalog) as started:
        started.start_master()
        start_node(started)
        yield started


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.promise("put-ack-cluster")
@pytest.mark.promise("records-durable")
def test_with_the_node_alive_every_acknowledged_block_is_read(running: System) -> None:
    with running.client() as client:
        assert client.put_batch(KEYS, VALUES, namespace="of the test") == [True] * ALL_BLOCKS
        running.masters[0].kill()
        assert client.get_batch(KEYS) == VALUES, "places that are known need no master"
        running.start_master()
        running.await_alive("n0")
        assert client.exists_batch(KEYS) == [True] * ALL_BLOCKS
    with running.client() as newcomer:
        assert newcomer.get_batch(KEYS) == VALUES
        assert newcomer.put_batch(KEYS[:2], VALUES[:2]) == [False, False]


@pytest.mark.promise("records-durable")
def test_node_killed_too_serves_nvme_blocks_and_no_others(running: System) -> None:
    with running.client() as client:
        client.put_batch(KEYS, VALUES)
        running.await_settled()
        durable = is_on_nvme(client, KEYS)
        assert durable.count(True) >= ALL_BLOCKS - DRAM_BLOCKS
    running.masters[0].kill()
    running.kill_node()
    running.start_master()
    running.start_node()
    with running.client() as client:
        assert client.exists_batch(KEYS) == durable
        assert client.get_batch(KEYS) == [value if was else None for value, was in zip(VALUES, durable, strict=True)]


@pytest.mark.promise("remove-stays-removed")
@pytest.mark.parametrize("catalog", ["lmdb"], indirect=True)
def test_with_the_node_killed_too_a_removed_block_stays_removed(running: System) -> None:
    with running.client() as client:
        client.put_batch(KEYS, VALUES)
        running.await_settled()
        key = KEYS[is_on_nvme(client, KEYS).index(True)]
        assert client.remove([key]) == 1
        assert client.put(key, value_of(key, 1, BLOCK_BYTES))
    running.kill_node()
    running.masters[0].kill()
    running.start_master()
    running.start_node()
    with running.client() as client:
        assert client.get(key) is None


@pytest.mark.promise("resync")
@pytest.mark.parametrize("catalog", ["memory", "lmdb"], indirect=True)
def test_node_away_has_no_blocks_and_all_after_return(running: System) -> None:
    with running.client(deadline_s=5.0) as client:
        client.put_batch(KEYS, VALUES)
        running.await_settled()
        durable = is_on_nvme(client, KEYS)
    running.kill_node()
    running.masters[0].kill()
    running.start_master()
    with running.client() as client:
        assert client.exists_batch(KEYS) == [False] * ALL_BLOCKS
        assert client.get_batch(KEYS) == [None] * ALL_BLOCKS
        running.start_node()
        assert client.exists_batch(KEYS) == durable


@pytest.mark.promise("records-durable")
def test_puts_acknowledged_during_etcd_kill_are_found(tmp_path: Path, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    etcd = etcd_server_factory()
    with System(tmp_path, f"etcd://{etcd.host_port}") as system:
        system.start_master()
        start_node(system, dram_blocks=2 * ALL_BLOCKS)
        with system.client(deadline_s=20.0) as client:
            client.put_batch(KEYS[:20], VALUES[:20])
            etcd.restart()
            assert client.put_batch(KEYS, VALUES) == [False] * 20 + [True] * (ALL_BLOCKS - 20)
            system.masters[0].kill()
            etcd.restart()
            system.start_master()
            system.await_alive("n0")
            assert client.get_batch(KEYS) == VALUES
            assert client.exists_batch(KEYS) == [True] * ALL_BLOCKS
