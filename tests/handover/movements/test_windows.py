"""Promises of windows.py: peers reach the memory while a window is open and not afterwards, and what they may write they cannot map."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.handover.movements.movement import Window
from kvstore.protocol.errors import Denied, StaleHandle
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.testing.waiting import eventually


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with ExitStack() as stack:
        settings = TransferSettings(transports="shm,tcp", rails="lo")
        yield stack.enter_context(TransferEngine("owner", settings)), stack.enter_context(TransferEngine("peer", settings))


def await_closed(window: Window) -> None:
    """The engine may still be at memory for a moment after its peer has been answered."""
    eventually(window.close, "nobody is at the window's memory")


def test_a_late_write_finds_the_window_closed_and_the_memory_as_it_was(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, peer = engines
    pool = owner.allocate(4096)
    window = Window(owner, [pool], writable=True)
    remote = peer.import_region(peer.connect(owner.describe()), window.descriptions[0])
    assert set(remote.remote.descriptors) == {"tcp"}
    peer.transfer([(b"in time", remote, 7)])
    assert bytes(pool.memory[:7]) == b"in time"
    await_closed(window)
    with pytest.raises(StaleHandle):
        peer.transfer([(b"too late", remote, 8)])
    assert bytes(pool.memory[:7]) == b"in time"
    again = Window(owner, [pool], writable=True)
    peer.transfer([(b"another", peer.import_region(remote.peer, again.descriptions[0]), 7)])
    await_closed(again)
    pool.close()


def test_readers_may_map_but_not_write(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, peer = engines
    pool = owner.allocate(4096)
    window = Window(owner, [pool], writable=False)
    remote = peer.import_region(peer.connect(owner.describe()), window.descriptions[0])
    assert set(remote.remote.descriptors) == {"shm", "tcp"}
    with pytest.raises(Denied):
        peer.transfer([(b"no", remote, 2)])
    found = bytearray(4)
    peer.transfer([(remote, found, 4)])
    await_closed(window)
    with pytest.raises(StaleHandle):
        peer.transfer([(remote, found, 4)])
    pool.close()
