"""Tests of a live block table against the lab's replay, which calls the policy alone: the table's other searches, for
display and for queries to the master, leave the policy's decisions unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest

from kvstore.kvcache.traces.named import generate
from kvstore.lab.replay import CacheReplay
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import DRAM
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.replication.last_replica import LastReplicaQueries
from kvstore.tiers.policies.by_name import POLICIES, make_family
from tests.store.integrity import check
from tests.store.made import made
from tests.store.tables import Store

SIZE = 500
BLOCKS = 512
PROMPTS = 400
TICK = 8
"""Prompts between two periodic calls. The clock stands still meanwhile: until then the table may keep reads back."""


class Live(Store):
    """DRAM for BLOCKS blocks, with a master that knows no other replica."""

    def __init__(self, policy: str) -> None:
        self.now_s = 0.0
        super().__init__(BLOCKS * SIZE, slab_bytes=BLOCKS // 4 * SIZE, policy=policy)
        self.queries = LastReplicaQueries(self.table.lowest, self.partition_map, clock_ns=lambda: int(self.now_s * 1e9))
        self.queries.link_up(lambda message, answered: answered(Flags(bytes(len(message.keys)))), 1)

    def prompt(self, ids: Sequence[int]) -> int:
        """Read the blocks and store the missing ones as one batch. Return the number of leading hits."""
        keys = [b"%d" % number for number in ids]
        blocks = [self.table.find("red", key) for key in keys]
        self.table.record_local_reads("red", [block for block in blocks if block is not None], 0)
        missing = {key: parent for key, parent, block in zip(keys, (b"", *keys), blocks, strict=False) if block is None}
        if missing:
            slots = self.table.slots.free_slots("red", SIZE, len(missing))
            new = [made("red", key, SIZE, UNCOMMITTED, "", parent) for key, parent in missing.items()]
            for one, slot in zip(new, slots, strict=True):
                one.set_slot(DRAM, slot)
            self.table.store_all_uncommitted(self.table.puts.add_all(new, "writer", now_ns=0), [0] * len(new))
            self.queries.step()
            self.table.mark_all_committed(new, [1] * len(new))
        self.table.next_victim(DRAM)
        return blocks.index(None) if None in blocks else len(blocks)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_live_table_hits_as_the_lab(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.store.tables.make_family", lambda name: make_family(name, clock=lambda: live.now_s))
    live, lab = Live(policy), CacheReplay(policy, BLOCKS)
    try:
        for number, request in enumerate(islice(generate(seed=1), PROMPTS)):
            if number % TICK == 0:
                live.table.expire(now_ns=0)
                live.queries.run_due()
                live.now_s = request.timestamp_ms / 1000
            request = replace(request, timestamp_ms=live.now_s * 1000)  # noqa: PLW2901
            assert live.prompt(request.hash_ids) == lab.request(request), f"prompt {number}"
        assert lab.counts.prefix_hits > 100
        assert live.table._ingest_tier.counts.evictions > 10 * BLOCKS
        check(live.table)
    finally:
        live.close()
