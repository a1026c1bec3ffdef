"""Which transports and rails an engine has, by its settings and its machine; and plug-ins by their names."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports
from kvstore.transfer.paths.rails import Maker, chosen_transports
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.target import Target
from kvstore.transfer.topology.model import INFINIBAND, LOOPBACK, Nic, Topology
from tests.ports import free_ports
from tests.security.tls.certified import certificates, shared
from tests.transfer.faulty import FAULTY, FaultyAgent

LOOP = Nic("lo", LOOPBACK, "lo", ("127.0.0.1", "::1"))
ETH = Nic("eth0", interface="eth0", addresses=("192.0.2.1", "2001:db8::1"), numa_node=1, speed_gbit_s=25.0)
ETH6 = Nic("eth1", interface="eth1", addresses=("2001:db8::2",))
DOWN = Nic("eth2", interface="eth2", addresses=("192.0.2.3",), is_up=False)
FABRIC = Nic("mlx5_0", INFINIBAND, numa_node=0, speed_gbit_s=400.0)
IP_FABRIC = replace(FABRIC, name="mlx5_1", interface="ib1", addresses=("192.0.2.9",))
USUAL = Topology("usual", nics=(LOOP, ETH, ETH6, DOWN))
CLUSTER = Topology("cluster", nics=(LOOP, ETH, FABRIC, IP_FABRIC))
ALONE = Topology("alone", nics=(LOOP,))


class Makers:
    """Makes Makers; closes the targets that they share with agents."""

    def __init__(self) -> None:
        self.targets: list[Target] = []

    def __call__(self, transports: str = "auto", *, rails: str = "", listens: bool = True, listen_port: int = 0) -> Maker:
        settings, exports = TransferSettings(transports=transports, rails=rails, listen_port=listen_port), Exports()
        self.targets.append(Target("me", exports, settings))
        return Maker("me", settings, exports, self.targets[-1], listens=listens)


@pytest.fixture
def maker() -> Iterator[Makers]:
    makers = Makers()
    yield makers
    for target in makers.targets:
        target.close()


def installed(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these libraries were there, and others of fabrics not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in modules else None)


def test_with_tls_auto_leaves_out_what_is_not_encrypted_unless_that_is_said(maker: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
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
    made = Maker("me", settings, exports, maker.targets[-1], listens=True, tls=tls).make("tcp", Rail("lo", "127.0.0.1"))
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


def test_ucx_prefers_rdma_and_the_host_is_one_rail_for_shm_and_nixl(maker: Makers) -> None:
    assert [rail.device for rail in maker().rails("ucx", CLUSTER)] == ["mlx5_0", "mlx5_1"]
    assert [rail.device for rail in maker().rails("ucx", USUAL)] == ["eth0", "eth1"]
    assert maker().rails("ucx", Topology("no NIC is seen")) == [Rail()]
    assert maker().rails("shm", CLUSTER) == maker().rails("nixl", CLUSTER) == [Rail()]


def test_a_fabric_port_without_an_address_is_introduced_by_another_nics(maker: Makers) -> None:
    """By the loopback, which its rail would fall back to, no other host would find it."""
    rails = maker().rails("ucx", CLUSTER)
    assert [(rail.device, rail.address) for rail in rails] == [("mlx5_0", "192.0.2.1"), ("mlx5_1", "192.0.2.9")]
    assert maker(rails="mlx5_0").rails("ucx", CLUSTER)[0].address == "192.0.2.1"
    assert maker().rails("ucx", Topology("a fabric alone", nics=(LOOP, FABRIC)))[0].address == ""


def test_a_fixed_port_is_tcps_and_whatever_else_listens_on_the_same_address_has_one_behind_it(maker: Makers) -> None:
    two = replace(CLUSTER, nics=(*CLUSTER.nics, replace(FABRIC, name="mlx5_2")))
    made = maker(f"ucx,tcp,{FAULTY}", listen_port=7000)
    places = [(rail.address, rail.port) for transport in ("tcp", FAULTY, "ucx") for rail in made.rails(transport, two)]
    assert len(set(places)) == len(places) == 7
    assert {port for _, port in places} == {7000, 7001, 7002, 7003, 7004}
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
    maker: Makers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    (tmp_path / "broken_plug_in.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        maker().make(path, Rail())
    assert "broken_plug_in" not in sys.modules
