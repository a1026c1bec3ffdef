"""Promises of memory.py: what the product relies on of memfds, and that a run has nothing of the system's."""

import os

import pytest

from kvstore.tiers import memfd
from tests.simulation.memory import Descriptors, SimMemfd, give_back_pages
from tests.simulation.run import run_schedule
from tests.simulation.schedule import make_schedule

SIZE_BYTES = 4096


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> Descriptors:
    """Those that memfds are made of meanwhile."""
    descriptors = Descriptors()
    for name in ("os", "fcntl"):
        monkeypatch.setattr(memfd, name, descriptors)
    return descriptors


def test_a_mapping_is_the_same_memory_for_whoever_has_it_and_outlives_its_descriptors(descriptors: Descriptors) -> None:
    memory = SimMemfd(descriptors, SIZE_BYTES)
    reader = descriptors.map_slab(memory.export(writable=False), SIZE_BYTES, writable=False).memory
    memory.bytes[7] = 42
    assert reader[7] == 42
    assert reader.readonly
    with pytest.raises(OSError, match="Bad file descriptor"):
        descriptors.fstat(memory.fd + 1)  # mapped and closed
    memory.close()
    assert reader[7] == 42


def test_memory_that_is_discarded_is_zeros_for_whoever_maps_it(descriptors: Descriptors) -> None:
    memory = SimMemfd(descriptors, SIZE_BYTES)
    reader = descriptors.map_slab(memory.export(writable=True), SIZE_BYTES, writable=True).memory
    reader[:] = b"1" * SIZE_BYTES
    give_back_pages(reader[:1])
    assert bytes(reader[:2]) == b"\x001"
    memory.discard()
    assert bytes(reader) == bytes(SIZE_BYTES)


def test_a_run_opens_no_descriptor_of_the_system() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for seed in range(4):
        run_schedule(make_schedule(seed))
    assert set(os.listdir("/proc/self/fd")) == before
