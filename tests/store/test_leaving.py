"""Promises of leaving.py: whoever has new blocks is refused from the first word on, and the node ends when all is written or in time."""

import logging
from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import DRAIN_CLOSED, DRAIN_NOT, DRAIN_SAVE
from kvstore.protocol.errors import Draining
from kvstore.store.leaving import Leaving, Saver
from tests.store.tables import Store

MakeStore = Callable[..., Store]
S = 1_000_000_000


class Ending:
    """A store, whose node is to be stopped, at a time that the test says."""

    def __init__(self, store: Store, *, has_nvme: bool = True) -> None:
        self.store = store
        self.now_ns = 5 * S
        self.saver = Saver(store.table, batch_bytes=1000, may_be_decided=lambda: False)
        self.leaving = Leaving(self.saver, has_nvme=has_nvme, clock_ns=lambda: self.now_ns)
        self.ended = 0

    def then(self) -> None:
        self.ended += 1

    def run(self) -> None:
        for _ in range(5):
            self.leaving.step()
            self.store.settle()
            self.leaving.tick()


@pytest.fixture
def ending(make_store: MakeStore) -> Ending:
    return Ending(make_store(1000, nvme_bytes=10_000))


def test_it_takes_no_blocks_while_the_master_says_so(ending: Ending) -> None:
    ending.leaving.check_open()
    ending.leaving.drain(DRAIN_CLOSED)
    with pytest.raises(Draining, match="put them elsewhere"):
        ending.leaving.check_open()
    ending.store.put("a")
    ending.run()
    assert ending.saver.lost() == (1, 100), "nothing is written unless the master says so"
    ending.leaving.drain(DRAIN_NOT)
    ending.leaving.check_open()


def test_it_writes_down_what_it_has_when_the_master_says_so(ending: Ending) -> None:
    ending.store.put("a")
    for _ in range(2):
        ending.leaving.drain(DRAIN_SAVE)
        ending.leaving.step()
    ending.run()
    assert ending.saver.lost() == (0, 0)
    assert ending.ended == 0


def test_it_ends_once_all_is_written_and_says_so(ending: Ending, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ending.store.put("a")
    ending.leaving.end(10, ending.then)
    ending.leaving.end(10, ending.then)
    ending.leaving.drain(DRAIN_NOT)
    ending.leaving.drain(DRAIN_SAVE)
    ending.leaving.drain(DRAIN_NOT)
    with pytest.raises(Draining):
        ending.leaving.check_open()
    assert ending.ended == 0
    ending.run()
    assert ending.ended == 1
    assert "1 blocks (100 B) were written to NVMe in 0.0 s; 0 blocks (0 B) end with it" in caplog.text


def test_it_ends_when_the_time_is_over_and_says_what_is_lost(ending: Ending, caplog: pytest.LogCaptureFixture) -> None:
    ending.store.put("a")
    ending.leaving.end(10, ending.then)
    ending.now_ns += 10 * S - 1
    ending.leaving.tick()
    assert ending.ended == 0
    ending.now_ns += 1
    ending.leaving.tick()
    ending.leaving.tick()
    assert ending.ended == 1
    assert "1 blocks (100 B) end with it: no time, room or decision of the master for them" in caplog.text


@pytest.mark.parametrize(("has_nvme", "drain_s"), [(False, 10), (True, 0)])
def test_it_ends_at_once_where_nothing_could_be_written(make_store: MakeStore, has_nvme: bool, drain_s: float) -> None:
    ending = Ending(make_store(1000, nvme_bytes=10_000 if has_nvme else 0), has_nvme=has_nvme)
    ending.store.put("a")
    ending.leaving.end(drain_s, ending.then)
    assert ending.ended == 1
    ending.run()
    assert ending.ended == 1
