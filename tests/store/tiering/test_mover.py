"""Tests of mover.py on a real reactor, threads and tiers: moves are executed, and failures leave every block in place."""

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.protocol.errors import ChecksumMismatch, KVStoreError, TierFailed, Unavailable
from kvstore.rpc.reactor import Reactor
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.block_table.evictor import MAX_EXTRA_EVICTIONS
from kvstore.store.config import NodeSettings
from kvstore.store.tiering.mover import SlowRead, TierMover
from kvstore.testing.transfer.awaited import PATIENCE_S
from kvstore.tiers.tier import Record, TierFull
from tests.no_threads import no_more_threads
from tests.rpc.wires import pump
from tests.store.failing_tier import FailingHbm, FailingNvme
from tests.store.integrity import check
from tests.store.tables import Store, value_of


class Node:
    """A store with a mover, its loop run by the test."""

    def __init__(
        self,
        folder: Path,
        *,
        dram_bytes: int = 300,
        hbm_bytes: int = 0,
        batch_bytes: int = 250,
        retry_s: float = 3600,
        write_threads: int = 1,
    ) -> None:
        self.store = Store(dram_bytes, nvme_bytes=10_000, hbm_bytes=hbm_bytes, folder=folder, slab_bytes=100)
        nvme = self.store.tiers[NVME]
        assert isinstance(nvme, FailingNvme)
        self.nvme = nvme
        self.reactor = Reactor()
        self.rooms = 0
        self.mover = TierMover(
            self.reactor,
            self.store.table,
            self.store.tiers,
            settings=NodeSettings(move_batch=batch_bytes, write_threads=write_threads, tier_retry_s=retry_s),
            on_space_freed=self._on_space_freed,
        )

    def _on_space_freed(self) -> None:
        self.rooms += 1

    def fill(self, count: int = 3) -> list[Block]:
        return [self.store.put(str(number)) for number in range(count)]

    def demote_all(self) -> None:
        """Move every block of DRAM down, or try to."""
        blocks = list(self.store.table.blocks())
        for block in blocks:
            level = self.store.table._levels[DRAM]
            self.store.table.evictor.evict(block, level)
        self.mover.start_moves()
        pump(self.reactor, lambda: not any(block.moving for block in blocks))

    def read(self, blocks: list[Block]) -> tuple[list[Exception | None], list[bytes]]:
        reads = []
        for block in blocks:
            tier = block.fastest()
            assert tier is not None
            slot = block.slots[tier]
            assert slot is not None
            reads.append(SlowRead(block, tier, slot, memoryview(bytearray(block.size_bytes))))
        answers: list[list[Exception | None]] = []
        self.mover.read(reads, answers.append)
        pump(self.reactor, lambda: bool(answers))
        return answers[0], [bytes(read.buffer()) for read in reads]

    def close(self) -> None:
        self.mover.close()
        check(self.store.table)
        self.store.close()
        self.reactor.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def test_moves_are_executed_in_batches(node: Node) -> None:
    blocks = node.fill()
    node.demote_all()
    assert [block.tier_mask() for block in blocks] == [4, 4, 4]
    assert node.rooms == 2, "250 bytes a batch: two blocks, then one"
    assert node.store.dram.free_bytes == 300
    assert [node.store.bytes_of(block, NVME) for block in blocks] == [value_of(block) for block in blocks]


def test_several_batches_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, write_threads=2)
    both, write = threading.Barrier(2), node.nvme.write_batch

    def meet(records: Sequence[Record]) -> None:
        both.wait(PATIENCE_S)
        write(records)

    monkeypatch.setattr(node.nvme, "write_batch", meet)
    blocks = node.fill()
    node.demote_all()
    assert [node.store.bytes_of(block, NVME) for block in blocks] == [value_of(block) for block in blocks]
    node.close()


def test_waiting_requests_are_retried_in_the_next_iteration(node: Node) -> None:
    room = node.store.table.evictor
    assert room.may_take(MAX_EXTRA_EVICTIONS)
    assert not room.may_take(1)
    node.mover.start_moves()
    assert node.rooms == 0, "others are served first"
    node.reactor.run_once(0)
    assert node.rooms == 1
    assert room.may_take(1)


