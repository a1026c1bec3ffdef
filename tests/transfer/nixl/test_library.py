"""Promises of library.py; skipped where NIXL is not installed, but for what is said then."""

import importlib
import logging
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.protocol.errors import ConfigError, Unreachable
from kvstore.transfer.agent import Direction, Rail
from kvstore.transfer.memory.region import Region
from kvstore.transfer.nixl.descriptors import Rows
from kvstore.transfer.nixl.library import PACKAGES, NativeAgent, Progress, bindings

try:
    bindings()
    HAS_NIXL = True
except ConfigError:
    HAS_NIXL = False
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")
PATIENCE_S = 30.0


class Ends:
    """Two agents in one process, each with a registered region, the second known to the first."""

    def __init__(self) -> None:
        self.user, self.owner = NativeAgent("user", Rail()), NativeAgent("owner", Rail())
        self.here, self.there = (Region(memoryview(mmap.mmap(-1, 1 << 20))) for _ in range(2))
        self.user.register(self.here)
        self.owner.register(self.there)
        assert self.user.load(self.owner.describe()) == "owner"

    def rows(self, region: Region, *, region_id: int | None = None) -> Rows:
        return np.array([[region.address, region.size_bytes, region_id or region.region_id]], np.uint64)

    def prepare(self, direction: Direction) -> int:
        return self.user.prepare(direction, self.rows(self.here), self.rows(self.there), "owner")


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for agent in (ends.user, ends.owner):
        if hasattr(agent, "_agent"):
            agent.close()


def until_over(agent: NativeAgent, handle: int, progress: Progress) -> Progress:
    end_s = time.monotonic() + PATIENCE_S
    while progress is Progress.UNDER_WAY and time.monotonic() < end_s:
        progress = agent.progress(handle)
    return progress


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, f"{package}._bindings", None)
    with pytest.raises(ConfigError, match=r"\.\[nixl\]"):
        bindings()


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1"):
        bindings()


@needs_nixl
def test_loading_it_leaves_the_process_as_it_was() -> None:
    environment = dict(os.environ)
    NativeAgent("quiet", Rail()).close()
    assert dict(os.environ) == environment
    assert logging.raiseExceptions


@needs_nixl
def test_the_interpreter_ends_cleanly_with_an_agent_open() -> None:
    program = (
        "from kvstore.transfer.agent import Rail; from kvstore.transfer.nixl.library import NativeAgent; kept = NativeAgent('a', Rail())"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == 0


@needs_nixl
def test_an_idle_agent_takes_next_to_no_processor_time() -> None:
    program = (
        "import time; from kvstore.transfer.agent import Rail; from kvstore.transfer.nixl.library import NativeAgent; "
        "kept = NativeAgent('a', Rail()); began = time.process_time(); time.sleep(0.5); print(time.process_time() - began)"
    )
    told = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=True, capture_output=True)
    assert float(told.stdout) < 0.1


@needs_nixl
def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere0"):
        NativeAgent("railed", Rail(device="nowhere0"))


@needs_nixl
def test_a_region_that_was_not_described_is_not_reached(ends: Ends) -> None:
    with pytest.raises(Unreachable):
        ends.prepare(Direction.READ)


@needs_nixl
def test_a_region_at_the_address_of_an_older_one_is_another(ends: Ends) -> None:
    ends.user.load(ends.owner.describe(ends.there))
    again = Region(ends.there.memory)
    ends.owner.deregister(ends.there)
    ends.owner.register(again)
    assert ends.user.load(ends.owner.describe(again)) == "owner"
    handle = ends.user.prepare(Direction.READ, ends.rows(ends.here), ends.rows(again), "owner")
    assert until_over(ends.user, handle, ends.user.post(handle)) is Progress.DONE
    ends.user.release(handle)


@needs_nixl
def test_a_peer_that_is_gone_cannot_be_loaded(ends: Ends) -> None:
    gone = NativeAgent("gone", Rail())
    description = gone.describe()
    gone.close()
    with pytest.raises(Unreachable):
        ends.user.load(description)


@needs_nixl
def test_a_closed_peer_is_disconnected(ends: Ends) -> None:
    ends.user.load(ends.owner.describe(ends.there))
    ends.user.notify("owner", b"hello")
    ends.owner.close()
    progress, end_s = Progress.DONE, time.monotonic() + PATIENCE_S
    while progress is Progress.DONE and time.monotonic() < end_s:
        handle = ends.prepare(Direction.READ)
        progress = until_over(ends.user, handle, ends.user.post(handle))
        ends.user.release(handle)
    assert progress is Progress.DISCONNECTED


@needs_nixl
def test_a_transfer_that_cannot_be_posted_has_failed(ends: Ends) -> None:
    ends.user.load(ends.owner.describe(ends.there))
    handle = ends.prepare(Direction.READ)
    ends.user.forget("owner")
    assert ends.user.post(handle) is Progress.FAILED
    ends.user.release(handle)
