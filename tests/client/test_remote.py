"""Promises of remote.py, with real engines on this host: which nodes' engines are used, and what is remembered of them for how long."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvstore.client.engine_copies import REST_S, RemoteMemory, SlabId
from kvstore.client.routes import KnownNode, Route, nowhere
from kvstore.protocol.errors import Closed, ConfigError, Unreachable
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
    return KnownNode(node_id, f"n{node_id}", Route(Address("127.0.0.1", 1), nowhere), revision, transfer)


def read(remote: RemoteMemory, engine: TransferEngine, of: KnownNode) -> bytes:
    """A value that the node shows, through the client's engine."""
    shown = engine.register(VALUE)
    found = bytearray(len(VALUE))
    region = remote.region(remote.peer(of), engine.export(shown))
    remote.engine.transfer([(region, found, len(VALUE))], deadline_s=DEADLINE_S)
    shown.close()
    return bytes(found)


MakeEngine = Callable[..., TransferEngine]


def test_the_engine_is_made_at_its_first_use_once_and_serves_nobody(remote: RemoteMemory) -> None:
    assert not remote.is_started
    engine = remote.engine
    assert remote.is_started
    assert remote.engine is engine
    assert node(engine).transfer
    assert b'"agents":[]' in engine.describe()


def test_settings_that_cannot_be_met_are_told(clock: Clock) -> None:
    remote = RemoteMemory(TransferSettings(transports="tcp", rails="mlx5_9"), clock)
    with pytest.raises(ConfigError, match="mlx5_9"):
        _ = remote.engine
    assert not remote.is_started


def test_where_the_system_does_not_tell_its_interfaces_no_node_can_be_reached(
    remote: RemoteMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netlink, "_dump", refuse)
    with pytest.raises(Unreachable, match="the topology of this host is unknown"):
        _ = remote.engine


