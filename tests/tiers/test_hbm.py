"""The HBM tier: a tier like any other, on the CPU everywhere and on CUDA where there is one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore.protocol.errors import ConfigError, InvalidArgument, StaleHandle, TierFailed
from kvstore.testing.tier_conformance import VolatileTierConformance, get, put, read, record, value
from kvstore.testing.tier_machine import MACHINE_SETTINGS, TierMachine
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.tier import Slot, Tier


class OpenHbm:
    device = "cpu"

    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return HbmTier(capacity_bytes, self.device)


class TestHbm(OpenHbm, VolatileTierConformance):
    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        assert isinstance(tier, HbmTier)
        begin = tier.locate(slot)
        return bytes(tier.arena[begin : begin + slot.size_bytes].cpu().tolist())

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        assert isinstance(tier, HbmTier)
        begin = tier.locate(slot)
        tier.arena[begin : begin + len(data)] = torch.tensor(list(data), dtype=torch.uint8)


class HbmAgainstDict(OpenHbm, TierMachine):
    pass


TestHbmAgainstDict = HbmAgainstDict.TestCase
TestHbmAgainstDict.settings = MACHINE_SETTINGS

if torch.cuda.is_available():

    @pytest.mark.gpu
    class TestHbmOnCuda(TestHbm):
        device = "cuda:0"


@pytest.fixture
def tier() -> Iterator[HbmTier]:
    tier = HbmTier(1000, "cpu", slab_bytes=100)
    yield tier
    tier.check_integrity()
    tier.close()


def test_writing_checks_every_record_before_it_copies_one(tier: HbmTier) -> None:
    first, second = put(tier, [value(1, 10), value(2, 10)])
    with pytest.raises(InvalidArgument, match="11 bytes of data for a slot of 10"):
        tier.write_batch([record(first, value(3, 10)), record(second, bytes(11))])
    assert get(tier, [first]) == [value(1, 10)]


def test_a_device_that_fails_is_named_and_takes_no_more_values() -> None:
    # A tensor on `meta` has no bytes: torch refuses to read it, as it does a device that was lost.
    tier = HbmTier(1000, "meta")
    good, stale = put(tier, [value(1, 10), value(2, 10)])
    tier.free(stale)
    errors = tier.read_batch_into([good, stale], [memoryview(bytearray(10)), memoryview(bytearray(10))])
    assert [type(error) for error in errors] == [TierFailed, StaleHandle]
    assert tier.health.startswith("the device failed: ")
    with pytest.raises(TierFailed, match="the device failed"):
        tier.allocate(10)
    assert isinstance(read(tier, stale), TierFailed | StaleHandle)


@pytest.mark.parametrize("device", ["cuda:99", "no such device"])
def test_a_missing_device_is_a_config_error(device: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot allocate an HBM tier of 100 B on '{device}': ."):
        HbmTier(100, device)


def test_without_torch_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[hbm\]'"):
        HbmTier(100, "cpu")
