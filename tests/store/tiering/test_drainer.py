"""Tests of drainer.py: new blocks are refused from the start, and the drain ends when all is written or at its
deadline."""

import logging
from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import DRAIN_OFF, DRAIN_SAVE
from kvstore.protocol.errors import Draining
from kvstore.store.block_table.block import DRAM, NVME, Block
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.tiering.drainer import WAITING_LOOK_NS, Drainer, NvmeSaver
from tests.store.failing_tier import FailingNvme
from tests.store.tables import Store, value_of

MakeStore = Callable[..., Store]

S = 1_000_000_000


class Ending:
    """A store, whose node is to be stopped, at a time that the test says."""

    def __init__(self, store: Store, *, has_nvme: bool = True) -> None:
        self.store = store
        self.now_ns = 5 * S
        self.saver = NvmeSaver(store.table, batch_bytes=1000, has_master_link=lambda: False)
        self.drainer = Drainer(self.saver, has_nvme=has_nvme, clock_ns=lambda: self.now_ns)
        self.ended = 0

    def then(self) -> None:
        self.ended += 1

    def run(self) -> None:
        for _ in range(5):
            self.drainer.step()
            self.store.settle()
            self.drainer.run_due()


@pytest.fixture
def ending(make_store: MakeStore) -> Ending:
    return Ending(make_store(1000, nvme_bytes=10_000))


