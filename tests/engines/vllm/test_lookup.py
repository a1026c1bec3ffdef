"""The scheduler's lookups, for all ranks and requests, with a real store.

A hold of a lookup lasts as long as one of its requests needs it.

Requests and tokens count once, however they end.
"""

import itertools
from collections.abc import Iterator

import pytest

from kvstore.client.holds import Hold
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.counters import ConnectorCounters
from kvstore.engines.vllm.identity import Shard, Variant
from kvstore.engines.vllm.lookup import HitCounter, RequestHolds, StoreLookup
from kvstore.engines.vllm.plan import LayerGroup, SchedulerPlan
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.waiting_requests import FoundTokens
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Unavailable
from tests.client.jobs.faulty import FaultyClient, raises
from tests.engines.vllm.requests import BLOCK_TOKENS, FakeRequest, hashes

NUMBERS = itertools.count()
ONE = [LayerGroup(BLOCK_TOKENS)]
VARIANT = Variant("")
"""As the shards of these tests are."""
PATIENT = VllmSettings(lookup_deadline_s=60)


@pytest.fixture
def shards() -> list[Shard]:
    model = f"asked-{next(NUMBERS)}"
    return [Shard(Namespace(model=model, dtype="float32", block_tokens=BLOCK_TOKENS, heads=(rank, 2))) for rank in range(2)]


@pytest.fixture
def jobs(client: FaultyClient) -> Iterator[Jobs]:
    with Jobs(client) as found:
        yield found


def put(client: FaultyClient, shard: Shard, *indices: int, text: str = "") -> None:
    client.put_batch(shard.keys(hashes(indices, text)), [b"value"] * len(indices))
    client.flush()


def lookup(jobs: Jobs, groups: list[LayerGroup], shards: list[list[Shard]], settings: VllmSettings = PATIENT) -> StoreLookup:
    plan = SchedulerPlan(groups, hash_block_tokens=BLOCK_TOKENS, is_whole=lambda block: True, variant=lambda request: VARIANT)
    return StoreLookup(jobs, groups, shards, plan, settings)


def held(client: FaultyClient) -> int:
    """Blocks held in the names of the client's holds so far."""
    return client.stats().held_blocks


def found_blocks(of: StoreLookup, *, computed: int = 0, name: str = "a", text: str = "") -> int:
    """Of a prompt of four blocks and a token."""
    request = FakeRequest(name, 4 * BLOCK_TOKENS + 1, text=text)
    return of.find(request, computed * BLOCK_TOKENS, 0.0).found_tokens // BLOCK_TOKENS


