"""Promises of opening.py: settings that contradict one another are refused, tiers open whole or not at all, and what outlived the last
process is found, or given up with a word."""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.settings import Size
from kvstore.store.blocks.block import DRAM, NVME
from kvstore.store.blocks.columns import Loss
from kvstore.store.blocks.tags import tag_of
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import plan_memory
from kvstore.store.storage import check, open_tiers, readable_blocks
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.tier import Record
from kvstore.tiers.value_codec import Encoding
from tests.store.made import ROWS, made

SETTINGS = NodeSettings(dram=Size(1 << 20))


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


def test_tiers_that_were_opened_are_closed_when_another_cannot_be(tmp_path: Path) -> None:
    settings = replace(SETTINGS, nvme=f"{tmp_path}:1MiB")
    with pytest.raises(ConfigError):
        open_tiers(replace(settings, hbm="nodevice:1MiB"), plan_memory(settings))
    tiers = open_tiers(settings, plan_memory(settings))
    assert set(tiers) == {DRAM, NVME}
    for tier in tiers.values():
        tier.close()


def test_a_new_folder_on_the_root_disk_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(SETTINGS, nvme=f"{tmp_path / 'new'}:1MiB")
    is_root_disk = tmp_path.stat().st_dev == Path("/").stat().st_dev
    for is_first in (True, False):
        caplog.clear()
        for tier in open_tiers(settings, plan_memory(settings)).values():
            tier.close()
        assert ("is new, and on the disk of /" in caplog.text) == (is_root_disk and is_first)


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
def test_a_folder_below_one_that_may_not_be_entered_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "closed").mkdir(0o700)
    settings = replace(SETTINGS, nvme=f"{tmp_path / 'closed' / below}:1MiB")
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
            open_tiers(settings, plan_memory(settings))
    finally:
        os.seteuid(0)


def test_a_value_whose_tag_is_not_ours_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, 3, tag_of(made("red", b"a", 3, 7)), b"nonsense")
    tier = NvmeTier(tmp_path, capacity_bytes=1 << 20)
    (found,) = readable_blocks(tier, ROWS)
    assert (found.key, found.generation) == (b"a", 7)
    assert tier.used_bytes == 3
    assert "given up" in caplog.text
    tier.close()
    tier = NvmeTier(tmp_path, capacity_bytes=1 << 20)
    assert len(readable_blocks(tier, ROWS)) == 1
    tier.close()


def test_encoded_values_without_torch_are_refused_at_start_and_not_lost(
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
