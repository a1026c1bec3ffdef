"""A rank's loads and saves, with a real store and pools of its own, without an engine."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.plan import BlockTransfer, StepPlan
from kvstore.engines.vllm.pools import CHUNK_BYTES, ChunkStaging, LayerPools
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import DeadlineExceeded, Full, Unavailable
from kvstore.protocol.retention import Retention
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from tests.client.jobs.faulty import Barrier, FaultyClient, raises
from tests.engines.put_client import PutClient
from tests.engines.vllm.clock import HandClock
from tests.no_threads import no_more_threads

BLOCKS = 12
NUMBERS = itertools.count()


def await_loads(worker: Worker, requests: set[str]) -> None:
    over: set[str] = set()

    def are_over() -> bool:
        worker.wait_idle()
        over.update(worker.take_finished()[1])
        return over == requests

    eventually(are_over, "the loads are over, each told once")


class Rank:
    """A worker over pools of 3 layers, whose block b is full of `first` + b."""

    def __init__(
        self,
        address: str,
        shard: Shard,
        settings: VllmSettings | None = None,
        *,
        first: int = 0,
    ) -> None:
        self.layers = [torch.arange(first, first + BLOCKS, dtype=torch.float32).repeat_interleave(512).view(BLOCKS, -1) for _ in range(3)]
        self.client = PutClient(address)
        self.shard = shard
        self.worker = Worker(self.client, [RankGroup(shard, LayerPools(self.layers, BLOCKS))], settings or VllmSettings())

    def contents(self, *blocks: int) -> list[float]:
        """Return the value that fills each of the blocks in all layers."""
        for block in blocks:
            assert all(torch.equal(layer[block], self.layers[0][block, 0].expand_as(layer[block])) for layer in self.layers)
        return [float(self.layers[0][block, 0]) for block in blocks]

    def save(self, *transfers: BlockTransfer, finishing: list[str] | None = None) -> None:
        self.worker.save(StepPlan(saves=list(transfers), finishing=finishing or []))

    def store(self, *transfers: BlockTransfer) -> None:
        """Save the blocks and wait until they are committed."""
        self.save(*transfers)
        self.worker.flush()

    def parents(self) -> list[list[bytes | None]]:
        return [parents for _, parents, _ in self.client.puts]

    def load(self, *transfers: BlockTransfer) -> set[int]:
        """The blocks that did not come, once the loads are over."""
        self.worker.load(StepPlan(loads=list(transfers), is_idle=True))
        await_loads(self.worker, {transfer.request_id for transfer in transfers})
        return self.worker.take_failed()


@pytest.fixture
def shard() -> Shard:
    return Shard(Namespace(model=f"model-{next(NUMBERS)}", dtype="float32", block_tokens=4))


Ranks = Callable[..., Rank]


@pytest.fixture
def ranks(address: str, shard: Shard) -> Iterator[Ranks]:
    """Makes those of one engine."""
    with contextlib.ExitStack() as stack:

        def made(settings: VllmSettings | None = None, *, first: int = 0) -> Rank:
            rank = Rank(address, shard, settings, first=first)
            stack.callback(rank.worker.close)
            return rank

        yield made


@pytest.fixture
def rank(ranks: Ranks) -> Rank:
    return ranks()


@pytest.fixture(params=["by way of staging memory", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load blocks into the pool by staging memory, or in place."""
    if request.param == "in place":
        monkeypatch.setattr("kvstore.engines.vllm.pools.MIN_PIECE_BYTES", 1)


def hashes(count: int) -> list[bytes]:
    return [bytes([index]) * 32 for index in range(count)]


@pytest.mark.usefixtures("way")
def test_what_one_rank_saves_another_loads_into_other_blocks(ranks: Ranks, rank: Rank) -> None:
    rank.store(BlockTransfer("a", [3, 1, 2], hashes(3)))
    other = ranks(first=100)
    assert other.load(BlockTransfer("b", [7, 8, 5], hashes(3))) == set()
    assert other.contents(7, 8, 5, 6) == [3, 1, 2, 106]
    counters = other.worker.take_counters()
    assert (counters.loaded_blocks, counters.loaded_bytes, counters.failed_blocks) == (3, 3 * 3 * 512 * 4, 0)
    assert rank.worker.take_counters().saved_blocks == 3


