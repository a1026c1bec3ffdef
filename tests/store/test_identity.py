"""Tests of identity.py."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size
from kvstore.store.config import NodeSettings
from kvstore.store.identity import NodeName, watch_topology
from kvstore.store.node import Node
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import unpack_engine
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.model import ETHERNET, Nic, Topology
from tests.security.tls.certified import certificates, shared, swap
from tests.store.daemons import master_flags, running, until_nodes_are
from tests.store.engines import eventually

SETTINGS = NodeSettings(listen="127.0.0.1:0")


def named(folder: Path, settings: NodeSettings = SETTINGS, tcp: str = "127.0.0.1:40001") -> NodeName:
    return NodeName(settings, "host", tcp, folder)


def test_node_name_uses_the_set_name_or_port(tmp_path: Path) -> None:
    assert named(tmp_path, replace(SETTINGS, name="gpu7")).text == "gpu7"
    assert named(tmp_path, replace(SETTINGS, listen="127.0.0.1:40001")).text == "host:40001"
    assert not list(tmp_path.iterdir())


@pytest.mark.promise("restart-keeps-nvme")
def test_node_names_in_one_folder_are_distinct_and_stable(tmp_path: Path) -> None:
    first, second = named(tmp_path), named(tmp_path)
    names = {first.text, second.text}
    assert len(names) == 2
    assert all(name.startswith("host-") for name in names)
    first.close()
    first.close()
    again = named(tmp_path, tcp="127.0.0.1:40002")
    assert again.text == first.text
    for name in (second, again):
        name.close()
    both = named(tmp_path), named(tmp_path)
    assert {name.text for name in both} == names
    for name in both:
        name.close()


@pytest.mark.promise("restart-keeps-nvme")
def test_node_name_is_kept_in_the_nvme_folder(tmp_path: Path) -> None:
    for folder in ("run", "a", "b"):
        (tmp_path / folder).mkdir()
    on = {folder: replace(SETTINGS, nvme=f"{tmp_path / folder}:1GiB") for folder in ("a", "b")}
    one = named(tmp_path / "run", on["a"])
    other = named(tmp_path / "run", on["b"])
    one.close()
    other.close()
    again = named(tmp_path / "run", on["b"])
    assert (again.text, again.text != one.text) == (other.text, True)
    again.close()
    assert not list((tmp_path / "run").iterdir())


def test_an_unwritable_name_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot store the node's name in .*/none: No such file or directory: set name"):
        named(tmp_path / "none")


def test_a_symlinked_name_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "node-0.name").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="cannot store"):
        named(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.promise("restart-keeps-nvme")
def test_a_killed_node_keeps_its_name_after_a_restart(tmp_path: Path) -> None:
    with running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master:
        flags = ["--master", master.facts["listen"], "--listen", "127.0.0.1:0", "--run-dir", str(tmp_path / "n"), "--dram", "1MiB"]
        names = set()
        for _ in range(3):
            with running("node", *flags, "--reconnect-interval-s", "0.02", log=tmp_path / "node.log") as node:
                assert node.line()["event"] == "ready"
                names |= {each.name for each in until_nodes_are(master, "alive").nodes}
        assert names == {node.facts["name"]}


def test_watch_topology_reports_link_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = NodeSettings(master=f"unix:{tmp_path}/nobody.sock", run_dir=str(tmp_path / "run"), dram=Size(1 << 20))
    node = Node(settings, TransferSettings(link_poll_interval_s=0.01))
    node.start()
    assert node._storage.engine is not None
    link = node._links._links[0]
    before = link._description["transfer"]
    assert before == node._storage.engine.describe()
    assert [(agent.transport, agent.rail.device) for agent in unpack_engine(before).agents] == [("tcp", "lo")]
    watch = node._watch
    assert watch is not None
    look = watch._read_topology

    def with_another_link() -> Topology:
        topology = look()
        return replace(topology, nics=(*topology.nics, Nic("eth9", ETHERNET, "eth9", ("192.0.2.99",))))

    monkeypatch.setattr(watch, "_read_topology", with_another_link)
    eventually(lambda: b"eth9" in link._description["topology"])
    assert link._description["transfer"] == node._storage.engine.describe()
    node.close()


def test_watch_topology_reports_a_renewed_certificate() -> None:
    """Peers accept only certificates for the names that the master reported."""
    own, renewed, client = shared().node(), shared().node("n1"), certificates(shared().client())
    settings = TransferSettings(transports="tcp", rails="lo", link_poll_interval_s=0.01)
    told: list[bytes] = []
    with TransferEngine("a", settings, tls=certificates(own)) as engine:
        region = engine.register(bytearray(b"value"))
        watch = watch_topology(settings, engine, lambda *, topology, transfer: told.append(transfer))
        assert watch is not None
        with contextlib.closing(watch):
            watch.start()
            swap(own, renewed)
            eventually(lambda: b"//node/n1 " in unpack_engine(told[-1]).agents[0].metadata)
        memory = bytearray(5)
        with TransferEngine("b", settings, serves=False, tls=client) as other:
            other.transfer([(other.import_region(other.connect(told[-1]), engine.export(region)), memory, 5)])
    assert memory == bytearray(b"value")
