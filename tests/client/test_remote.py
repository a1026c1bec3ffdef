"""Promises of remote.py, with real engines on this host: which nodes' engines are used, and what is remembered of them for how long."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvstore.client.connections.engine_copies import RemoteMemory
from kvstore.client.connections.routes import DaemonRoute, KnownNode, nowhere
from kvstore.protocol.errors import Unreachable
from kvstore.rpc.address import Address
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology import netlink
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.model import ETHERNET, LOOPBACK, Nic

SETTINGS = TransferSettings(transports="tcp", rails="lo")
DEADLINE_S = 10.0
VALUE = b"value" * 1000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def remote(clock: Clock) -> Iterator[RemoteMemory]:
    remote = RemoteMemory(SETTINGS, clock)
    yield remote
    remote.close()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., TransferEngine]]:
    engines: list[TransferEngine] = []

    def make(name: str = "node", settings: TransferSettings = SETTINGS) -> TransferEngine:
        engines.append(TransferEngine(name, settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def node(engine: TransferEngine | None, node_id: int = 1, *, revision: int = 0) -> KnownNode:
    transfer = engine.describe() if engine is not None else b""
    return KnownNode(node_id, f"n{node_id}", DaemonRoute(Address("127.0.0.1", 1), nowhere), revision, transfer)


def read(remote: RemoteMemory, engine: TransferEngine, of: KnownNode) -> bytes:
    """A value that the node shows, through the client's engine."""
    shown = engine.register(VALUE)
    found = bytearray(len(VALUE))
    region = remote.region(remote.peer(of), engine.export(shown))
    remote.engine.transfer([(region, found, len(VALUE))], deadline_s=DEADLINE_S)
    shown.close()
    return bytes(found)


MakeEngine = Callable[..., TransferEngine]


def test_unreadable_interfaces_raise_unreachable(remote: RemoteMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netlink, "_dump", refuse)
    with pytest.raises(Unreachable, match="the topology of this host is unknown"):
        _ = remote.engine


def test_refresh_finds_new_links(remote: RemoteMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not remote.refresh(), "no engine yet"
    remote._settings = TransferSettings(transports="tcp")
    whole = Discovery.configured(remote._settings).read_topology()
    only_loopback = replace(whole, nics=tuple(nic for nic in whole.nics if nic.kind == LOOPBACK))
    with monkeypatch.context() as patch:
        patch.setattr(Discovery, "read_topology", lambda _: only_loopback)
        assert [agent.rail.device for agent in remote.engine.agents] == ["lo"]
        assert not remote.refresh(), "nothing has changed"
    another = Nic("lo1", ETHERNET, "lo1", ("127.0.0.2",))
    with monkeypatch.context() as patch:
        patch.setattr(Discovery, "read_topology", lambda _: replace(only_loopback, nics=(*only_loopback.nics, another)))
        assert remote.refresh()
    assert [agent.rail.device for agent in remote.engine.agents] == ["lo1"]


def test_nodes_that_swap_their_ids_are_both_read(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    """A master without a durable catalog reassigns ids."""
    one, two = make_engine("one"), make_engine("two")
    for first, second in ((1, 2), (2, 1)):
        remote.peer(node(one, first))
        assert read(remote, two, node(two, second)) == VALUE
        assert read(remote, one, node(one, first)) == VALUE
    assert {peer.name for peer in remote.engine.peers()} == {"one", "two"}
