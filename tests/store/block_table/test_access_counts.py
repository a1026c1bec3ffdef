"""Promises of hot.py: what is told is what is read most, never too much of it, in bounded memory and only while somebody asks."""

import random
from collections import Counter

import pytest

from kvstore.store.block_table.access_counts import IDLE_S, MAX_COUNTED, HotBlocks
from kvstore.store.block_table.block import Block
from tests.store.made import made

S = 1_000_000_000


def block(number: int) -> Block:
    return made("red", b"%d" % number, 100, 1)


def test_nothing_is_counted_before_somebody_asks_and_nothing_any_more_when_nobody_has_for_long() -> None:
    hot = HotBlocks()
    assert hot.told(0, S) == []
    assert not hot.is_counting
    assert hot.told(5, 2 * S) == []
    assert hot.is_counting
    hot.read([block(1)], is_far=True)
    hot.told(0, int((2 + IDLE_S) * S))
    assert hot.is_counting
    hot.told(0, int((2.1 + IDLE_S) * S))
    assert not hot.is_counting
    hot.told(5, 100 * S)
    assert hot.told(5, 101 * S) == [], "it begins anew"


def test_reads_from_other_hosts_are_told_besides_and_age_as_the_others() -> None:
    hot, one = HotBlocks(), block(1)
    hot.told(1, 0)
    hot.read([one] * 60, is_far=False)
    hot.read([one] * 20, is_far=True)
    assert hot.told(1, 10 * S) == [(one, 8.0, 2.0)]
    [(_, reads_per_s, remote_reads_per_s)] = hot.told(1, 70 * S)
    assert remote_reads_per_s == pytest.approx(reads_per_s / 4) != 0
    one.is_gone = True
    hot.told(1, 80 * S)
    assert not hot._far


def test_of_more_blocks_than_counters_the_frequent_ones_are_found_and_none_is_said_to_be_read_more_than_it_was() -> None:
    chosen, hot, true = random.Random(3), HotBlocks(), Counter[Block]()
    blocks = [block(number) for number in range(20_000)]
    hot.told(1, 0)
    for _ in range(600):
        batch = [*chosen.choices(blocks, k=100), *chosen.choices(blocks[:10], k=20)]
        true.update(batch)
        hot.read(batch, is_far=True)
    assert max(len(hot._counts), len(hot._far)) <= 2 * MAX_COUNTED + 120
    told = hot.told(10, 1 * S)
    assert {one for one, _rate, _far in told} == set(blocks[:10])
    for one, rate, far_rate in told:
        assert far_rate == rate
        assert true[one] - true.total() / MAX_COUNTED <= rate <= true[one]