def test_block_is_found_once_each_rank_has_it(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    put(client, shards[0], 0, 1, 2)
    put(client, shards[1], 0, 1, 3)
    assert found_blocks(lookup(jobs, ONE, [shards])) == 2
    assert found_blocks(lookup(jobs, ONE, [shards[:1]])) == 3
    assert found_blocks(lookup(jobs, ONE, [shards]), computed=2) == 0


def test_window_needs_its_last_blocks_only(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    """The engine has the first block in its own cache."""
    put(client, shards[0], 1, 2, 3)
    put(client, shards[1], 2)
    groups = [LayerGroup(BLOCK_TOKENS), LayerGroup(BLOCK_TOKENS, window_tokens=BLOCK_TOKENS)]
    assert found_blocks(lookup(jobs, groups, [shards[:1], shards[1:]]), computed=1) == 2
    assert found_blocks(lookup(jobs, groups, [shards[1:], shards[:1]]), computed=1) == 0
    assert found_blocks(lookup(jobs, [LayerGroup(BLOCK_TOKENS, 1)], [shards]), computed=1) == 2, "of all ranks"
    assert found_blocks(lookup(jobs, [LayerGroup(BLOCK_TOKENS, 2 * BLOCK_TOKENS)], [shards]), computed=1) == 0


def test_blocks_of_several_sizes_end_together(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    """The second group's blocks are named by the last hash of each pair."""
    put(client, shards[0], 0, 1, 2)
    put(client, shards[1], 1)
    groups = [LayerGroup(BLOCK_TOKENS), LayerGroup(2 * BLOCK_TOKENS, window_tokens=1)]
    assert found_blocks(lookup(jobs, groups, [shards[:1], shards[1:]])) == 2


def test_one_message_asks_for_all_waiting_requests(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    put(client, shards[0], 0, 1, 2)
    put(client, shards[1], 0, 1, 2)
    put(client, shards[0], 0, text="other")
    put(client, shards[1], 0, text="other")
    of = lookup(jobs, ONE, [shards])
    for name in ("a", "b"):
        of.waiting.add(FakeRequest(name, 4 * BLOCK_TOKENS + 1, text="" if name == "a" else "other"))
    assert found_blocks(of) == 3
    assert found_blocks(of, name="b", text="other") == 1
    assert [(name, len(keys)) for name, keys in client.calls] == [("exists", 16)]
    counters = of.take_counters()
    assert counters.lookups == 1
    assert counters.lookup_s > 0


def test_admitted_request_is_counted(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    put(client, shards[0], 0, 1)
    of = lookup(jobs, ONE, [shards[:1]])
    assert found_blocks(of) == 2
    of.take_counters()
    of.admitted("a", [7, 8, 9, 10, 11], 2 * BLOCK_TOKENS)
    of.admitted("a", [7, 8, 9, 10, 11], 0)
    of.loaded(["a"])
    tokens = 2 * BLOCK_TOKENS
    assert of.take_counters() == ConnectorCounters(requests=1, queried_tokens=2 * tokens, found_tokens=tokens, loaded_tokens=tokens)
    found_blocks(of, name="b")
    of.ended("b")
    assert of.take_counters().requests == 0, "it was aborted in the queue"


def test_found_blocks_are_held_until_they_are_loaded(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    """The hold of one lookup is released with the last of its requests."""
    put(client, shards[0], 0, 1)
    of = lookup(jobs, ONE, [shards[:1]])
    of.waiting.add(FakeRequest("b", 4 * BLOCK_TOKENS + 1))
    found_blocks(of)
    assert held(client) == 4, "two blocks for each of two requests"
    of.admitted("a", [7, 8], 2 * BLOCK_TOKENS)
    of.admitted("b", [9, 10], 0)
    of.admitted("a", [7, 8], 0)
    assert client.released == []
    of.loaded(["a"])
    assert len(client.released) == 1
    found_blocks(of, name="c")
    of.ended("c")
    assert len(client.released) == 2
    of.take_counters()


def test_unreachable_store_has_nothing(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    """A failure is a result like others: it is not asked for again in the next step."""
    put(client, shards[0], 0)
    of = lookup(jobs, ONE, [shards[:1]])
    assert of.is_reachable
    client.faults.append(raises(Unavailable("away")))
    assert found_blocks(of) == 0
    assert found_blocks(of) == 0
    assert [name for name, _ in client.calls][:1] == ["exists"]
    assert of.take_counters().lookups == 1


def test_connecting_asks_once_and_needs_no_answer(client: FaultyClient, jobs: Jobs, shards: list[Shard]) -> None:
    client.faults.append(raises(Unavailable("away")))
    of = lookup(jobs, ONE, [shards])
    of.connect()
    assert [name for name, _ in client.calls] == ["exists"]
    assert not of.is_reachable
    assert of.take_counters() == ConnectorCounters()


FIRST, SECOND = Hold(2, 1000), Hold(4, 1000)


def test_later_lookup_replaces_a_hold() -> None:
    """Of a request that waits, once each interval."""
    holds = RequestHolds()
    assert holds.take(FIRST, ["a", "b"]) == []
    assert holds.take(SECOND, ["a"]) == []
    assert holds.end(["b", "unknown"]) == [FIRST]
    assert holds.end(["a"]) == [SECOND]
    holds.take(FIRST, ["a", "b"])
    assert holds.take(SECOND, ["a", "b"]) == [FIRST]


TABLE = list(range(100, 110))
"""Blocks of a request; of the first two the engine had."""
FOUND = FoundTokens(8, 32, 24)
COUNTED = ConnectorCounters(requests=1, queried_tokens=32, found_tokens=24)


def admitted(request_id: str = "a", external: int = 24) -> HitCounter:
    hits = HitCounter(4)
    hits.admitted(request_id, FOUND, TABLE, external)
    return hits


def loaded(tokens: int) -> ConnectorCounters:
    counters = ConnectorCounters(loaded_tokens=tokens)
    counters.add(COUNTED)
    return counters


def test_load_counts_when_it_is_over() -> None:
    hits = admitted()
    assert hits.counters.take() == COUNTED
    hits.loaded(["other"])
    assert hits.counters == ConnectorCounters()
    hits.loaded(["a"])
    assert hits.counters.take() == ConnectorCounters(loaded_tokens=24)
    hits.loaded(["a"])
    assert hits.counters == ConnectorCounters()


def test_preempted_request_counts_once() -> None:
    hits = admitted()
    hits.loaded(["a"])
    hits.admitted("a", FOUND, TABLE, 24)
    hits.loaded(["a"])
    assert hits.counters == loaded(24)
    hits.ended("a")
    hits.admitted("a", FOUND, TABLE, 24)
    assert hits.counters.requests == 2, "another one of that name"


def test_tokens_before_a_failed_block_count() -> None:
    hits = admitted()
    hits.failed({105, 107}, [])
    hits.failed({104}, [])
    hits.failed({106}, [])
    hits.failed({1}, [])
    hits.loaded(["a"])
    assert hits.counters == loaded(8), "blocks 102 and 103"


def test_failed_or_ended_request_loaded_nothing() -> None:
    hits = admitted()
    hits.failed((), ["a", "other"])
    hits.loaded(["a"])
    assert hits.counters.take() == COUNTED
    hits = admitted()
    hits.ended("a")
    hits.loaded(["a"])
    assert hits.counters == COUNTED


def test_request_that_was_not_looked_up_does_not_count() -> None:
    hits = HitCounter(4)
    hits.admitted("a", FoundTokens(8), TABLE, 0)
    assert hits.counters == ConnectorCounters()
    hits.admitted("a", FoundTokens(0, 32, 0), TABLE, 0)
    hits.loaded(["a"])
    assert hits.counters == ConnectorCounters(requests=1, queried_tokens=32)
