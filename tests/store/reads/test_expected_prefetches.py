"""Tests of expected_prefetches.py: blocks that a hint expects to be read are in DRAM by then."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.node_messages import RETAIN_READ, Retain
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import DRAM
from kvstore.store.block_table.prefetched_blocks import MIN_JUDGED, PrefetchedBlocks
from kvstore.store.reads.expected_prefetches import MAX_KEYS, ExpectedPrefetches
from tests.store.made import made
from tests.store.served import Client, Served, served, until

S = 10**9


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=256 << 10, nvme_bytes=1 << 20) as node:
        yield node


@pytest.fixture
def client(node: Served) -> Iterator[Client]:
    client = node.connect()
    yield client
    client.close()


class Prefetches:
    """Stands for the prefetcher: what was queued."""

    def __init__(self) -> None:
        self.queued: list[bytes] = []
        self.is_wasteful = False

    def queue(self, tenant: str, keys: list[bytes]) -> int:
        self.queued += keys
        return len(keys)


@pytest.fixture
def prefetches() -> Prefetches:
    return Prefetches()


@pytest.fixture
def expected(prefetches: Prefetches) -> ExpectedPrefetches:
    return ExpectedPrefetches(prefetches)  # type: ignore[arg-type]


def test_a_block_is_in_dram_before_its_expected_read(node: Served, client: Client) -> None:
    client.put({"block": bytes(2048)})
    node.demote("block")
    assert client.ask(Retain([b"block"], 50, reuse_ms=300, cause=RETAIN_READ), Flags).flags == b"\1"
    block = node.table.find("red", b"block")
    assert block is not None

    def is_there() -> bool:
        node.expected_prefetches.step(node.reactor.now_ns())
        return block.is_in(DRAM)

    until(node, is_there)
    assert node.expected_prefetches.queued == 1


def test_blocks_are_queued_a_tenth_of_the_time_earlier(expected: ExpectedPrefetches, prefetches: Prefetches) -> None:
    expected.expect("red", [b"later"], 40 * S, 0)
    expected.expect("red", [b"soon"], 20 * S, 0)
    expected.step(18 * S - 1)
    assert prefetches.queued == []
    expected.step(18 * S)
    assert prefetches.queued == [b"soon"]
    expected.step(36 * S)
    assert prefetches.queued == [b"soon", b"later"]
    assert expected.queued == 2


def test_expected_keys_are_bounded(expected: ExpectedPrefetches, prefetches: Prefetches) -> None:
    for _ in range(9):
        expected.expect("red", [b"key"] * (MAX_KEYS // 8), S, 0)
    expected.step(S)
    assert len(prefetches.queued) == MAX_KEYS


def test_far_expectations_give_way_to_near_ones(expected: ExpectedPrefetches, prefetches: Prefetches) -> None:
    """A hint of a read in a week keeps out nothing until then, of no tenant."""
    expected.expect("blue", [b"week"] * MAX_KEYS, 7 * 86_400 * S, 0)
    expected.expect("red", [b"soon"], 20 * S, 0)
    expected.expect("red", [b"sooner"], 10 * S, 0)
    expected.step(20 * S)
    assert prefetches.queued == [b"sooner", b"soon"]


def test_few_are_queued_while_prefetches_are_wasteful(expected: ExpectedPrefetches, prefetches: Prefetches) -> None:
    prefetches.is_wasteful = True
    for number in range(64):
        expected.expect("red", [b"%d" % number], S, 0)
    expected.step(S)
    assert len(prefetches.queued) == 4


def test_prefetched_blocks_are_judged_by_the_last_ones() -> None:
    prefetched = PrefetchedBlocks(1 << 30)

    def bring(count: int, *, hits: int) -> None:
        for _ in range(count):
            block = made("red", b"key", 1, 1)
            block.hits, block.is_dropped = hits, not hits
            assert prefetched.reserve(1)
            prefetched.add(block, 0)
        prefetched.check(0)

    bring(MIN_JUDGED - 1, hits=0)
    assert not prefetched.are_wasted
    bring(1, hits=0)
    assert prefetched.are_wasted
    bring(2 * MIN_JUDGED, hits=1)
    assert not prefetched.are_wasted