def test_blocks_move_when_the_system_has_no_more_threads(ranks: Ranks, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.store(BlockTransfer("a", [3, 1], hashes(2)))
    other = ranks(first=100)
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        assert other.load(BlockTransfer("b", [7, 8], hashes(2)), BlockTransfer("c", [5], hashes(1))) == set()
        other.save(BlockTransfer("d", [9], [b"9" * 32]))
    assert other.contents(7, 8, 5) == [3, 1, 3]
    other.worker.flush()
    assert other.worker.take_counters().saved_blocks == 1


@pytest.mark.usefixtures("way")
def test_blocks_from_the_first_miss_on_have_failed(rank: Rank) -> None:
    rank.store(BlockTransfer("a", [0, 2], [hashes(3)[0], hashes(3)[2]]))
    assert rank.load(BlockTransfer("b", [7, 8, 5], hashes(3))) == {8, 5}
    assert rank.contents(7) == [0]


def test_the_block_before_the_first_is_told_to_the_store(rank: Rank) -> None:
    rank.store(BlockTransfer("a", [1, 2], hashes(3)[1:], hashes(1)[0]), BlockTransfer("b", [3], [b"x" * 32]))
    assert rank.parents() == [rank.shard.keys(hashes(2)), [None]]


@pytest.mark.usefixtures("way")
def test_a_value_of_another_size_is_no_block(rank: Rank) -> None:
    rank.client.put(rank.shard.key(hashes(1)[0]), b"short")
    rank.client.flush()
    assert rank.load(BlockTransfer("b", [7], hashes(1))) == {7}


def test_a_request_of_many_chunks_is_moved_whole(ranks: Ranks, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engines.vllm.pools.CHUNK_BYTES", 3 * 3 * 512 * 4)
    rank = ranks()
    rank.store(BlockTransfer("a", list(range(8)), hashes(8)))
    rank.load(BlockTransfer("b", [11, 10, 9, 8], hashes(4)))
    assert rank.contents(*range(11, 7, -1)) == [0, 1, 2, 3]
    assert rank.parents() == [[None, *shard.keys(hashes(2))], shard.keys(hashes(8)[2:5]), shard.keys(hashes(8)[5:7])]


def test_blocks_of_a_finished_request_are_freed_once_copied(rank: Rank) -> None:
    barrier = Barrier()
    rank.client.faults.append(barrier)
    rank.save(BlockTransfer("a", [3], hashes(1)), finishing=["a"])
    assert rank.worker.take_finished() == ({"a"}, set())
    assert barrier.is_reached.acquire(timeout=60)
    for layer in rank.layers:
        layer[3] = -1
    barrier.open()
    rank.worker.flush()
    rank.load(BlockTransfer("b", [4], hashes(1)))
    assert rank.contents(4) == [3]


def test_of_ranks_with_equal_bytes_only_one_stores(address: str, shard: Shard) -> None:
    rank = Rank(address, shard)
    second = Worker(FaultyClient(address), [RankGroup(shard, LayerPools(rank.layers, BLOCKS), is_writer=False)], VllmSettings())
    second.save(StepPlan(saves=[BlockTransfer("a", [3], hashes(1))], finishing=["a"]))
    second.flush()
    assert second.take_finished() == ({"a"}, set())
    assert not rank.client.exists(shard.key(hashes(1)[0]))
    second.close()
    rank.worker.close()


def test_what_has_no_room_to_wait_in_is_dropped_and_counted(ranks: Ranks) -> None:
    rank = ranks(VllmSettings(write_behind_bytes=Size(1 << 20)))
    barrier = Barrier()
    rank.client.faults.append(barrier)
    rank.save(BlockTransfer("a", [3], hashes(1)))
    assert barrier.is_reached.acquire(timeout=60)
    rank.save(BlockTransfer("b", [1, 2], hashes(3)[1:]))
    assert rank.worker.take_counters().dropped_blocks == 2
    barrier.open()
    rank.worker.flush()
    assert rank.worker.take_counters().saved_blocks == 1


def test_what_the_store_does_not_take_is_dropped_and_counted(rank: Rank) -> None:
    rank.client.faults.append(raises(Full("no room")))
    rank.store(BlockTransfer("a", [3, 4], hashes(2)))
    counters = rank.worker.take_counters()
    assert (counters.saved_blocks, counters.dropped_blocks) == (0, 2)


def test_blocks_that_cannot_be_copied_are_dropped(ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU has no memory to put them together, or the host none for a chunk; there is one chunk only."""
    rank = ranks(VllmSettings(write_behind_bytes=Size(CHUNK_BYTES)))
    rank.save(BlockTransfer("a", [3, BLOCKS + 7], hashes(2)))
    with monkeypatch.context() as without:
        without.setattr(ChunkStaging, "take", raises(MemoryError("none left")))
        rank.save(BlockTransfer("a", [3], hashes(1)), finishing=["a"])
    rank.store(BlockTransfer("b", [4], hashes(3)[2:]))
    counters = rank.worker.take_counters()
    assert (counters.saved_blocks, counters.dropped_blocks) == (1, 3)
    assert rank.worker.take_finished()[0] == {"a"}
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "kvstore: copying blocks fails",
        "kvstore: copying blocks works again",
    ]


def test_unreachable_store_fails_blocks_without_raising(rank: Rank) -> None:
    rank.client.faults.append(raises(Unavailable("away")))
    assert rank.load(BlockTransfer("b", [7, 8], hashes(2))) == {7, 8}


def test_a_mistake_in_a_load_fails_its_blocks_and_no_others(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.store(BlockTransfer("a", [3], hashes(1)))
    assert rank.load(BlockTransfer("b", [BLOCKS + 7], hashes(1)), BlockTransfer("c", [5], hashes(1))) == {BLOCKS + 7}
    assert rank.contents(5) == [3]
    assert "loading blocks of request b" in caplog.text


def test_a_load_that_takes_too_long_has_failed(ranks: Ranks) -> None:
    rank = ranks(VllmSettings(load_deadline_s=0.001))
    rank.client.faults.append(lambda deadline_s: time.sleep(0.01))
    rank.save(BlockTransfer("a", [3], hashes(1)))
    assert rank.load(BlockTransfer("b", [5], [b"nowhere"])) == {5}


def test_late_load_does_not_open_the_circuit(ranks: Ranks, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    monkeypatch.setattr("kvstore.engines.vllm.worker.time", clock)
    rank = ranks(VllmSettings(load_deadline_s=3600))
    rank.store(BlockTransfer("a", [3], hashes(1)))
    rank.client.faults += [clock.passes(2400), raises(DeadlineExceeded("late"))]
    assert rank.load(BlockTransfer("b", [5], hashes(1)), BlockTransfer("b", [6], [b"late"])) == {6}
    rank.load(BlockTransfer("c", [7], [b"nowhere"]))
    assert ("get", [shard.key(b"nowhere")]) in rank.client.calls, "others' loads ask the store"


def test_an_engine_without_loads_does_not_wait(rank: Rank) -> None:
    rank.worker.wait_idle()
    assert rank.worker.take_finished() == (set(), set())


def test_closing_stores_what_was_copied(address: str, shard: Shard) -> None:
    rank = Rank(address, shard)
    rank.save(BlockTransfer("a", [3], hashes(1)))
    rank.worker.close()
    with contextlib.closing(FaultyClient(address)) as client:
        eventually(lambda: client.exists(shard.key(hashes(1)[0])), "it is there")


@pytest.mark.usefixtures("way")
def test_hints_of_transfers_reach_puts_and_gets(rank: Rank) -> None:
    hint = Retention(70, ttl_s=60, session="s")
    rank.store(BlockTransfer("a", [3, 4], hashes(2), retention=hint))
    rank.store(BlockTransfer("a", [5], [b"other"]))
    assert rank.load(BlockTransfer("b", [7, 8], hashes(2), retention=hint)) == set()
    assert rank.client.hints == [hint, None, hint]


def test_ended_session_frees_its_saved_blocks(ranks: Ranks) -> None:
    """Blocks that another session has loaded stay."""
    first, second = ranks(), ranks()
    first.store(BlockTransfer("a", [3, 4, 5], hashes(3), retention=Retention(session="first")))
    second.load(BlockTransfer("b", [7], hashes(1), retention=Retention(session="second")))
    assert second.client.end_session("second") == 0
    assert first.client.end_session("first") == 2


class HybridRank:
    """A worker with two groups of layers, of values of other sizes, and a third of which it has none. Block b is full of `first` + b."""

    def __init__(self, address: str, shards: list[Shard], *, first: int = 0) -> None:
        filled = torch.arange(first, first + BLOCKS, dtype=torch.float32)
        self.pools = [filled.repeat_interleave(size).view(BLOCKS, -1) for size in (512, 8)]
        self.client = PutClient(address)
        groups = [RankGroup(shard, LayerPools([pool], BLOCKS)) for shard, pool in zip(shards, self.pools, strict=True)]
        self.worker = Worker(self.client, [*groups, None], VllmSettings(), all_or_nothing=True)

    def loaded(self, *transfers: BlockTransfer) -> set[str]:
        """Requests whose load is over, all of them, and those that failed."""
        requests = {transfer.request_id for transfer in transfers}
        self.worker.load(StepPlan(loads=list(transfers), is_idle=True))
        await_loads(self.worker, requests)
        return self.worker.take_failed_requests(requests)


@pytest.fixture
def shards() -> list[Shard]:
    return [Shard(Namespace(model=f"group-{next(NUMBERS)}", dtype="float32", block_tokens=4)) for _ in range(2)]


@pytest.mark.usefixtures("way")
def test_each_group_has_values_and_keys_of_its_own(address: str, shards: list[Shard]) -> None:
    one, two = HybridRank(address, shards), HybridRank(address, shards, first=100)
    saves = [
        BlockTransfer("a", [3, 1], hashes(2)),
        BlockTransfer("a", [2], hashes(1), hashes(2)[1], 1),
        BlockTransfer("a", [5], hashes(1), None, 2),
    ]
    one.worker.save(StepPlan(saves=saves))
    one.worker.flush()
    assert [parents for _, parents, _ in one.client.puts] == [[None, shards[0].key(hashes(1)[0])], [shards[1].key(hashes(2)[1])]]
    loads = [
        BlockTransfer("b", [7, 8], hashes(2)),
        BlockTransfer("b", [9], hashes(1), None, 1),
        BlockTransfer("b", [9], hashes(1), None, 2),
    ]
    assert two.loaded(*loads) == set()
    assert (two.pools[0][[7, 8, 9], 0].tolist(), two.pools[1][[7, 8, 9], 0].tolist()) == ([3, 1, 109], [107, 108, 2])
    assert not two.worker.take_failed()
    for rank in (one, two):
        rank.worker.close()


def test_missing_block_of_one_group_fails_its_request_only(address: str, shards: list[Shard]) -> None:
    rank = HybridRank(address, shards)
    rank.worker.save(StepPlan(saves=[BlockTransfer("a", [3], hashes(1)), BlockTransfer("a", [2], hashes(1), None, 1)]))
    rank.worker.flush()
    lost = [BlockTransfer("b", [7], [b"nowhere"]), BlockTransfer("b", [9], hashes(1), None, 1)]
    whole = [BlockTransfer("c", [8], hashes(1)), BlockTransfer("c", [10], hashes(1), None, 1)]
    assert rank.loaded(*lost, *whole) == {"b"}
    assert rank.pools[1][9, 0] == 9, "nothing is loaded after the first that did not come"
    assert not rank.worker.take_failed_requests({"b"}), "it is told once"
    assert not rank.worker.take_failed()
    rank.worker.close()
