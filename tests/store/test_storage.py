"""Tests of storage.py: NVMe blocks are recovered, everything opened is closed on failure, stalled clients are
disconnected."""

import logging
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError, InvalidArgument, TierFailed
from kvstore.protocol.settings import Size
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import NullHandler
from kvstore.rpc.server.session import Session
from kvstore.store.block_table.block import DRAM, NVME, Loss
from kvstore.store.block_table.tags import tag_of
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import plan_memory
from kvstore.store.storage import Storage, check, disconnect_stalled_reader, engine_settings, open_tiers, readable_blocks
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.tier import Record, Recovered
from kvstore.tiers.value_codec import Encoding
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.topology.model import ETHERNET, LOOPBACK, Nic, Topology
from tests.store.made import ROWS, made

SETTINGS = NodeSettings(dram=Size(1 << 20))

HOST = Topology("host", nics=(Nic("lo", LOOPBACK, "lo", ("127.0.0.1",)), Nic("eth0", ETHERNET, "eth0", ("10.0.0.1",))))


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
    )


def test_recovered_nvme_blocks_are_in_the_inventory(settings: NodeSettings) -> None:
    tiers = open_tiers(settings, plan_memory(settings))
    nvme = tiers[NVME]
    nvme.write_batch([Record(nvme.allocate(3), b"abc", 1, tag_of(made("red", b"a", 3, 7)))])
    for tier in tiers.values():
        tier.close()
    reactor = Reactor()
    storage = make(settings, reactor, ExitStack())
    assert [(block.key, block.generation) for block in storage.table.blocks()] == [(b"a", 7)]
    told: list[bytes] = []
    storage.replicators[0].link_up(lambda message, _answered: told.extend(message.keys), 1, lambda: None)
    assert told == [b"a"]
    if storage.engine is not None:
        storage.engine.close()
    storage.shared_index.close()
    storage.close()
    reactor.close()


def test_a_failed_nvme_recovery_closes_everything(settings: NodeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_stalled_hazard_closes_the_connection() -> None:
    reactor, (ours, theirs) = Reactor(), socket.socketpair()
    with theirs:
        session = Session(reactor, ours, NullHandler())
        disconnect_stalled_reader(session)
        assert not session.is_open
        assert theirs.recv(1) == b""
    reactor.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"low_watermark": 0.9, "high_watermark": 0.5}, "low_watermark is above"),
        ({"listen": "unix:/tmp/x"}, "listen is"),
        ({"advertise": "unix:/tmp/x"}, "advertise is"),
        ({"nvme_codec": "int8"}, "there is no NVMe tier"),
        ({"socket_group": "no-such-group"}, "this host has no such group"),
        ({"socket_mode": "0777"}, "socket_mode is"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(wrong: dict[str, Any], says: str) -> None:
    check(SETTINGS)
    with pytest.raises((ConfigError, InvalidArgument), match=says):
        check(replace(SETTINGS, **wrong))


def test_a_new_folder_on_the_root_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(SETTINGS, nvme=f"{tmp_path / 'new'}:1MiB")
    is_root_disk = tmp_path.stat().st_dev == Path("/").stat().st_dev
    for is_first in (True, False):
        caplog.clear()
        for tier in open_tiers(settings, plan_memory(settings)).values():
            tier.close()
        assert ("on the root file system" in caplog.text) == (is_root_disk and is_first)


@pytest.mark.promise("settings-checked")
def test_a_folder_is_not_made_where_its_parent_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mount its disk"):
        open_tiers(replace(SETTINGS, nvme=f"{tmp_path / 'not' / 'mounted'}:1MiB"), plan_memory(SETTINGS))
    assert not (tmp_path / "not").exists()


def stored(folder: Path, size_bytes: int, *tags: bytes) -> None:
    """Values of so many zeros, with these tags."""
    tier = NvmeTier(folder, capacity_bytes=1 << 20)
    tier.write_batch([Record(tier.allocate(size_bytes), bytes(size_bytes), 1, tag) for tag in tags])
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("below", ["nvme", "missing/nvme"])
def test_a_folder_in_an_unreadable_parent_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "closed").mkdir(0o700)
    settings = replace(SETTINGS, nvme=f"{tmp_path / 'closed' / below}:1MiB")
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
            open_tiers(settings, plan_memory(settings))
    finally:
        os.seteuid(0)


def test_a_stored_value_with_an_invalid_tag_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, 3, tag_of(made("red", b"a", 3, 7)), b"nonsense")
    tier = NvmeTier(tmp_path, capacity_bytes=1 << 20)
    (found,) = readable_blocks(tier, ROWS)
    assert (found.key, found.generation) == (b"a", 7)
    assert tier.used_bytes == 3
    assert "invalid tag" in caplog.text
    tier.close()
    tier = NvmeTier(tmp_path, capacity_bytes=1 << 20)
    assert len(readable_blocks(tier, ROWS)) == 1
    tier.close()


def test_encoded_values_without_torch_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, 3, tag_of(made("red", b"a", 5, 7), Loss(99, Encoding(3, 2, 2))))
    tier = NvmeTier(tmp_path, capacity_bytes=1 << 20)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(ConfigError, match=r"nvme tier holds is encoded.*pip install '\.\[hbm\]'"):
            readable_blocks(tier, ROWS)
    tier.close()
    tier = NvmeTier(tmp_path, capacity_bytes=1 << 20)
    (found,) = readable_blocks(tier, ROWS)
    assert (found.size_bytes, found.checksum_in(NVME)) == (5, 99)
    assert caplog.text == ""
    tier.close()


@pytest.mark.parametrize(
    ("listens_on", "rails", "chosen"),
    [
        ("127.0.0.1", "", "lo"),
        ("::1", "", "lo"),
        ("localhost", "", "lo"),
        ("0.0.0.0", "", ""),
        ("10.0.0.1", "", ""),
        ("127.0.0.1", "eth0", "eth0"),
    ],
)
def test_the_engine_stays_on_loopback_with_the_node(listens_on: str, rails: str, chosen: str) -> None:
    assert engine_settings(TransferSettings(rails=rails), HOST, listens_on=listens_on).rails == chosen


@pytest.mark.parametrize(
    ("transports", "chosen"),
    [("auto", "tcp"), ("shm", "tcp"), ("shm,tcp", "tcp"), ("ucx, shm ,tcp", "ucx,tcp"), ("my.own:Agent", "my.own:Agent")],
)
def test_the_engine_excludes_shared_memory(transports: str, chosen: str) -> None:
    assert engine_settings(TransferSettings(transports=transports), HOST, listens_on="0.0.0.0").transports == chosen


def test_the_engine_without_a_loopback_uses_all_rails() -> None:
    assert engine_settings(TransferSettings(), Topology("host"), listens_on="127.0.0.1").rails == ""