def test_drain_ends_once_all_is_written(ending: Ending, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ending.store.put("a")
    ending.drainer.end(10, ending.then)
    ending.drainer.end(10, ending.then)
    ending.drainer.drain(DRAIN_OFF)
    ending.drainer.drain(DRAIN_SAVE)
    ending.drainer.drain(DRAIN_OFF)
    with pytest.raises(Draining):
        ending.drainer.check_open()
    assert ending.ended == 0
    ending.run()
    assert ending.ended == 1
    assert "1 blocks (100 B) were written to NVMe in 0.0 s; 0 blocks (0 B) are lost" in caplog.text


@pytest.mark.promise("restart-keeps-nvme")
def test_drain_ends_at_its_deadline_and_logs_lost_blocks(ending: Ending, caplog: pytest.LogCaptureFixture) -> None:
    ending.store.put("a")
    ending.drainer.end(10, ending.then)
    ending.now_ns += 10 * S - 1
    ending.drainer.run_due()
    assert ending.ended == 0
    ending.now_ns += 1
    ending.drainer.run_due()
    ending.drainer.run_due()
    assert ending.ended == 1
    assert "1 blocks (100 B) are lost: the drain ran out of time or NVMe space, or they were uncommitted" in caplog.text


@pytest.mark.parametrize(("has_nvme", "drain_s"), [(False, 10), (True, 0)])
def test_drain_ends_at_once_without_nvme(make_store: MakeStore, has_nvme: bool, drain_s: float) -> None:
    ending = Ending(make_store(1000, nvme_bytes=10_000 if has_nvme else 0), has_nvme=has_nvme)
    ending.store.put("a")
    ending.drainer.end(drain_s, ending.then)
    assert ending.ended == 1
    ending.run()
    assert ending.ended == 1


def saver_of(store: Store, *, batch_bytes: int = 1000, is_linked: bool = True) -> NvmeSaver:
    return NvmeSaver(store.table, batch_bytes=batch_bytes, has_master_link=lambda: is_linked)


def run(store: Store, saver: NvmeSaver, *, now_ns: int = 0) -> None:
    """Rounds of events and ticks at one instant, until nothing is left to do."""
    for _ in range(20):
        saver.step()
        store.settle()
        saver.step()
        saver.run_due(now_ns=now_ns)


def test_drain_writes_dram_blocks_and_keeps_them(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    blocks = [store.put(str(number)) for number in range(5)]
    saver = saver_of(store, batch_bytes=150)
    assert saver.lost() == (5, 500)
    saver.begin()
    run(store, saver)
    assert saver.is_done
    assert (saver.saved_blocks, saver.saved_bytes, saver.lost()) == (5, 500, (0, 0))
    for block in blocks:
        assert block.dram is not None
        assert store.bytes_of(block, NVME) == value_of(block)
    assert [(counts.demotions, counts.promotions) for _, _, counts, _ in store.table.levels()] == [(0, 0), (0, 0)]
    saver.begin()
    run(store, saver)
    assert (saver.is_done, saver.saved_blocks) == (True, 0), "what is there is not written again"


def test_drain_writes_hbm_blocks(make_store: MakeStore) -> None:
    store = make_store(300, hbm_bytes=300, nvme_bytes=10_000, slab_bytes=100)
    block = store.put("a")
    for _ in range(2):
        store.read("red", b"a", 0)
    store.table.evictor.promote_to_hbm(block)
    store.settle()
    store.table.copies.drop_copy(block, DRAM)
    saver = saver_of(store)
    saver.begin()
    run(store, saver)
    assert store.bytes_of(block, NVME) == value_of(block)


@pytest.mark.promise("restart-keeps-nvme")
def test_drain_writes_recently_read_blocks_first(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    for name in "abcde":
        store.put(name)
    for key in (b"d", b"b"):
        store.read("red", key, 0)
    saver = saver_of(store, batch_bytes=150)
    saver.begin()
    saver.step()
    saver.step()
    moves = store.table.evictor.take_moves()
    assert [move.block.key for move in moves] == [b"b", b"d"]
    store.finish(moves[0])
    saver.step()
    assert len(store.table.evictor.take_moves()) == 1, "the next one for the one that is written"
    assert not saver.is_done


def test_drain_writes_no_more_than_fits(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=300)
    blocks = [store.put(str(number)) for number in range(5)]
    saver = saver_of(store)
    saver.begin()
    run(store, saver)
    assert saver.is_done
    assert [block.nvme is not None for block in blocks] == [False, False, True, True, True]
    assert saver.lost() == (2, 200)
    for _ in range(2):
        saver.begin()
        run(store, saver)
        assert saver.is_done
        assert [block.nvme is not None for block in blocks] == [False, False, True, True, True], "nor for those that did not fit before"


def uncommitted(store: Store, name: str) -> Block:
    block = store.block(name)
    block.generation = UNCOMMITTED
    put = store.table.open(block, "writer", now_ns=0)
    assert put is not None
    store.write(put)
    return store.table.store_uncommitted(put, 1)


def test_drain_waits_for_uncommitted_blocks_while_linked(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    block = uncommitted(store, "a")
    saver = saver_of(store)
    saver.begin()
    run(store, saver)
    assert (saver.is_done, saver.saved_blocks) == (False, 0)
    store.table.mark_committed(block, 7)
    run(store, saver)
    assert (saver.is_done, saver.saved_blocks) == (True, 1)


def test_drain_waits_for_open_puts(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    put = store.open("a")
    assert isinstance(put, OpenPut)
    saver = saver_of(store)
    saver.begin()
    run(store, saver)
    store.put("b")
    run(store, saver)
    assert saver.saved_blocks == 0, "not looked at again yet"
    run(store, saver, now_ns=WAITING_LOOK_NS)
    assert (saver.is_done, saver.saved_blocks) == (False, 1)
    store.commit(put)
    run(store, saver, now_ns=WAITING_LOOK_NS)
    assert (saver.is_done, saver.saved_blocks) == (True, 2)


def test_drain_ends_if_the_device_refuses_writes(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    store.put("a")
    nvme = store.tiers[NVME]
    assert isinstance(nvme, FailingNvme)
    saver = saver_of(store)
    saver.begin()
    saver.step()
    [move] = store.table.evictor.take_moves()
    store.finish(move, is_done=False)
    store.table.evictor.suspend(NVME, is_suspended=True)
    store.put("b")
    run(store, saver)
    assert (saver.is_done, saver.saved_blocks, saver.lost()) == (True, 0, (2, 200))