def test_links_that_come_up_after_the_start_are_used_once_looked_for(remote: RemoteMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not remote.refresh(), "no engine yet"
    remote._settings = TransferSettings(transports="tcp")
    whole = Discovery.configured(remote._settings).look()
    only_loopback = replace(whole, nics=tuple(nic for nic in whole.nics if nic.kind == LOOPBACK))
    with monkeypatch.context() as patch:
        patch.setattr(Discovery, "look", lambda _: only_loopback)
        assert [agent.rail.device for agent in remote.engine.agents] == ["lo"]
        assert not remote.refresh(), "nothing has changed"
    another = Nic("lo1", ETHERNET, "lo1", ("127.0.0.2",))
    with monkeypatch.context() as patch:
        patch.setattr(Discovery, "look", lambda _: replace(only_loopback, nics=(*only_loopback.nics, another)))
        assert remote.refresh()
    assert [agent.rail.device for agent in remote.engine.agents] == ["lo1"]


def test_links_that_cannot_be_looked_at_stay_as_they_were(remote: RemoteMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = remote.engine.agents

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netlink, "_dump", refuse)
    assert not remote.refresh()
    assert remote.engine.agents == agents


def test_a_closed_client_makes_no_engine(remote: RemoteMemory) -> None:
    engine = remote.engine
    remote.close()
    remote.close()
    with pytest.raises(Closed):
        _ = remote.engine
    with pytest.raises(Closed):
        engine.connect(engine.describe())


def test_a_node_without_an_engine_is_not_usable(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    assert not remote.is_usable(node(None))
    assert remote.is_usable(node(make_engine()))


def test_an_engine_that_failed_rests_unless_it_describes_itself_anew(remote: RemoteMemory, make_engine: MakeEngine, clock: Clock) -> None:
    engine = make_engine()
    remote.failed(node(engine))
    assert not remote.is_usable(node(engine))
    assert remote.is_usable(node(engine, revision=1)), "another way to it may work"
    assert remote.is_usable(node(engine, 2)), "another node has not failed"
    remote.failed(node(engine, revision=1))
    assert not remote.is_usable(node(engine, revision=1))
    clock.now_ns = int(REST_S * 1e9) - 1
    assert not remote.is_usable(node(engine, revision=1))
    clock.now_ns += 1
    assert remote.is_usable(node(engine, revision=1))


def test_a_node_is_one_peer_and_what_it_shows_is_read(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert read(remote, engine, node(engine)) == VALUE
    assert remote.peer(node(engine)) is remote.peer(node(engine))


def test_a_node_that_describes_itself_anew_is_the_same_peer_by_another_way(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    engine = make_engine("node")
    peer = remote.peer(node(engine))
    engine.close()
    moved = make_engine("node")  # at another port
    assert remote.peer(node(moved, revision=1)) is peer
    assert read(remote, moved, node(moved, revision=1)) == VALUE


def test_the_earlier_process_of_a_node_is_no_peer_any_more(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    first = remote.peer(node(make_engine("first")))
    second = remote.peer(node(make_engine("second"), revision=1))
    assert remote.engine.peers() == [second]
    assert not first.is_connected


def test_nodes_that_swap_their_ids_are_both_read(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    """A master without a lasting catalog gives ids anew."""
    one, two = make_engine("one"), make_engine("two")
    for first, second in ((1, 2), (2, 1)):
        remote.peer(node(one, first))
        assert read(remote, two, node(two, second)) == VALUE
        assert read(remote, one, node(one, first)) == VALUE
    assert {peer.name for peer in remote.engine.peers()} == {"one", "two"}


def test_an_id_that_changes_hands_leaves_the_node_that_had_it_a_peer_under_its_new_one(
    remote: RemoteMemory, make_engine: MakeEngine
) -> None:
    one, two = make_engine("one"), make_engine("two")
    peer = remote.peer(node(one, 1))
    assert remote.peer(node(one, 7)) is peer
    remote.peer(node(two, 1))
    assert peer.is_connected
    assert read(remote, one, node(one, 7)) == VALUE


def test_a_description_that_cannot_be_used_is_unreachable(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    broken = KnownNode(1, "n1", Route(Address("127.0.0.1", 1), nowhere), 0, b"of a later release")
    with pytest.raises(Unreachable, match="the transfer engine of node n1 cannot be used"):
        remote.peer(broken)
    with pytest.raises(Unreachable, match="no way to shm only"):
        remote.peer(node(make_engine("shm only", TransferSettings(transports="shm"))))
    engine = make_engine()
    with pytest.raises(Unreachable, match="a region of node cannot be used"):
        remote.region(remote.peer(node(engine)), b"of a later release")


def test_slabs_are_remembered_until_they_are_forgotten(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    engine = make_engine()
    region = remote.region(remote.peer(node(engine)), engine.export(engine.register(VALUE)))
    one, two, other = SlabId(1, 5, 10), SlabId(1, 5, 11), SlabId(2, 5, 10)
    assert remote.missing([one, two, one]) == [one, two]
    for slab in (one, two, other):
        remote.add(slab, region)
    assert remote.missing([one, two, other]) == []
    assert remote.slab(one) is region
    remote.forget(1)
    assert remote.slab(one) is None
    assert remote.missing([one, two, other]) == [one, two]


def test_the_slabs_of_a_nodes_earlier_process_are_forgotten(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    engine = make_engine()
    region = remote.region(remote.peer(node(engine)), engine.export(engine.register(VALUE)))
    for slab in (SlabId(1, 5, 10), SlabId(2, 5, 10), SlabId(1, 6, 10)):
        remote.add(slab, region)
    assert remote.missing([SlabId(1, 5, 10), SlabId(2, 5, 10), SlabId(1, 6, 10)]) == [SlabId(1, 5, 10)]


def test_of_slabs_that_a_node_has_shown_the_oldest_are_forgotten(
    remote: RemoteMemory, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node gives slabs up and makes others for as long as it lives, and no two have one number."""
    monkeypatch.setattr("kvstore.client.engine_copies.MAX_SLABS", 3)
    engine = make_engine()
    region = remote.region(remote.peer(node(engine)), engine.export(engine.register(VALUE)))
    slabs = [SlabId(1, 5, number) for number in range(5)]
    for slab in slabs:
        remote.add(slab, region)
    assert remote.missing(slabs) == slabs[:2]


def test_a_failed_engines_slabs_are_shown_anew(remote: RemoteMemory, make_engine: MakeEngine) -> None:
    engine = make_engine()
    remote.add(SlabId(1, 5, 10), remote.region(remote.peer(node(engine)), engine.export(engine.register(VALUE))))
    remote.failed(node(engine))
    assert remote.slab(SlabId(1, 5, 10)) is None
