"""Promises of tiers.py: against a node's own block table, and rule by rule."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab import tiers as module
from kvstore.lab.tiers import TieredCounts, TwoTiers
from kvstore.protocol.errors import InvalidArgument
from kvstore.store.block_table import evictor as room
from kvstore.store.block_table.block import DRAM, NVME
from kvstore.store.block_table.evictor import TierMove
from kvstore.store.config import NodeSettings
from kvstore.tiers.policies.by_name import POLICIES, Clock, make_family
from kvstore.tiers.policies.interface import PolicyFamily
from tests.lab.prompts import prompts, requests
from tests.store.tables import Store


def run(found: Iterable[Sequence[int]], *, dram: int = 20, nvme: int = 20, policy: str = "lru") -> tuple[TwoTiers, TieredCounts]:
    tiers = TwoTiers(policy, dram_blocks=dram, nvme_blocks=nvme)
    return tiers, tiers.run(requests(found))


def where(tiers: TwoTiers) -> tuple[set[int], set[int]]:
    return tiers._dram.resident, tiers._nvme.resident


def test_the_rules_are_a_nodes() -> None:
    defaults = NodeSettings()
    assert room.PROMOTE_AT_HITS == module.PROMOTE_AT_HITS
    assert (defaults.high_watermark, defaults.low_watermark) == (module.HIGH_WATERMARK, module.LOW_WATERMARK)
    assert defaults.write_worth == module.WRITE_WORTH


def test_tiers_demote_oldest_to_the_low_watermark() -> None:
    tiers, counts = run([list(range(19))])
    assert counts.demotions == 0
    tiers.run(requests([[19]]))
    assert where(tiers) == (set(range(2, 20)), {0, 1})
    assert (counts.demotions, counts.evictions) == (2, 0)


def test_tiers_second_nvme_hit_promotes_the_block() -> None:
    tiers, counts = run([list(range(20)), [0]])
    assert (counts.dram_hits, counts.nvme_hits, counts.promotions) == (0, 1, 0)
    tiers.run(requests([[0], [0]]))
    assert (counts.dram_hits, counts.nvme_hits, counts.promotions) == (1, 2, 1)
    assert 0 in where(tiers)[0] & where(tiers)[1]


def test_tiers_block_with_lower_copy_leaves_dram_at_once() -> None:
    tiers, counts = run([list(range(20)), [0], [0]], nvme=60)
    assert (counts.demotions, counts.promotions) == (2, 1)
    tiers.run(requests([range(30, 45), range(45, 60)]))
    dram, nvme = where(tiers)
    assert 0 in nvme - dram
    assert counts.demotions == len(nvme)
    assert (dram & nvme, len(dram | nvme)) == (set(), 50)


def test_what_leaves_nvme_is_gone_unless_it_is_in_dram() -> None:
    tiers, counts = run([list(range(10)), [0], [0], [1], list(range(10, 15))], dram=10, nvme=2)
    dram, nvme = where(tiers)
    assert 0 in dram - nvme
    assert counts.evictions == 15 - len(dram | nvme) > 0


def test_from_the_lowest_tier_only_copies_leave_for_a_watermark() -> None:
    tiers, _ = run([list(range(25))], dram=20, nvme=20)
    before = len(where(tiers)[1])
    tiers.run(requests([range(40, 54)]))
    assert len(where(tiers)[1]) == 20 > before
    tiers.run(requests([[3, 4], [3, 4]]))
    assert len(where(tiers)[1]) == 20, "the oldest is nowhere else"


def test_without_room_at_once_nothing_is_promoted() -> None:
    """A tier of two blocks is full with two that are nowhere else: a demotion would have to come first."""
    tiers, counts = run([[1], [2], [3]], dram=2, nvme=9)
    tiers._dram.add(9, None)
    tiers._parents[9], tiers._hits[9], tiers._hits[1] = None, 0, 1
    assert where(tiers)[0] == {3, 9}
    tiers.read([1])
    assert (counts.promotions, tiers._hits[1]) == (0, 2)


def test_tiers_count_no_hits_after_a_miss() -> None:
    _, counts = run([[1, 1], [2, 1]])
    assert (counts.blocks, counts.hits, counts.prefix_hit_ratio) == (4, 0, 0)
    assert run([])[1].prefix_hit_ratio == 0


@settings(max_examples=60)
@given(prompts, st.integers(1, 12), st.integers(1, 12), st.sampled_from(sorted(POLICIES)))
def test_every_block_is_somewhere_or_was_evicted(found: list[list[int]], dram: int, nvme: int, policy: str) -> None:
    tiers, counts = run([], dram=dram, nvme=nvme, policy=policy)
    stored = 0
    for request in requests(found):
        known = set(tiers._parents)
        stored += len(set(request.hash_ids) - known)
        tiers.request(request)
        check(tiers)
    assert len(tiers._parents) == stored - counts.evictions
    assert counts.hits <= counts.blocks


def check(tiers: TwoTiers) -> None:
    levels: tuple[Any, Any] = (tiers._dram, tiers._nvme)
    assert levels[0].resident | levels[1].resident == set(tiers._parents) == set(tiers._hits)
    for level in levels:
        assert len(level.policy) == len(level.resident) <= level.capacity
        assert all(block in level.policy for block in level.resident)


def test_the_time_of_a_prompt_is_the_policies_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[Clock] = []

    def make(name: str, *, clock: Clock) -> PolicyFamily[Any]:
        clocks.append(clock)
        return make_family(name, clock=clock)

    monkeypatch.setattr(module, "make_family", make)
    tiers, _ = run([[1], [2], [3]])
    tiers.run(requests([[4]]))
    assert [clock() for clock in clocks] == [2.0], "time does not go back"


def node_counts(store: Store, found: list[TraceRequest]) -> TieredCounts:
    """The prompts through a node's block table, its copies made at once."""
    table, counts = store.table, TieredCounts()
    for request in found:
        keys = [str(block).encode() for block in request.hash_ids]
        blocks = []
        slow = []
        for key in keys:
            block = store.read("red", key, 0)
            blocks.append(block)
            if block is not None:
                table.copies.acquire(block)
                if block.slots[DRAM] is None and table.wants_promotion(block):
                    slow.append((block, table.begin_promotion(block)))
        lead = next((index for index, block in enumerate(blocks) if block is None), len(blocks))
        counts.dram_hits += sum(block is not None and block.slots[DRAM] is not None for block in blocks[:lead])
        counts.nvme_hits += sum(block is not None and block.slots[DRAM] is None for block in blocks[:lead])
        for block, slot in slow:
            if slot is not None:
                store.finish(TierMove(block, NVME, DRAM, slot))
        for block in filter(None, blocks):
            table.copies.release(block)
        relieve(store)
        puts = []
        for key, block in zip(keys, blocks, strict=True):
            if block is None:
                while (put := store.open(key.decode())) is None:
                    store.settle()
                puts.append(put)
        relieve(store)
        for put in puts:
            store.commit(put)
        relieve(store)
    counts.blocks = sum(len(request.hash_ids) for request in found)
    for index, _, level, _ in table.levels():
        counts.demotions += level.demotions
        counts.promotions += level.promotions
        counts.evictions += level.evictions if index == NVME else 0
    return counts


