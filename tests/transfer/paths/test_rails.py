"""An engine's agents as links come and go, and the routes that they make to a peer."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.protocol.errors import ProtocolError
from kvstore.rpc.address import network_id
from kvstore.transfer.agent import Rail
from kvstore.transfer.description import AgentInfo, EngineInfo
from kvstore.transfer.memory.region import Exports, Region
from kvstore.transfer.paths.path_chooser import Path
from kvstore.transfer.paths.peer import Peer
from kvstore.transfer.paths.rails import Maker, Rails
from kvstore.transfer.streams.target import Target
from kvstore.transfer.topology.model import Nic
from tests.transfer.faulty import FAULTY, SPARE, FaultyAgent, SpareAgent, settings, topology


class Opened:
    """Rails that are closed at the end, with the target that they need."""

    def __init__(self) -> None:
        self._made: list[tuple[Rails, Target]] = []

    def __call__(self, transports: str, *rails: str) -> Rails:
        config, exports = settings(transports), Exports()
        target = Target("me", exports, config)
        opened = Rails(Maker("me", config, exports, target, listens=True))
        self._made.append((opened, target))
        opened.open(topology(*rails))
        return opened

    def close(self) -> None:
        for rails, target in self._made:
            rails.close()
            rails.close()
            target.close()


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.close()


def loaded(rails: Rails) -> int:
    return sum(len(agent.loaded) for agent in rails.agents if isinstance(agent, FaultyAgent))


def entry(rail: int, transport: str = "faulty", metadata: bytes = b"", speed_gbit_s: float = 0.0) -> AgentInfo:
    """An agent of the peer's."""
    told = metadata or f'["{transport}", "peer", "rail{rail}"]'.encode()
    return AgentInfo(transport, Rail(f"rail{rail}", f"127.0.1.{rail + 1}", speed_gbit_s=speed_gbit_s), told)


def described(*entries: AgentInfo, host: str = "") -> EngineInfo:
    return EngineInfo("peer", host or network_id(), entries)


def peer_of(rails: Rails, info: EngineInfo) -> Peer:
    peer = Peer(info, settings(), random.Random(0), lambda place: ())
    peer.set_routes(info, rails.routes(info, None))
    return peer


def names(rails: Rails) -> list[tuple[str, str]]:
    return [(agent.transport, agent.rail.device) for agent in rails.agents]


def test_agents_come_and_go_with_their_links_and_the_others_stay(opened: Opened) -> None:
    rails = opened(f"{SPARE},{FAULTY}", "rail0", "rail1")
    stays = rails.agents[1], rails.agents[3]
    leaves = [rails.agents[0], rails.agents[2]]
    assert rails.change(topology("rail1", "rail2")) == (leaves, True)
    assert names(rails) == [("spare", "rail1"), ("spare", "rail2"), ("faulty", "rail1"), ("faulty", "rail2")]
    assert (rails.agents[0], rails.agents[2]) == stays
    assert rails.change(topology("rail1", "rail2")) == ([], False)
    for agent in leaves:
        agent.close()


