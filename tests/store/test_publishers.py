"""Promises of publishers.py: each partition's master hears of its own blocks alone, and who waits for several waits for all of them."""

from collections.abc import Callable, Sequence

import pytest

from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_MOVED, Publish
from kvstore.protocol.errors import KVStoreError
from kvstore.store import publisher as publishers
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.partitioning import Partitioning
from kvstore.store.blocks.undecided import UNDECIDED
from kvstore.store.publisher import Publisher, Publishers
from tests.store.made import made

Answered = Callable[[KVStoreError | None], None]
COUNT = 3
BLOCKS = [made("red", b"key-%d" % number, 1, 1) for number in range(20)]


class Told:
    """Publishers of `COUNT` partitions, and what each one's master hears."""

    def __init__(self, count: int = COUNT, *, moved_before: Sequence[Block] = ()) -> None:
        """Some moved before anything was known of partitions."""
        self.partitioning = Partitioning()
        self.held: list[Block] = list(moved_before)
        self.publishers = Publishers(
            lambda: self.held, self.partitioning, lambda parts: Publisher(parts, batch_events=100, max_in_flight=100)
        )
        for block in moved_before:
            self.publishers.emit(EVENT_MOVED, block)
        self.partitioning.tell(count)
        self.publishers.cut()
        self.heard: list[list[bytes]] = [[] for _ in range(count)]
        self.unanswered: list[list[Answered]] = [[] for _ in range(count)]

    def link_up(self) -> None:
        for partition in range(self.partitioning.count):
            self.publishers[partition].link_up(self._send(partition), 1, lambda: None)

    def _send(self, partition: int) -> Callable[[Publish, Answered], None]:
        def send(message: Publish, answered: Answered) -> None:
            self.heard[partition] += message.keys
            self.unanswered[partition].append(answered)

        return send

    def answer(self, partition: int) -> None:
        answers, self.unanswered[partition] = self.unanswered[partition], []
        for answered in answers:
            answered(None)

    def keys(self, partition: int) -> list[bytes]:
        return [block.key for block in BLOCKS if self.partitioning.of(block.key) == partition]


def test_each_master_hears_of_its_own_blocks_alone() -> None:
    told = Told()
    told.held = BLOCKS[:10]
    told.link_up()
    for block in BLOCKS[10:]:
        told.publishers.emit(EVENT_COMMIT, block)
    assert told.publishers.backlog == 10
    told.publishers.flush()
    for partition in range(COUNT):
        told.answer(partition)
        assert told.heard[partition] == told.keys(partition)
    assert told.publishers.backlog == 0
    assert told.publishers.is_synced


def test_what_moved_before_the_partitions_were_known_is_told_when_it_moves_again() -> None:
    told = Told(moved_before=[made("red", b"recovered-%d" % number, 1, 1) for number in range(20)])
    told.link_up()
    for partition in range(COUNT):
        told.answer(partition)
        told.heard[partition].clear()
    for block in told.held:
        told.publishers.emit(EVENT_MOVED, block)
    told.publishers.flush_now()
    assert sorted(key for heard in told.heard for key in heard) == sorted(block.key for block in told.held)


def test_what_the_master_has_not_decided_about_is_in_no_inventory() -> None:
    told = Told(1)
    told.held = [BLOCKS[0], made("red", b"claimed", 1, UNDECIDED)]
    told.link_up()
    assert told.heard == [[BLOCKS[0].key]]


def test_an_inventory_is_looked_at_in_parts_and_named_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "PART_BLOCKS", 4)
    told = Told()
    told.held = BLOCKS[:10]
    told.link_up()
    told.held = []
    for partition in range(COUNT):
        told.answer(partition)
        assert told.heard[partition] == [key for key in told.keys(partition) if key in {block.key for block in BLOCKS[:10]}]


def test_it_is_in_step_with_the_masters_once_it_is_with_each() -> None:
    told = Told()
    told.link_up()
    for partition in range(COUNT):
        assert not told.publishers.is_synced
        told.answer(partition)
    assert told.publishers.is_synced


def test_who_waits_for_blocks_of_several_partitions_waits_for_all_of_them() -> None:
    told, results = Told(), list[KVStoreError | None]()
    told.link_up()
    for block in BLOCKS:
        told.publishers.emit(EVENT_COMMIT, block)
    told.publishers.when_published(BLOCKS, results.append)
    told.publishers.flush_now()
    for partition in range(COUNT):
        assert results == []
        told.answer(partition)
    assert results == [None]
    told.publishers.when_published(BLOCKS, results.append)
    told.publishers.when_published([], results.append)
    assert results == [None] * 3


def test_who_waits_for_a_new_block_and_one_that_is_durable_does_not_wait_for_the_next_inventory() -> None:
    told, results = Told(1), list[KVStoreError | None]()
    old, new = BLOCKS[:2]
    told.link_up()
    told.publishers.emit(EVENT_COMMIT, old)
    told.publishers.flush()
    told.answer(0)
    told.publishers.emit(EVENT_COMMIT, BLOCKS[2])
    told.publishers[0].link_down()
    told.publishers[0]._max_in_flight = 2
    told.held = [old, BLOCKS[2]]
    told.link_up()
    told.publishers.emit(EVENT_COMMIT, new)
    told.publishers.when_published([old, new], results.append)
    told.publishers.when_published([BLOCKS[2], new], results.append)
    for awaited in ([], [], [None], [None, None]):  # the beginning, what was there, what is new, the end
        told.unanswered[0].pop(0)(None)
        assert results == awaited


def test_with_one_partition_there_is_one_publisher() -> None:
    told, results = Told(1), list[KVStoreError | None]()
    told.link_up()
    told.publishers.emit(EVENT_COMMIT, BLOCKS[0])
    told.publishers.when_published(BLOCKS[:1], results.append)
    told.publishers.when_published([], results.append)
    assert results == [None]
    told.publishers.flush()
    told.answer(0)
    assert results == [None, None]


def test_who_waits_is_told_when_the_node_ends() -> None:
    told, results = Told(), list[KVStoreError | None]()
    told.link_up()
    for block in BLOCKS:
        told.publishers.emit(EVENT_COMMIT, block)
    told.publishers.when_published(BLOCKS, results.append)
    told.publishers.close()
    [error] = results
    assert error is not None
    assert "the node stops" in str(error)
