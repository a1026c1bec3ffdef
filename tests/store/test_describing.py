"""Promises of describing.py, in a whole node: the master is told what is so, and again when it changes. More of them: test_node.py."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.settings import Size
from kvstore.store.config import NodeSettings
from kvstore.store.identity import watch_topology
from kvstore.store.node import Node
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import unpack_engine
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.model import ETHERNET, Nic, Topology
from tests.security.tls.certified import certificates, shared, swap
from tests.store.engines import eventually


def test_the_description_that_goes_to_the_master_is_the_engines_and_changes_with_the_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    look = watch._look

    def with_another_link() -> Topology:
        topology = look()
        return replace(topology, nics=(*topology.nics, Nic("eth9", ETHERNET, "eth9", ("192.0.2.99",))))

    monkeypatch.setattr(watch, "_look", with_another_link)
    eventually(lambda: b"eth9" in link._description["topology"])
    assert link._description["transfer"] == node._storage.engine.describe()
    node.close()


def test_a_certificate_that_is_renewed_for_another_name_is_told_though_no_link_has_changed() -> None:
    """Whoever connects takes no certificate but one for the names that he was told."""
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
