"""Promises of rails.py: agents by transport and rail, and the routes to peers."""

import importlib.util
import pathlib
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from kvstore.protocol.errors import ConfigError, ProtocolError
from kvstore.rpc.address import network_id
from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import AgentInfo, EngineInfo
from kvstore.transfer.memory.region import Exports, Region
from kvstore.transfer.paths.path_chooser import Path
from kvstore.transfer.paths.peer import Peer
from kvstore.transfer.paths.rails import AgentFactory, RailAgents, chosen_transports, local_address_towards, reaches
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.target import Target
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.model import INFINIBAND, LOOPBACK, Nic, Topology
from tests.ports import free_ports
from tests.security.tls.certified import certificates, shared
from tests.transfer.faulty import FAULTY, SPARE, FaultyAgent, settings, topology

LOOPBACK_RAIL = Rail("lo", "127.0.0.1")
NOWHERE = "192.0.2.254"
"""Address of TEST-NET-1, which no host has."""
LOOP = Nic("lo", LOOPBACK, "lo", ("127.0.0.1", "::1"))
ETH = Nic("eth0", interface="eth0", addresses=("192.0.2.1", "2001:db8::1"), numa_node=1, speed_gbit_s=25.0)
ETH6 = Nic("eth1", interface="eth1", addresses=("2001:db8::2",))
DOWN = Nic("eth2", interface="eth2", addresses=("192.0.2.3",), is_up=False)
FABRIC = Nic("mlx5_0", INFINIBAND, numa_node=0, speed_gbit_s=400.0)
IP_FABRIC = replace(FABRIC, name="mlx5_1", interface="ib1", addresses=("192.0.2.9",))
USUAL = Topology("usual", nics=(LOOP, ETH, ETH6, DOWN))
CLUSTER = Topology("cluster", nics=(LOOP, ETH, FABRIC, IP_FABRIC))
ALONE = Topology("alone", nics=(LOOP,))


def own_addresses(version: int) -> list[str]:
    usable = [address for nic in Discovery().read_topology().nics if nic.is_usable for address in nic.addresses]
    return [address for address in usable if (":" in address) == (version == 6)]


@pytest.mark.parametrize("version", [4, 6])
def test_this_host_is_reached_from_its_own_addresses(version: int) -> None:
    for address in own_addresses(version):
        assert local_address_towards(address) == address


def test_the_loopback_reaches_this_host_only() -> None:
    outside = Rail("eth0", NOWHERE)
    for local, remote in ((LOOPBACK_RAIL, LOOPBACK_RAIL), (LOOPBACK_RAIL, outside), (outside, LOOPBACK_RAIL)):
        assert not reaches(local, remote, [local], same_host=False)
    for address in own_addresses(4):
        assert reaches(LOOPBACK_RAIL, Rail("any", address), [LOOPBACK_RAIL], same_host=True)
        assert reaches(Rail("any", address), LOOPBACK_RAIL, [Rail("any", address)], same_host=True)


def test_reaches_follows_the_kernels_route() -> None:
    chosen, other = Rail("eth0", local_address_towards(NOWHERE) or "127.0.0.2"), Rail("eth1", "192.0.2.77")
    remote = Rail("eth0", NOWHERE if local_address_towards(NOWHERE) else "127.0.0.2")
    assert reaches(chosen, remote, [chosen, other], same_host=True)
    if chosen.address != "127.0.0.2":
        assert not reaches(other, remote, [chosen, other], same_host=True)
    assert reaches(other, remote, [other], same_host=True), "none of our rails is the kernel's choice: all may be tried"


class Makers:
    """Makes Makers; closes the targets that they share with agents."""

    def __init__(self) -> None:
        self.targets: list[Target] = []

    def __call__(self, transports: str = "auto", *, rails: str = "", listens: bool = True, listen_port: int = 0) -> AgentFactory:
        settings, exports = TransferSettings(transports=transports, rails=rails, listen_port=listen_port), Exports()
        self.targets.append(Target("me", exports, settings))
        return AgentFactory("me", settings, exports, self.targets[-1], listens=listens)


@pytest.fixture
def maker() -> Iterator[Makers]:
    makers = Makers()
    yield makers
    for target in makers.targets:
        target.close()


def installed(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these libraries were there, and others of fabrics not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in modules else None)


