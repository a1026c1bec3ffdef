"""Promises of storage.py: blocks of NVMe are there again, what is opened is closed whoever fails, who looks for too long is hung up on."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.protocol.errors import TierFailed
from kvstore.protocol.settings import Size
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Nobody
from kvstore.rpc.session import Session
from kvstore.store.blocks.block import DRAM, NVME
from kvstore.store.blocks.tags import tag_of
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import plan_memory
from kvstore.store.storage import Storage, hang_up_on_looker, open_tiers
from kvstore.store.tuning import TUNING
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.tier import Record, Recovered
from kvstore.transfer.config import TransferSettings
from tests.store.made import made


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    return NodeSettings(dram=Size(1 << 20), nvme=f"{tmp_path / 'nvme'}:1MiB")


def make(settings: NodeSettings, reactor: Reactor, opened: ExitStack) -> Storage:
    return Storage(
        settings,
        reactor,
        opened,
        transfer=TransferSettings(),
        instance=1,
        tls=None,
        tuning=TUNING,
    )


def test_blocks_of_nvme_are_there_again_and_are_what_masters_are_told(settings: NodeSettings) -> None:
    tiers = open_tiers(settings, plan_memory(settings))
    nvme = tiers[NVME]
    nvme.write_batch([Record(nvme.allocate(3), b"abc", 1, tag_of(made("red", b"a", 3, 7)))])
    for tier in tiers.values():
        tier.close()
    reactor = Reactor()
    storage = make(settings, reactor, ExitStack())
    assert [(block.key, block.generation) for block in storage.table.blocks()] == [(b"a", 7)]
    told: list[bytes] = []
    storage.publishers[0].link_up(lambda message, _answered: told.extend(message.keys), 1, lambda: None)
    assert told == [b"a"]
    if storage.engine is not None:
        storage.engine.close()
    storage.showing.close()
    storage.close()
    reactor.close()


def test_what_is_open_is_closed_where_nvme_cannot_be_recovered(settings: NodeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: NvmeTier) -> list[Recovered]:
        raise TierFailed("the index cannot be read")

    with monkeypatch.context() as patch, ExitStack() as opened:
        patch.setattr(NvmeTier, "recover", fail)
        reactor = Reactor()
        opened.callback(reactor.close)
        with pytest.raises(TierFailed):
            make(settings, reactor, opened)
    tiers = open_tiers(settings, plan_memory(settings))  # one process at a time may have the folder
    assert set(tiers) == {DRAM, NVME}
    for tier in tiers.values():
        tier.close()


def test_who_looks_for_longer_than_a_lease_may_last_is_hung_up_on() -> None:
    reactor, (ours, theirs) = Reactor(), socket.socketpair()
    with theirs:
        session = Session(reactor, ours, Nobody())
        hang_up_on_looker(session)
        assert not session.is_open
        assert theirs.recv(1) == b""
    reactor.close()
