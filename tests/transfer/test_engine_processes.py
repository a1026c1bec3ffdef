"""The engine over real transports, between two processes, one of which stalls, dies and restarts."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import xxhash

from kvstore.protocol.errors import StaleHandle, Unreachable
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import assert_nothing_is_left, within
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.batch import Span
from tests.line_child import LineChild


class Child(LineChild):
    """An engine in another process with 256 KiB of shared and of plain memory. A context manager that ends it."""

    def __init__(self, transports: str) -> None:
        super().__init__("tests.transfer.engine_child", transports)
        self.description, self.shared, self.shared_read_only, self.plain = (bytes.fromhex(text) for text in self.answer())

    def ask(self, *words: str) -> list[str]:
        found: list[str] = self.tell(" ".join(words))
        return found

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does not run in between."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()


def pattern(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(256 << 10)


REAL = pytest.mark.parametrize("transports", ["shm", "tcp", "shm,tcp"])


def real_engine(transports: str, name: str = "me") -> TransferEngine:
    return TransferEngine(name, TransferSettings(transports=transports, rails="lo", slice_bytes=Size(64 << 10)))


@REAL
def test_two_processes_read_write_and_notify(transports: str) -> None:
    with Child(transports) as child, real_engine(transports) as engine:
        peer = engine.connect(child.description)
        remote = engine.import_region(peer, child.shared)
        ours, buffer = engine.allocate(256 << 10), bytearray(256 << 10)
        engine.transfer([(remote, ours, 256 << 10)])
        assert ours.memory == pattern(0)
        engine.transfer([(pattern(1), remote, 256 << 10)])
        engine.notify(peer, b"written")
        assert child.ask("notifications") == ["me", "written"]
        assert child.ask("hash") == [xxhash.xxh3_64_hexdigest(pattern(1))]
        asyncio.run(engine.transfer_async([(Span(remote, 5), buffer, 70_000), (Span(remote, 100_001), Span(buffer, 70_000), 1001)]))
        assert buffer[:71_001] == pattern(1)[5:70_005] + pattern(1)[100_001:101_002]
        assert {path.transport for path, state in peer.chooser.states.items() if state.delivered_slices} == {transports.partition(",")[0]}


def test_private_memory_uses_tcp() -> None:
    with Child("shm,tcp") as child, real_engine("shm,tcp") as engine:
        peer = engine.connect(child.description)
        buffer = bytearray(256 << 10)
        engine.transfer([(engine.import_region(peer, child.plain), buffer, 256 << 10)])
        assert buffer == pattern(1)
        assert {path.transport for path, state in peer.chooser.states.items() if state.delivered_slices} == {"tcp"}


def test_memory_that_no_common_transport_reaches_is_told() -> None:
    with Child("shm") as child, real_engine("shm") as engine:
        remote = engine.import_region(engine.connect(child.description), child.plain)
        with pytest.raises(Unreachable, match="no transport"):
            engine.transfer([(remote, bytearray(4), 4)])


@REAL
def test_a_killed_peer_is_unreachable_and_its_successor_is_not(transports: str) -> None:
    with real_engine(transports) as engine:
        ours = engine.allocate(256 << 10)
        with Child(transports) as child:
            peer = engine.connect(child.description)
            remote = engine.import_region(peer, child.shared)
            engine.transfer([(remote, ours, 256 << 10)])
            child.kill()
            with within(0), pytest.raises((Unreachable, StaleHandle)):
                engine.transfer([(remote, ours, 256 << 10)])
        with Child(transports) as child:
            assert engine.connect(child.description) is peer, "it has the name of the one before"
            ours.memory[:] = bytes(256 << 10)
            engine.transfer([(engine.import_region(peer, child.shared), ours, 256 << 10)])
            assert ours.memory == pattern(0)
        assert ours.users == 0


def test_a_closed_engine_leaves_no_descriptors_and_no_threads() -> None:
    def use() -> None:
        with real_engine("shm,tcp") as engine, real_engine("shm,tcp", "other") as other, closing(other.allocate(64)) as region:
            remote = engine.import_region(engine.connect(other.describe()), other.export(region))
            engine.transfer([(remote, bytearray(64), 64)])

    use()
    assert_nothing_is_left(use)
