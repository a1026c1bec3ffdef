"""Tests of prefaulter.py: all DRAM is touched and then measured periodically; a stopped thread reports nothing."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.rpc.reactor import Reactor
from kvstore.store.tiering.prefaulter import PageSizes, Prefaulter
from kvstore.tiers.dram import DramTier

TIMEOUT_S = 10.0


@pytest.fixture
def dram() -> Iterator[DramTier]:
    tier = DramTier(1 << 20)
    yield tier
    tier.close()


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    reactor.close()


class Looks(PageSizes):
    """One that looks as often as it is let, and says so."""

    def __init__(self, dram: DramTier) -> None:
        super().__init__(dram)
        self.made = threading.Semaphore(0)

    def look(self) -> float:
        super().look()
        self.made.release()
        return 0.001


def test_prefaulter_touches_all_dram_and_keeps_measuring(dram: DramTier, reactor: Reactor) -> None:
    threads: list[threading.Thread] = []
    looks = Looks(dram)
    prefaulter = Prefaulter(reactor, dram, looks, step_bytes=64 << 10)
    prefaulter.start(lambda: threads.append(threading.current_thread()))
    for _ in range(3):
        assert looks.made.acquire(timeout=TIMEOUT_S)
    assert dram.prefaulted_bytes == dram.capacity_bytes
    assert not threads
    while not threads:
        reactor.run_once(TIMEOUT_S)
    assert threads == [threading.current_thread()]
    prefaulter.stop()
    prefaulter.join(TIMEOUT_S)
    assert not prefaulter._thread.is_alive()
