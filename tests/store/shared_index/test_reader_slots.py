"""Tests of reader_slots.py: the node sees its client's accesses and hazards, and tolerates invalid content."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client.local.reader_slots import Hazard, LocalReaderSlots
from kvstore.client.local.shared_index import SharedIndexReader
from kvstore.protocol.shared_index import (
    ACCESSES,
    AT_ACCESSES_LOST,
    AT_ACCESSES_WRITTEN,
    AT_HOLDS,
    AT_HOLDS_WRITTEN,
    HOLD_HEADER_WORDS,
    HOLD_WORDS,
    READER_SLOTS_BYTES,
    words_of,
)
from kvstore.store.shared_index.index import SharedIndexTable
from kvstore.store.shared_index.reader_slots import MAX_LOST, ReaderSlots
from tests.forks import told_by_child
from tests.store.made import made
from tests.store.tables import find


class Seat:
    """Reader slots from both sides, and an index with a few blocks."""

    def __init__(self) -> None:
        self.node = ReaderSlots()
        fd = self.node.export()
        self.client = LocalReaderSlots(fd, READER_SLOTS_BYTES)
        os.close(fd)
        self.index = SharedIndexTable(64)
        self.blocks = [made("red", b"key %d" % i, 10, i + 1) for i in range(5)]
        for i, block in enumerate(self.blocks):
            self.index.add(block, 10 * i, 0, 100 + i)
        self.view = SharedIndexReader(self.index.fd, self.index.size_bytes)

    def read(self, number: int) -> None:
        found = find(self.view, b"key %d" % number)
        assert found is not None
        self.client.read_one(self.view, found.at, found.sequence, found.size)

    def look(self, number: int) -> Hazard | None:
        found = self.view.find(b"key %d" % number)
        assert found is not None
        return self.client.acquire_hazard(self.view, found)

    def taken(self, most: int = ACCESSES) -> list[bytes]:
        blocks = [self.index.accessed(word) for word in self.node.accesses(most)]
        return [block.key for block in blocks if block is not None]


@pytest.fixture
def seat() -> Iterator[Seat]:
    seat = Seat()
    yield seat
    seat.node.close()
    seat.index.close()


def test_accesses_beyond_a_full_ring_are_counted(seat: Seat) -> None:
    keys = [b"key %d" % (i % 5) for i in range(1000)]
    batch = seat.view.find_batch(words_of(keys, 5), 5)
    for _ in range(ACCESSES // 1000 + 2):
        seat.client.read_many(seat.view, batch)
    seat.read(0)
    assert seat.node.newly_lost() == (ACCESSES // 1000 + 2) * 1000 - ACCESSES + 1
    assert seat.taken() == [b"key %d" % (i % 1000 % 5) for i in range(ACCESSES)]
    seat.read(1)
    assert seat.taken() == [b"key 1"]
    assert seat.node.newly_lost() == 0


@pytest.mark.parametrize("nonsense", [0, ACCESSES + 2, (1 << 64) - 1])
def test_an_invalid_access_count_is_ignored(seat: Seat, nonsense: int) -> None:
    seat.read(1)
    seat.taken()
    seat.client._words[AT_ACCESSES_WRITTEN] = seat.client._words[AT_ACCESSES_LOST] = nonsense
    assert seat.taken() == []
    assert seat.node.newly_lost() <= MAX_LOST
    assert not seat.node.has_accesses


def test_the_node_sees_hazards_until_they_are_released(seat: Seat) -> None:
    hazard = seat.look(2)
    assert hazard is not None
    assert [len(seat.node.hazards_on(100 + number)) for number in range(5)] == [0, 0, 1, 0, 0]
    [word] = seat.node.hazards_on(102)
    assert seat.node.has_hazard(word)
    seat.client.release_hazard(hazard)
    seat.client.release_hazard(hazard)
    assert not seat.node.has_hazard(word)
    again = seat.look(2)
    assert again is not None
    assert not seat.node.has_hazard(word)
    seat.client.release_hazard(again)
    assert not any(seat.node.hazards_on(100 + number) for number in range(5))


def test_a_forked_child_cannot_clear_its_parents_hazards(seat: Seat) -> None:
    hazard = seat.look(2)
    assert hazard is not None
    told_by_child(lambda: seat.client.release_hazard(hazard))
    assert seat.node.hazards_on(102)


def test_closed_reader_slots_protect_nothing(seat: Seat) -> None:
    seat.node.close()
    seat.node.close()
    assert seat.client.is_over
    assert seat.look(1) is None


def test_hold_records_are_read_once_and_in_order(seat: Seat) -> None:
    words = np.arange(HOLD_WORDS // 2, dtype=np.uint64)
    for turn in range(5):
        assert not seat.node.has_holds
        assert seat.client.hold(turn, 1000 + turn, words[turn:])
        assert seat.client.release(turn)
        assert seat.node.has_holds
        assert seat.node.hold_records() == [(turn, 1000 + turn, words[turn:].tolist()), (turn, 0, [])]
        assert seat.node.hold_records() == []


def test_a_ring_of_holds_without_space_refuses_all_of_a_record(seat: Seat) -> None:
    words = np.arange(HOLD_WORDS - 2 * HOLD_HEADER_WORDS, dtype=np.uint64)
    assert seat.client.hold(1, 10, words)
    assert not seat.client.hold(2, 10, words[:1])
    assert seat.client.release(1)
    assert not seat.client.release(2)
    assert [record.number for record in seat.node.hold_records()] == [1, 1]
    assert seat.client.hold(2, 10, words)


def test_invalid_hold_records_are_dropped(seat: Seat) -> None:
    seat.client.hold(1, 10, np.arange(3, dtype=np.uint64))
    seat.client.hold(2, 10, np.arange(3, dtype=np.uint64))
    seat.client._words[AT_HOLDS + 6 + 2] = 1 << 60
    assert [record.number for record in seat.node.hold_records()] == [1]
    seat.client._words[AT_HOLDS_WRITTEN] += HOLD_WORDS + 1
    assert seat.node.hold_records() == []
    seat.client._words[AT_HOLDS_WRITTEN] -= 1
    assert seat.node.hold_records() == []
    assert seat.client.hold(3, 10, np.arange(3, dtype=np.uint64))
    assert [record.number for record in seat.node.hold_records()] == [3]


def test_closed_or_inherited_reader_slots_take_no_holds(seat: Seat) -> None:
    assert told_by_child(lambda: str(seat.client.hold(1, 10, np.arange(3, dtype=np.uint64)))) == "False"
    assert not seat.node.has_holds
    seat.node.close()
    assert not seat.client.hold(1, 10, np.arange(3, dtype=np.uint64))
    assert not seat.client.release(1)