def relieve(store: Store) -> None:
    store.table.evictor.demote_to_low_watermark()
    store.settle()


@pytest.mark.parametrize(("dram", "nvme"), [(40, 60), (21, 200), (100, 30)])
def test_it_counts_as_a_nodes_block_table_does(tmp_path: Path, dram: int, nvme: int) -> None:
    random = Random(dram)
    found = requests([random.choices(range(30), k=3) + random.sample(range(30, 200), 8) for _ in range(60)])
    found = [dataclasses.replace(request, hash_ids=tuple(dict.fromkeys(request.hash_ids))) for request in found]
    store = Store(100 * dram, nvme_bytes=100 * nvme, folder=tmp_path, high=module.HIGH_WATERMARK, low=module.LOW_WATERMARK)
    try:
        assert TwoTiers("lru", dram_blocks=dram, nvme_blocks=nvme).run(found) == node_counts(store, found)
    finally:
        store.close()


@pytest.mark.parametrize(("dram", "nvme"), [(0, 1), (1, 0)])
def test_either_tier_has_room(dram: int, nvme: int) -> None:
    with pytest.raises(InvalidArgument, match="0 blocks"):
        TwoTiers("lru", dram_blocks=dram, nvme_blocks=nvme)


def test_secondary_copies_leave_first_and_are_not_demoted() -> None:
    left = list[int]()
    tiers = TwoTiers("lru", dram_blocks=2, nvme_blocks=9, on_left=left.append)
    tiers.run(requests([[1], [2]]))
    tiers.mark_secondary(2)
    tiers.run(requests([[3]]))
    assert left == [2]
    assert where(tiers)[0] == {3}
    assert where(tiers)[1] == {1}