def test_auto_with_tls_chooses_encrypted_transports(maker: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "ucxx", "nixl")
    assert chosen_transports(TransferSettings(), CLUSTER, is_tls=True) == ["shm", "tcp"]
    assert chosen_transports(TransferSettings(allow_plaintext_rdma=True), CLUSTER, is_tls=True) == ["shm", "ucx", "tcp"]
    named = TransferSettings(transports="shm,nixl,tcp,a:B")
    with pytest.raises(ConfigError, match=r"^transports names nixl, a:B, which nothing encrypts, beside TLS"):
        chosen_transports(named, CLUSTER, is_tls=True)
    allowed = replace(named, allow_plaintext_rdma=True)
    assert chosen_transports(allowed, CLUSTER, is_tls=True) == chosen_transports(named, CLUSTER) == ["shm", "nixl", "tcp", "a:B"]


def test_over_tcp_an_agent_of_certificates_speaks_tls(maker: Makers) -> None:
    settings, exports = TransferSettings(transports="tcp"), Exports()
    maker.targets.append(Target("me", exports, settings))
    tls = certificates(shared().node("one"))
    made = AgentFactory("me", settings, exports, maker.targets[-1], listens=True, tls=tls).make("tcp", Rail("lo", "127.0.0.1"))
    with closing(made):
        assert b" tls1 kvstore://node/one 127.0.0.1:" in b" " + made.metadata().partition(b"tcp ")[2]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (("nixl", "ucxx"), ["shm", "ucx", "tcp"]),
        (("nixl",), ["shm", "nixl", "tcp"]),
        (("ucxx",), ["shm", "ucx", "tcp"]),
        ((), ["shm", "tcp"]),
    ],
)
def test_auto_with_rdma_takes_what_is_installed(
    maker: Makers, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], expected: list[str]
) -> None:
    installed(monkeypatch, *modules)
    assert maker().transports(CLUSTER) == expected


