"""The scheduler's question, for all ranks, with a real store."""

import itertools
import time

import pytest

from kvstore.client.jobs.breaker import State
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.groups import LayerGroup
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.lookup import Lookup
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from tests.client.jobs.faulty import FaultyClient, raises
from tests.engines.vllm.clock import HandClock

HASHES = [bytes([index]) * 32 for index in range(4)]
NUMBERS = itertools.count()
ONE = [LayerGroup(4)]


@pytest.fixture
def shards() -> list[Shard]:
    model = f"asked-{next(NUMBERS)}"
    return [Shard(Namespace(model=model, dtype="float32", block_tokens=4, heads=(rank, 2))) for rank in range(2)]


def put(client: FaultyClient, shard: Shard, *indices: int) -> None:
    client.put_batch([shard.key(HASHES[index]) for index in indices], [b"value"] * len(indices))
    client.flush()


def test_a_block_is_there_once_each_rank_s_part_is(client: FaultyClient, shards: list[Shard]) -> None:
    put(client, shards[0], 0, 1, 2)
    put(client, shards[1], 0, 1, 3)
    with Jobs(client) as jobs:
        assert Lookup(jobs, ONE, [shards], deadline_s=60).tokens(0, [HASHES]) == 8
        assert Lookup(jobs, ONE, [shards[:1]], deadline_s=60).tokens(0, [HASHES]) == 12
        assert Lookup(jobs, ONE, [shards], deadline_s=60).tokens(8, [HASHES[2:]]) == 0


def test_of_a_window_only_the_last_blocks_are_needed(client: FaultyClient, shards: list[Shard]) -> None:
    """The engine has the first block by itself."""
    put(client, shards[0], 1, 2, 3)
    put(client, shards[1], 2)
    groups = [LayerGroup(4), LayerGroup(4, window_tokens=4)]
    with Jobs(client) as jobs:
        assert Lookup(jobs, groups, [shards[:1], shards[1:]], deadline_s=60).tokens(4, [HASHES[1:], HASHES[1:]]) == 8
        assert Lookup(jobs, groups, [shards[1:], shards[:1]], deadline_s=60).tokens(4, [HASHES[1:], HASHES[1:]]) == 0
        assert Lookup(jobs, [LayerGroup(4, 1)], [shards], deadline_s=60).tokens(4, [HASHES[1:]]) == 8, "of all ranks"
        assert Lookup(jobs, [LayerGroup(4, 8)], [shards], deadline_s=60).tokens(4, [HASHES[1:]]) == 0


def test_blocks_of_several_sizes_end_together(client: FaultyClient, shards: list[Shard]) -> None:
    put(client, shards[0], 0, 1, 2)
    put(client, shards[1], 0, 1)
    groups = [LayerGroup(4), LayerGroup(8, window_tokens=1)]
    with Jobs(client) as jobs:
        assert Lookup(jobs, groups, [shards[:1], shards[1:]], deadline_s=60).tokens(0, [HASHES, HASHES[:2]]) == 8


def test_without_time_left_windows_are_not_asked_for(client: FaultyClient, shards: list[Shard]) -> None:
    put(client, shards[0], 0)
    client.faults.append(lambda deadline_s: time.sleep(0.2))
    with Jobs(client) as jobs:
        lookup = Lookup(jobs, [LayerGroup(4), LayerGroup(4, 1)], [shards[:1], shards[:1]], deadline_s=0.1)
        assert lookup.tokens(0, [HASHES, HASHES]) == 0
    assert "exists" not in [name for name, _ in client.calls]


def test_what_it_found_is_counted(client: FaultyClient, shards: list[Shard]) -> None:
    put(client, shards[0], 0)
    with Jobs(client) as jobs:
        lookup = Lookup(jobs, ONE, [shards[:1]], deadline_s=60)
        lookup.tokens(0, [HASHES])
        lookup.tokens(0, [[]])
        counters = lookup.counters.take()
        assert (counters.lookups, counters.hit_blocks, counters.missed_blocks) == (1, 1, 3)
        assert counters.lookup_s > 0


def test_a_store_that_cannot_be_reached_has_nothing(client: FaultyClient, shards: list[Shard]) -> None:
    put(client, shards[0], 0)
    with Jobs(client) as jobs:
        client.faults.append(raises(Unavailable("away")))
        assert Lookup(jobs, ONE, [shards[:1]], deadline_s=60).tokens(0, [HASHES]) == 0


def test_without_time_left_the_store_is_not_asked(client: FaultyClient, shards: list[Shard]) -> None:
    with Jobs(client) as jobs:
        assert Lookup(jobs, ONE, [shards[:1]], deadline_s=0).tokens(0, [HASHES]) == 0
    assert not client.calls


def test_a_rank_that_others_left_too_little_time_for_does_not_count_as_a_store_that_is_away(
    client: FaultyClient, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all attention, and of a window."""
    put(client, shards[0], 0)
    clock = HandClock()
    monkeypatch.setattr("kvstore.engines.vllm.lookup.time", clock)
    late = raises(DeadlineExceeded("late"))
    with Jobs(client) as jobs:
        client.faults += [clock.passes(2400), late]
        assert Lookup(jobs, ONE, [shards], deadline_s=3600).tokens(0, [HASHES]) == 0
        client.faults += [clock.passes(2400), late]
        groups = [LayerGroup(4), LayerGroup(4, window_tokens=4)]
        assert Lookup(jobs, groups, [shards[:1], shards[1:]], deadline_s=3600).tokens(0, [HASHES, HASHES]) == 0
        assert jobs.stats().reads.state is State.CLOSED


def test_connecting_asks_once_and_needs_no_answer(client: FaultyClient, shards: list[Shard]) -> None:
    with Jobs(client) as jobs:
        client.faults.append(raises(Unavailable("away")))
        lookup = Lookup(jobs, ONE, [shards], deadline_s=60)
        lookup.connect()
        assert [name for name, _ in client.calls] == ["match"]
        assert lookup.counters.take().lookups == 0