@pytest.mark.promise("resources-exhausted")
@pytest.mark.parametrize("failure", [TierFull("no room"), TierFailed("EIO"), OSError("EIO"), RuntimeError("a bug")])
def test_a_tier_that_refuses_a_write_is_suspended(node: Node, failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    blocks = node.fill()
    node.nvme.write_failure = failure
    with caplog.at_level(logging.WARNING):
        node.demote_all()
    assert "blocks to nvme failed" in caplog.text
    assert [block.tier_mask() for block in blocks] == [2, 2, 2]
    assert [node.store.bytes_of(block, DRAM) for block in blocks] == [value_of(block) for block in blocks]
    assert node.nvme.used_bytes == 0
    assert node.store.table.health(NVME) == f"suspended: {failure}"
    node.store.put("new")
    assert node.store.names() == "12new", "while it rests, blocks leave for good"


def test_a_suspended_tier_is_tried_again_later(tmp_path: Path) -> None:
    node = Node(tmp_path, retry_s=0.0)
    blocks = node.fill()
    node.nvme.write_failure = TierFull("no room")
    node.demote_all()
    node.nvme.write_failure = None
    pump(node.reactor, lambda: not node.store.table._levels[NVME].is_suspended)
    assert node.store.table.health(NVME) == "ok"
    node.demote_all()
    assert [block.tier_mask() for block in blocks] == [4, 4, 4]
    node.close()


def test_an_unreadable_source_is_dropped_and_others_are_moved(tmp_path: Path) -> None:
    node = Node(tmp_path, hbm_bytes=300)
    blocks = node.fill(2)
    for block in blocks:
        for _ in range(2):
            node.store.read("red", block.key, 0)
        node.store.table.evictor.promote_to_hbm(block)
    node.mover.start_moves()
    pump(node.reactor, lambda: not any(block.moving for block in blocks))
    for block in blocks:
        node.store.table.copies.drop_copy(block, DRAM)
        node.store.table.evictor.evict(block, node.store.table._levels[HBM])
    damaged = blocks[0].hbm
    hbm = node.store.tiers[HBM]
    assert isinstance(hbm, FailingHbm)
    assert damaged is not None
    hbm.unreadable = frozenset((damaged,))
    node.mover.start_moves()
    pump(node.reactor, lambda: not any(block.moving for block in blocks))
    assert [block.tier_mask() for block in blocks] == [0, 2]
    node.close()


@pytest.mark.promise("failures-typed")
def test_one_bad_value_does_not_fail_its_neighbours(node: Node) -> None:
    blocks = node.fill()
    blocks[1].checksum ^= 1
    node.demote_all()
    answers, values = node.read(blocks)
    assert [type(answer) for answer in answers] == [type(None), ChecksumMismatch, type(None)]
    assert (values[0], values[2]) == (value_of(blocks[0]), value_of(blocks[2]))


@pytest.mark.promise("interrupts-safe")
def test_mover_threads_are_started_in_the_constructor(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a read was refused and still executed later, into a slot that another block had by then."""
    blocks, let_go = node.fill(), threading.Event()

    def keep_one_busy() -> None:
        let_go.wait(PATIENCE_S)

    node.demote_all()
    node.mover.run_in_reader(keep_one_busy)
    no_more_threads(monkeypatch)
    try:
        answers, values = node.read(blocks)
    finally:
        let_go.set()
    assert (answers, values) == ([None] * 3, [value_of(block) for block in blocks])


@pytest.mark.parametrize("failure", [None, TierFull("no room"), RuntimeError("a bug")])
def test_flush_reports_deletions_that_are_not_durable(node: Node, failure: Exception | None) -> None:
    node.nvme.flush_failure = failure
    done: list[KVStoreError | None] = []
    node.mover.flush(done.append)
    pump(node.reactor, lambda: bool(done))
    assert [type(answer) for answer in done] == [type(None) if failure is None else Unavailable]
    node.mover.flush()
    node.nvme.flush_failure = None


@pytest.mark.promise("remove-stays-removed")
def test_a_removal_waits_for_moves_in_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was answered while another thread wrote the block. If the node died then, the block returned."""
    node, let_go, write = Node(tmp_path, write_threads=2), threading.Event(), FailingNvme.write_batch

    def held(records: Sequence[Record]) -> None:
        let_go.wait(PATIENCE_S)
        write(node.nvme, records)

    monkeypatch.setattr(node.nvme, "write_batch", held)
    (block,) = node.fill(1)
    node.store.table.evictor.evict(block, node.store.table._levels[DRAM])
    node.mover.start_moves()
    node.store.table.copies.drop(block)
    removed, flushed, on_disk = list[KVStoreError | None](), list[KVStoreError | None](), list[int]()

    def answered(error: KVStoreError | None) -> None:
        removed.append(error)
        on_disk.append(len(list(node.nvme.recover())))

    node.mover.flush_after_moves(answered)
    node.mover.flush(flushed.append)
    pump(node.reactor, lambda: bool(flushed))
    assert not removed
    let_go.set()
    pump(node.reactor, lambda: bool(removed))
    assert (removed, on_disk) == ([None], [0])
    node.close()


@pytest.mark.promise("failures-typed")
@pytest.mark.parametrize("moment", ["before its copy", "after its copy"])
def test_a_raising_move_stops_no_other(node: Node, caplog: pytest.LogCaptureFixture, moment: str) -> None:
    """The fault is injected into the table: a dropped block that is visible has a slot that was never freed."""
    blocks = node.fill()
    for block in blocks:
        node.store.table.evictor.evict(block, node.store.table._levels[DRAM])
    if moment == "before its copy":
        blocks[0].is_dropped = True
    node.mover.start_moves()
    blocks[0].is_dropped = True
    pump(node.reactor, lambda: not any(block.moving for block in blocks))
    assert "a callback of the event loop failed" in caplog.text
    assert [block.tier_mask() for block in blocks] == [0, 4, 4]
    assert not node.store.table._levels[NVME].is_suspended
    blocks[0].is_dropped = False
    assert node.store.try_put("new") is not None, "and there is room"


def test_a_raising_plan_keeps_planned_moves(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    (block,) = node.fill(1)
    node.store.table.evictor.evict(block, node.store.table._levels[DRAM])
    monkeypatch.setattr(node.store.table.evictor, "demote_to_low_watermark", fail)
    node.mover.start_moves()
    pump(node.reactor, lambda: not block.moving)
    assert block.tier_mask() == 4
