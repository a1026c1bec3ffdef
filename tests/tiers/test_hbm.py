"""The HBM tier: a tier like any other, on the CPU everywhere and on CUDA where there is one."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvstore.protocol.errors import ConfigError, InvalidArgument, StaleHandle, TierFailed
from kvstore.testing.tier_conformance import VolatileTierConformance, get, put, read, record, value
from kvstore.testing.tier_machine import MACHINE_SETTINGS, TierMachine
from kvstore.tiers.hbm import STAGING_BYTES, HbmTier
from kvstore.tiers.tier import Slot, Tier
from tests.devices import DEVICE, HAS_CUDA, needs_cuda

LARGE_BYTES = STAGING_BYTES + (STAGING_BYTES >> 1) if HAS_CUDA else 5000


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


@needs_cuda
@pytest.mark.gpu
class TestHbmOnCuda(TestHbm):
    device = "cuda:0"


class HbmOnCudaAgainstDict(HbmAgainstDict):
    device = "cuda:0"


TestHbmOnCudaAgainstDict = needs_cuda(pytest.mark.gpu(HbmOnCudaAgainstDict.TestCase))
TestHbmOnCudaAgainstDict.settings = MACHINE_SETTINGS


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


@pytest.mark.gpu
def test_large_values_pass_through_all_staging_buffers() -> None:
    """Batches longer than a staging buffer, cut anywhere, and many in flight from several threads."""
    tier = HbmTier(8 * LARGE_BYTES, str(DEVICE))
    values = [value(number, LARGE_BYTES - number) for number in range(6)]
    slots = put(tier, values)
    with ThreadPoolExecutor(3) as threads:
        for got in threads.map(lambda order: (order, get(tier, [slots[at] for at in order])), [[0, 3, 5], [5, 1], [2, 2, 4, 0]]):
            assert got[1] == [values[at] for at in got[0]]
    tier.check_integrity()
    tier.close()


@pytest.mark.gpu
def test_arena_larger_than_the_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot allocate an HBM tier of"):
        HbmTier(1 << 50, str(DEVICE))
    tier = HbmTier(1000, str(DEVICE))  # the device is as good as before
    assert get(tier, put(tier, [value(1, 100)])) == [value(1, 100)]
    tier.close()


@needs_cuda
@pytest.mark.gpu
def test_killed_process_leaves_the_arena_it_mapped() -> None:
    tier = HbmTier(1 << 22, str(DEVICE))
    slots = put(tier, [value(number, 1 << 20) for number in range(3)])
    torch.cuda.synchronize()
    handle = tier.arena.untyped_storage()._share_cuda_()
    command = [sys.executable, "-m", "benchmarks.gpu.ipc_child", "--hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{handle!r}\n")
        child.stdin.flush()
        mapped = child.stdout.readline()
        child.kill()
    assert mapped == "mapped\n"
    assert get(tier, slots) == [value(number, 1 << 20) for number in range(3)]
    tier.write_batch([record(slots[0], value(9, 1 << 20))])
    assert get(tier, slots[:1]) == [value(9, 1 << 20)]
    assert tier.health == "ok"
    tier.close()


def test_without_torch_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[hbm\]'"):
        HbmTier(100, "cpu")
