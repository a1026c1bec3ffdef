"""Tests of access_counts.py: hot blocks are the most read ones, are never overcounted, and cost bounded memory only
while polled."""

import random
from collections import Counter

import pytest

from kvstore.store.block_table.access_counts import IDLE_S, MAX_COUNTED, HotBlocks
from kvstore.store.block_table.block import Block
from tests.store.made import made

S = 1_000_000_000


def block(number: int) -> Block:
    return made("red", b"%d" % number, 100, 1)


@pytest.mark.promise("observable")
def test_hot_blocks_are_counted_only_while_polled() -> None:
    hot = HotBlocks()
    assert hot.hottest(0, S) == []
    assert not hot.is_counting
    assert hot.hottest(5, 2 * S) == []
    assert hot.is_counting
    hot.read([block(1)], is_far=True)
    hot.hottest(0, int((2 + IDLE_S) * S))
    assert hot.is_counting
    hot.hottest(0, int((2.1 + IDLE_S) * S))
    assert not hot.is_counting
    hot.hottest(5, 100 * S)
    assert hot.hottest(5, 101 * S) == [], "it begins anew"


def test_hot_blocks_count_remote_reads_separately() -> None:
    hot, one = HotBlocks(), block(1)
    hot.hottest(1, 0)
    hot.read([one] * 60, is_far=False)
    hot.read([one] * 20, is_far=True)
    assert hot.hottest(1, 10 * S) == [(one, 8.0, 2.0)]
    [(_, reads_per_s, remote_reads_per_s)] = hot.hottest(1, 70 * S)
    assert remote_reads_per_s == pytest.approx(reads_per_s / 4) != 0
    one.is_dropped = True
    hot.hottest(1, 80 * S)
    assert not hot._far


@pytest.mark.promise("observable")
def test_hot_blocks_finds_frequent_blocks_and_never_overcounts() -> None:
    chosen, hot, true = random.Random(3), HotBlocks(), Counter[Block]()
    blocks = [block(number) for number in range(20_000)]
    hot.hottest(1, 0)
    for _ in range(600):
        batch = [*chosen.choices(blocks, k=100), *chosen.choices(blocks[:10], k=20)]
        true.update(batch)
        hot.read(batch, is_far=True)
    assert max(len(hot._counts), len(hot._far)) <= 2 * MAX_COUNTED + 120
    told = hot.hottest(10, 1 * S)
    assert {one for one, _rate, _far in told} == set(blocks[:10])
    for one, rate, far_rate in told:
        assert far_rate == rate
        assert true[one] - true.total() / MAX_COUNTED <= rate <= true[one]
