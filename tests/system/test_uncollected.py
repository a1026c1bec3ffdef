"""Daemons free what they use up without Python's collector, which rarely comes by in one: a connection that came and went would hold its
buffers for hours, and a client that looks every second would take all memory."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client.control import Control
from kvstore.rpc.address import parse_address
from tests.garbage import ours
from tests.system.collected import FOLDER, garbage
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System
from tests.system.test_leaks import KEYS, mixed

OPERATIONS, CONNECTS = 150, 5
pytestmark = pytest.mark.slow


class Watched:
    """A system whose daemons report the objects that they leave to the garbage collector."""

    def __init__(self, system: System, folder: Path) -> None:
        self.system = system
        self._folder = folder

    @contextmanager
    def leaves_nothing(self, what: str) -> Iterator[None]:
        """Nothing of ours is left in any daemon, by `what` is done."""
        daemons = {**self.system.nodes, **{f"master {index}": child for index, child in self.system.masters.items()}}
        pids = {name: child.pid for name, child in daemons.items()}
        for pid in pids.values():
            garbage(pid, self._folder)
        yield
        for name, pid in pids.items():
            assert not ours(garbage(pid, self._folder)), f"left by {name}: {what}"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    folder = tmp_path / "garbage"
    folder.mkdir()
    with System(tmp_path) as system:
        system.node_module, system.master_module = "tests.system.collected_daemon", "tests.system.collected_daemon"
        system.environments.update((name, {FOLDER: str(folder)}) for name in ("n0", "n1", "master-0"))
        system.start_master()
        for name in ("n0", "n1"):
            system.start_node(name, "--dram", "6MiB", "--nvme", f"{tmp_path / f'nvme-{name}'}:64MiB")
        yield Watched(system, folder)


def test_operations_leave_no_garbage_to_collect(watched: Watched) -> None:
    system = watched.system
    with (
        watched.leaves_nothing("operations"),
        system.client() as first,
        system.remote_client() as second,
        system.client(ack="node") as third,
    ):
        for seed, client in enumerate((first, second, third)):
            mixed(client, seed, OPERATIONS)
            client.put_batch(KEYS[:8], [value_of(key, 0, 50_000) for key in KEYS[:8]])
            client.pin(KEYS[:4], ttl_s=0.01)
            client.flush()
            client.remove_matching(pattern="block-1*")
    for connect in (system.client, system.remote_client):
        with watched.leaves_nothing("clients that come and go"):
            for number in range(CONNECTS):
                with connect() as client:
                    client.put(KEYS[number], value_of(KEYS[number], 0, 100_000))
                    with client.view(KEYS[number]):
                        client.get_batch(KEYS[:40])
    with watched.leaves_nothing("looks at the control plane"):
        for _ in range(CONNECTS):
            with Control.find(system.settings) as control:
                control.status()


def test_strangers_leave_nothing_to_the_collector(watched: Watched) -> None:
    place = parse_address(watched.system.address)
    with watched.leaves_nothing("strangers"):
        for said in (b"", b"GET /metrics HTTP/1.0\r\nHost: kvstore\r\n\r\n") * CONNECTS:
            with socket.create_connection((place.host, place.port)) as stranger:
                if said:
                    stranger.sendall(said)
                    assert stranger.recv(1 << 10)


def test_node_searching_its_master_leaves_no_garbage(watched: Watched) -> None:
    system, place = watched.system, parse_address(watched.system.address)
    system.masters[0].kill()
    with socket.create_server((place.host, place.port)) as listener:
        listener.settimeout(DEADLINE_S)
        del system.masters[0]
        with watched.leaves_nothing("searches"):
            for _ in range(2 * CONNECTS):
                listener.accept()[0].close()