def test_a_new_rail_that_cannot_be_used_is_logged_and_tried_with_the_next_change(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    rails = opened("tcp", "rail0")
    links = topology("rail0")
    taken = replace(links, nics=(*links.nics, Nic("far", interface="far", addresses=("192.0.2.250",))))
    assert rails.change(taken) == ([], False)
    assert "rail far cannot be used by tcp" in caplog.text
    assert names(rails) == [("tcp", "rail0")]
    caplog.clear()
    rails.change(taken)
    assert "rail far" in caplog.text


def test_every_pair_that_can_speak_to_each_other_is_a_route(opened: Opened) -> None:
    rails = opened(f"{SPARE},{FAULTY}", "rail0", "rail1")
    routes = rails.routes(described(entry(0), entry(7, "spare"), entry(1, "other")), None)
    assert list(routes) == [Path("spare", f"rail{n}", "rail7") for n in (0, 1)] + [Path("faulty", f"rail{n}", "rail0") for n in (0, 1)]
    assert [route.facts.preference for route in routes.values()] == [0, 0, 1, 1]
    assert rails.routes(described(entry(0), host="another"), None) == {}, "the loopback leads to no other host"


def test_shared_memory_leads_to_this_host_only(opened: Opened) -> None:
    rails = opened("shm")
    told = AgentInfo("shm", Rail(), rails.agents[0].metadata())
    assert list(rails.routes(described(told), None)) == [Path("shm", "", "")]
    elsewhere = AgentInfo("shm", Rail(), told.metadata.replace(b"/", b"0/", 1))
    assert rails.routes(described(elsewhere), None) == {}


def test_shared_memory_leads_to_containers_that_share_the_run_folder_and_no_network(opened: Opened) -> None:
    rails = opened("shm")
    told = AgentInfo("shm", Rail(), rails.agents[0].metadata())
    assert list(rails.routes(described(told, host="another"), None)) == [Path("shm", "", "")]


def test_what_a_peer_has_already_stays_as_it_is(opened: Opened) -> None:
    rails = opened(FAULTY, "rail0")
    info = described(entry(0), entry(1))
    peer = peer_of(rails, info)
    changed = described(entry(0), entry(1, metadata=b'["faulty", "successor", "rail1"]'), entry(2))
    routes = rails.routes(changed, peer)
    first, second, third = (Path("faulty", "rail0", f"rail{n}") for n in range(3))
    assert routes[first].remote is peer.routes[first].remote
    assert routes[second].remote is not peer.routes[second].remote
    assert third in routes


def test_a_peer_with_another_secret_is_another_process_at_the_same_place(opened: Opened) -> None:
    """One that restarts under its name and its `listen_port`: who goes on as before is refused for ever."""
    rails = opened(FAULTY, "rail0")
    peer = peer_of(rails, replace(described(entry(0)), secret=b"old"))
    [before] = peer.routes.values()
    [after] = rails.routes(replace(peer.info, secret=b"new"), peer).values()
    assert after.remote is not before.remote


def test_an_agent_that_was_replaced_loads_its_peers_anew(opened: Opened) -> None:
    rails = opened(FAULTY, "rail0")
    peer = peer_of(rails, described(entry(0)))
    gone, _ = rails.change(topology())
    links = topology("rail0")
    more, _ = rails.change(replace(links, nics=(replace(links.nics[0], addresses=("127.0.1.9",)),)))
    [route] = rails.routes(peer.info, peer).values()
    assert route.agent is rails.agents[0]
    assert route.remote is not next(iter(peer.routes.values())).remote
    for agent in gone + more:
        agent.close()


def test_metadata_that_is_malformed_leaves_nothing_loaded(opened: Opened) -> None:
    rails = opened(FAULTY, "rail0")
    with pytest.raises(ProtocolError):
        rails.routes(described(entry(0), entry(1, metadata=b"garbage")), None)
    assert loaded(rails) == 0


def test_a_region_is_described_once_a_transport_or_once_a_rail_where_rails_differ(opened: Opened) -> None:
    region = Region(memoryview(bytearray(8)))
    assert opened(FAULTY, "rail0", "rail1").export(region) == {"faulty": b"faulty"}
    keyed = "tests.transfer.faulty:KeyedAgent"
    assert opened(keyed, "rail0", "rail9").export(region) == {"keyed@rail0": b"rail0"}
    assert opened(keyed, "rail0").export(region) == {"keyed": b"rail0"}
    assert opened(keyed, "rail9").export(region) == {}


def test_an_agent_that_cannot_be_closed_leaves_no_other_open(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    rails = opened(f"{FAULTY},{SPARE}", "rail0", "rail1")

    def fail(agent: FaultyAgent) -> None:
        raise RuntimeError("a mistake in a plug-in")

    with monkeypatch.context() as patch:
        patch.setattr(SpareAgent, "close", fail)
        patch.setattr(rails.agents[0], "close", lambda: fail(rails.agents[0]))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="plug-in"):
            rails.close()
    assert [agent.is_closed for agent in rails.agents if isinstance(agent, FaultyAgent)] == [False, True, False, False]
