"""Tests of slot_requests.py: opening a whole batch equals opening its keys one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import BUSY, GRANTED
from kvstore.protocol.node_messages import OpenSlots
from kvstore.security.identity import Identity, IdentityKind
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.session_authenticator import Caller
from kvstore.store.wait_queue import WaitQueue
from kvstore.store.writes import slot_requests as slots_module
from kvstore.store.writes.slot_requests import OpenResult, SlotAllocator, SlotRequest
from tests.store.integrity import check
from tests.store.tables import Store

SIZE = 500


class Clock:
    """The part of a session that `open` uses."""

    def __init__(self) -> None:
        self.reactor: Any = self
        self.context: Caller | None = None

    def now_ns(self) -> int:
        return 0


class Node:
    """DRAM for 20 blocks. Batches of `min_whole` keys and more are opened as a whole, where they can be."""

    def __init__(self, min_whole: int) -> None:
        self.min_whole = min_whole
        self.store = Store(20 * SIZE, slab_bytes=7 * SIZE, policy="leaf_lru")
        self.table = self.store.table
        self.slots = SlotAllocator(self.table, WaitQueue(max_of_owner=9), demotion_wait_s=3600)
        self.session: Any = Clock()

    def open(self, message: OpenSlots, *, may_open: bool = True) -> OpenResult | None:
        with patch.object(slots_module, "MIN_WHOLE", self.min_whole):
            return self.slots.open(self.session, "red", message, may_open=may_open, may_drop=False)

    def puts(self, opening: OpenResult | None) -> list[OpenPut]:
        """Those that are open now."""
        if opening is None:
            return []
        if opening.batch is not None:
            return list(self.slots.table.puts.puts_of(opening.batch))
        return [put for put in opening.puts if put is not None]

    def state(self) -> list[object]:
        check(self.table)
        blocks = sorted((block.key, block.generation, block.parent, block.size_bytes) for block in self.table.blocks())
        return [blocks, self.store.dram.used_bytes, self.table.open_puts]


@contextmanager
def nodes() -> Iterator[tuple[Node, Node]]:
    both = Node(1), Node(1000)
    try:
        yield both
    finally:
        for node in both:
            node.store.close()


def message(keys: list[int], size: int = SIZE, generation: int = UNCOMMITTED) -> OpenSlots:
    return OpenSlots("ns", [b"%d" % key for key in keys], [size] * len(keys), [generation] * len(keys), [b"p"] * len(keys))


BATCHES = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.sampled_from([SIZE, SIZE - 1]),
    st.sampled_from([UNCOMMITTED, 7]),
    st.sampled_from(["commit", "abort", "leave"]),
    st.booleans(),
)


@given(st.lists(BATCHES, max_size=6))
@settings(max_examples=80)
def test_opening_a_whole_batch_equals_single_opens(batches: list[tuple[list[int], int, int, str, bool]]) -> None:
    with nodes() as (whole, each):
        for keys, size, generation, then, may_open in batches:
            found = [node.open(message(keys, size, generation), may_open=may_open) for node in (whole, each)]
            assert (found[0] is None) == (found[1] is None)
            for node, opening in zip((whole, each), found, strict=True):
                if opening is not None and opening.batch is not None and then == "commit":
                    opening.batch.is_named = True
                    assert node.table.puts.get_batch(opening.batch.ids, node.session) is opening.batch
                    node.table.store_batch_uncommitted(opening.batch, [1] * len(keys))
                    continue
                for put in node.puts(opening):
                    assert put.block.namespace == "ns"
                    if then == "commit":
                        node.table.store_uncommitted(put, 1) if generation == UNCOMMITTED else node.table.commit(put, 1)
                    elif then == "abort":
                        node.table.abort(put)
            if found[0] is not None and found[1] is not None:
                assert found[0].statuses == found[1].statuses
            assert whole.state() == each.state()


def test_puts_of_an_unsent_reply_are_aborted() -> None:
    class Unlucky(SlotRequest):
        def opened(self, opening: OpenResult) -> None:
            assert opening.batch is not None
            raise KeyError

        def fail(self, error: Exception) -> None: ...

    with nodes() as (whole, _):
        whole.session.context = Caller("red", Identity(IdentityKind.TENANT, name="red"))
        request = Unlucky(whole.slots, whole.session, FrameHeader(OpenSlots.TYPE, 1, 0, 0, 0), message([1, 2]))
        with patch.object(slots_module, "MIN_WHOLE", 1), pytest.raises(KeyError):
            request.begin()
        assert whole.state() == [[], 0, 0]


@pytest.mark.parametrize("generation", [UNCOMMITTED, 7])
def test_a_key_with_a_commit_in_flight_is_busy_for_cluster_puts(generation: int) -> None:
    with nodes() as (whole, each):
        for node in (whole, each):
            opening = node.open(message([1]))
            block = node.table.store_uncommitted(node.puts(opening)[0], 1)
            node.table.uncommitted.take(10)
            node.table.copies.drop(block)
            again = node.open(message([1, 2], generation=generation))
            assert again is not None
            assert list(again.statuses) == [GRANTED if generation == UNCOMMITTED else BUSY, GRANTED]
