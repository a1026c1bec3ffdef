"""Promises of replay.py, over a store in this process that can be small, and can lie."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.tools import replay
from kvstore.client.tools.block_bytes import block_key
from kvstore.client.tools.replay import Replay, ReplayCounts
from kvstore.kvcache.traces.mooncake import TraceRequest


class DictStore:
    """LRU over `capacity` blocks; `liar` may change what a read returns."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.parents: dict[bytes, bytes | None] = {}
        self.namespaces: set[str] = set()

    def get_batch_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]:
        sizes: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.blocks.get(key)
            if value is not None:
                self.blocks.move_to_end(key)
                buffer[: len(value)] = value
            sizes.append(None if value is None else len(value))
        return sizes

    def put_batch(
        self, keys: Sequence[bytes], values: Sequence[memoryview], *, namespace: str, parents: Sequence[bytes | None]
    ) -> list[bool]:
        self.namespaces.add(namespace)
        stored = []
        for key, value, parent in zip(keys, values, parents, strict=True):
            stored.append(key not in self.blocks)
            self.blocks[key], self.parents[key] = bytes(value), parent
            if len(self.blocks) > self.capacity:
                self.blocks.popitem(last=False)
        return stored


def prompt(*ids: int) -> TraceRequest:
    return TraceRequest(0, 512 * len(ids), 1, ids)


def ticking() -> float:
    """A clock that gains a second at every look."""
    return float(next(TICKS))


TICKS = itertools.count()


def test_the_ratio_is_the_leading_run_of_resident_blocks_over_all_blocks() -> None:
    store = DictStore()
    counts = Replay(store, block_bytes=16).run([prompt(0, 1, 2), prompt(0, 1, 3, 2), prompt(9, 0, 1)])
    assert (counts.requests, counts.blocks, counts.prefix_hits, counts.hits, counts.stored) == (3, 10, 2, 5, 5)
    assert counts.prefix_hit_ratio == 0.2
    assert counts.wrong_bytes == 0


def test_misses_are_stored_with_their_parents() -> None:
    store = DictStore()
    Replay(store, block_bytes=16).run([prompt(5, 6), prompt(5, 7, 6, 8)])
    keys = {block: block_key(block, 16) for block in range(9)}
    assert store.parents == {keys[5]: None, keys[6]: keys[5], keys[7]: keys[5], keys[8]: keys[6]}
    assert store.namespaces == {replay.NAMESPACE}


def test_a_block_repeated_in_one_prompt_is_stored_once() -> None:
    counts = Replay(DictStore(), block_bytes=16).run([prompt(1, 1, 1)])
    assert (counts.blocks, counts.prefix_hits, counts.stored, counts.put_bytes) == (3, 0, 1, 16)


def test_a_prompt_without_blocks_counts_as_a_request() -> None:
    counts = Replay(DictStore(), block_bytes=16).run([prompt()])
    assert (counts.requests, counts.blocks, counts.prefix_hit_ratio) == (1, 0, 0.0)


def test_speeds_count_only_the_time_inside_the_store() -> None:
    counts = Replay(DictStore(), block_bytes=16, clock=ticking).run([prompt(1, 2), prompt(1, 2)])
    assert (counts.get_s, counts.put_s) == (2.0, 1.0)
    assert (counts.get_bytes_per_s, counts.put_bytes_per_s) == (16.0, 32.0)
    assert (ReplayCounts().get_bytes_per_s, ReplayCounts().put_bytes_per_s) == (0.0, 0.0)


def test_one_wrong_byte_ends_the_replay_and_names_the_block() -> None:
    store = DictStore()
    engine = Replay(store, block_bytes=16)
    engine.run([prompt(1, 2, 3)])
    key = block_key(2, 16)
    store.blocks[key] = bytes([store.blocks[key][0] ^ 1]) + store.blocks[key][1:]
    seen: list[int] = []
    counts = engine.run([prompt(1, 2, 3), prompt(4)], lambda counts: seen.append(counts.requests))
    assert counts.wrong_bytes == 1
    assert counts.wrong_block == "block 2 (number 1 of request 2)"
    assert seen == [2]


def test_another_blocks_bytes_are_wrong_and_so_is_another_size() -> None:
    for damage, wrong_bytes in ((lambda value: value[:15], 16), (lambda value: bytes(16), 16)):
        store = DictStore()
        engine = Replay(store, block_bytes=16)
        engine.run([prompt(1)])
        store.blocks[block_key(1, 16)] = damage(store.blocks[block_key(1, 16)])
        assert engine.run([prompt(1)]).wrong_bytes == wrong_bytes


@given(
    trace=st.lists(st.lists(st.integers(0, 12), max_size=12, unique=True), max_size=20),
    capacity=st.integers(1, 14),
    batch=st.integers(1, 5),
)
def test_any_trace_gives_what_a_plain_count_gives_however_it_is_cut_into_batches(trace: list[list[int]], capacity: int, batch: int) -> None:
    resident: OrderedDict[int, None] = OrderedDict()
    expected = 0
    for ids in trace:
        hits = [block for block in ids if block in resident]
        expected += sum(1 for _ in itertools.takewhile(resident.__contains__, ids))
        for block in hits:
            resident.move_to_end(block)
        for block in ids:
            if block not in hits:
                resident[block] = None
                if len(resident) > capacity:
                    resident.popitem(last=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "MAX_BATCH_BLOCKS", batch)
        counts = Replay(DictStore(capacity), block_bytes=24).run([prompt(*ids) for ids in trace])
    assert counts.prefix_hits == expected
    assert counts.wrong_bytes == 0