@pytest.mark.parametrize(
    ("transports", "reason"), [("tcp,rdma", "'rdma'"), ("", "empty"), (" , ", "empty"), ("ucx,tcp,nixl", "choose one")]
)
def test_names_of_no_transport_are_refused(maker: Makers, transports: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        maker(transports).transports(USUAL)


def test_ucx_prefers_rdma_and_shm_and_nixl_have_one_rail(maker: Makers) -> None:
    assert [rail.device for rail in maker().rails("ucx", CLUSTER)] == ["mlx5_0", "mlx5_1"]
    assert [rail.device for rail in maker().rails("ucx", USUAL)] == ["eth0", "eth1"]
    assert maker().rails("ucx", Topology("no NIC is seen")) == [Rail()]
    assert maker().rails("shm", CLUSTER) == maker().rails("nixl", CLUSTER) == [Rail()]


def test_a_port_without_an_address_borrows_another_nics(maker: Makers) -> None:
    """By the loopback, which its rail would fall back to, no other host would find it."""
    rails = maker().rails("ucx", CLUSTER)
    assert [(rail.device, rail.address) for rail in rails] == [("mlx5_0", "192.0.2.1"), ("mlx5_1", "192.0.2.9")]
    assert maker(rails="mlx5_0").rails("ucx", CLUSTER)[0].address == "192.0.2.1"
    assert maker().rails("ucx", Topology("a fabric alone", nics=(LOOP, FABRIC)))[0].address == ""


def test_a_fixed_port_is_tcps_and_others_follow(maker: Makers) -> None:
    two = replace(CLUSTER, nics=(*CLUSTER.nics, replace(FABRIC, name="mlx5_2")))
    made = maker(f"ucx,tcp,{FAULTY}", listen_port=7000)
    endpoints = [(rail.address, rail.port) for transport in ("tcp", FAULTY, "ucx") for rail in made.rails(transport, two)]
    assert len(set(endpoints)) == len(endpoints) == 7
    assert {port for _, port in endpoints} == {7000, 7001, 7002, 7003, 7004}
    assert [rail.port for rail in made.rails("tcp", ALONE)] == [7000]
    assert [rail.port for rail in maker("ucx", listen_port=7000).rails("ucx", Topology("no NIC is seen"))] == [7000]
    with pytest.raises(ConfigError, match="listen_port"):
        maker("tcp,ucx", listen_port=65_535).rails("ucx", USUAL)


def test_two_transports_listen_with_one_fixed_port(maker: Makers) -> None:
    made = maker("tcp,kvstore.transfer.streams.tcp:TcpConnection", listen_port=free_ports(2)[0])
    with ExitStack() as stack:
        for transport in ("tcp", "kvstore.transfer.streams.tcp:TcpConnection"):
            for rail in made.rails(transport, ALONE):
                stack.enter_context(closing(made.make(transport, rail)))


@pytest.mark.parametrize(("transport", "module", "kind"), [("ucx", "ucx.connection", "UcxConnection"), ("nixl", "nixl.agent", "NixlAgent")])
def test_agents_of_fabrics_are_imported_when_they_are_asked_for(
    maker: Makers, monkeypatch: pytest.MonkeyPatch, transport: str, module: str, kind: str
) -> None:
    """The library itself is not needed for that: plug-ins stand in its place."""
    importlib.import_module(f"kvstore.transfer.{module}")
    from kvstore.transfer.streams.tcp import TcpConnection

    monkeypatch.setattr(f"kvstore.transfer.{module}.{kind}", TcpConnection if transport == "ucx" else lambda *arguments: arguments)
    made = maker().make(transport, Rail("lo", "127.0.0.1"))
    if isinstance(made, TransferAgent):
        assert made.transport == "tcp"
        made.close()
    else:
        assert made[:2] == ("me", Rail("lo", "127.0.0.1"))


def test_a_plug_in_of_either_family_is_made_by_its_name(maker: Makers) -> None:
    with closing(maker().make(FAULTY, Rail("rail0"))) as agent:
        assert isinstance(agent, FaultyAgent)
        assert (agent.name, agent.rail) == ("me", Rail("rail0"))
    with closing(maker().make("kvstore.transfer.streams.tcp:TcpConnection", Rail("lo", "127.0.0.1"))) as over_connections:
        assert isinstance(over_connections, ConnectionAgent)
        assert over_connections.transport == "tcp"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:Agent", "cannot be imported.*no_such_module"),
        (":Agent", "cannot be imported"),
        (".relative:Agent", "cannot be imported"),
        ("tests.transfer.faulty:NoSuchAgent", "cannot be imported.*NoSuchAgent"),
        ("tests.transfer.faulty:", "cannot be imported"),
        ("tests.transfer.faulty:topology", "neither a Connection nor a TransferAgent"),
        ("tests.transfer.faulty:FaultyRemote", "neither a Connection nor a TransferAgent"),
        ("tests.transfer.faulty:AbstractAgent", "lacks close, export|lacks close, load_remote"),
        ("broken_plug_in:Agent", "cannot be imported.*ZeroDivisionError"),
    ],
)
def test_what_is_no_plug_in_is_a_clear_error(
    maker: Makers, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    (tmp_path / "broken_plug_in.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        maker().make(path, Rail())
    assert "broken_plug_in" not in sys.modules


class Opened:
    """Rails that are closed at the end, with the target that they need."""

    def __init__(self) -> None:
        self._made: list[tuple[RailAgents, Target]] = []

    def __call__(self, transports: str, *rails: str) -> RailAgents:
        config, exports = settings(transports), Exports()
        target = Target("me", exports, config)
        opened = RailAgents(AgentFactory("me", config, exports, target, listens=True))
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


def loaded(rails: RailAgents) -> int:
    return sum(len(agent.loaded) for agent in rails.agents if isinstance(agent, FaultyAgent))


def entry(rail: int, transport: str = "faulty", metadata: bytes = b"", speed_gbit_s: float = 0.0) -> AgentInfo:
    """An agent of the peer's."""
    told = metadata or f'["{transport}", "peer", "rail{rail}"]'.encode()
    return AgentInfo(transport, Rail(f"rail{rail}", f"127.0.1.{rail + 1}", speed_gbit_s=speed_gbit_s), told)


def described(*entries: AgentInfo, host: str = "") -> EngineInfo:
    return EngineInfo("peer", host or network_id(), entries)


def peer_of(rails: RailAgents, info: EngineInfo) -> Peer:
    peer = Peer(info, settings(), random.Random(0), lambda place: ())
    peer.set_routes(info, rails.routes(info, None))
    return peer


def names(rails: RailAgents) -> list[tuple[str, str]]:
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


def test_an_unusable_new_rail_is_logged_and_retried(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
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


def test_shm_reaches_containers_that_share_the_run_folder(opened: Opened) -> None:
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


def test_export_describes_per_rail_only_if_rails_differ(opened: Opened) -> None:
    region = Region(memoryview(bytearray(8)))
    assert opened(FAULTY, "rail0", "rail1").export(region) == {"faulty": b"faulty"}
    keyed = "tests.transfer.faulty:KeyedAgent"
    assert opened(keyed, "rail0", "rail9").export(region) == {"keyed@rail0": b"rail0"}
    assert opened(keyed, "rail0").export(region) == {"keyed": b"rail0"}
    assert opened(keyed, "rail9").export(region) == {}
