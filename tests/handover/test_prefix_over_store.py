"""A hand-over through a store and past it: blocks that are in the store are taken from there and not sent twice."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.handover.config import HandoverSettings
from kvstore.handover.prefix import PrefixStore
from kvstore.protocol.errors import Cancelled, KVStoreError, Unavailable
from kvstore.protocol.settings import Size
from tests.handover.scene import SPEC, Executor, Rank, gathered, layout_of

TOKENS = 90
OURS, THEIRS = [7, 3, 4, 1, 0, 2], [9, 10, 11, 2, 3, 5]


def pool_of(rank: Rank) -> NDArray[np.uint16]:
    """The pool as a tensor, [blocks, layers, kv, heads, tokens, dim]."""
    layout = rank.layout
    shape = (layout.pool_blocks, len(layout.rank_layers(rank.rank)), 2, len(layout.rank_heads(rank.rank)), SPEC.block_tokens, SPEC.head_dim)
    return rank.memory[0].view(np.uint16).reshape(shape)


class Shelf:
    """A store that has the first blocks of one sequence, out of the pool of a rank that holds every head."""

    def __init__(self, source: Rank, rank: Rank, count: int) -> None:
        self._source, self._heads, self._count = pool_of(source), rank.layout.rank_heads(rank.rank), count
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: KVStoreError | None = None
        self.token_ids: Any = None

    def get_tensor(self, token_ids: Any, out: Any, *, blocks: Any = None, deadline_s: float | None = None) -> int:
        self.token_ids = token_ids
        assert self.may_go.wait(10)
        if self.error is not None:
            raise self.error
        got = min(self._count, len(blocks))
        for ours, theirs in zip(OURS[:got], blocks[:got], strict=True):
            out[theirs] = self._source[ours][:, :, self._heads.start : self._heads.stop]
        return got


class Scene:
    """TP 1 to TP 2, whose ranks have a store of `count` blocks each."""

    def __init__(self, source: Executor, counts: list[int]) -> None:
        self.shelves: list[Shelf] = []

        def store_of(rank: Rank) -> PrefixStore:
            self.shelves.append(Shelf(source.ranks[0], rank, counts[rank.rank]))
            return PrefixStore(self.shelves[-1], pool_of(rank))

        settings = HandoverSettings(deadline_s=20, direct_min_bytes=Size(0))
        self.destination = Executor(layout_of(tp=2), settings, store=store_of)


def block_bytes() -> int:
    return SPEC.block_bytes // 2


@pytest.mark.parametrize("counts", [[3, 3], [0, 5], [6, 1]])
def test_senders_are_asked_for_what_the_store_has_not(counts: list[int]) -> None:
    with Executor(layout_of()) as source:
        source.fill(1)
        scene = Scene(source, counts)
        with scene.destination as destination:
            wanted = destination.receive(b"r", THEIRS, TOKENS, source, token_ids=list(range(200)))
            [sending] = source.send(b"r", OURS, TOKENS)
            sending.all_ready()
            for handover in (sending, *wanted):
                handover.wait()
            assert np.array_equal(gathered(source, OURS, TOKENS), gathered(destination, THEIRS, TOKENS))
            whole = [min(count, TOKENS // SPEC.block_tokens) * SPEC.block_tokens for count in counts]
            assert [receiving.store_tokens for receiving in wanted] == whole
            token_bytes = block_bytes() // SPEC.block_tokens
            assert [receiving.received_bytes for receiving in wanted] == [(TOKENS - tokens) * token_bytes for tokens in whole]
            assert len(scene.shelves[0].token_ids) == TOKENS


def test_a_store_that_fails_costs_only_what_it_had() -> None:
    with Executor(layout_of()) as source:
        source.fill(1)
        scene = Scene(source, [3, 3])
        scene.shelves[1].error = Unavailable("gone")
        with scene.destination as destination:
            wanted = destination.receive(b"r", THEIRS, TOKENS, source, token_ids=list(range(TOKENS)))
            [sending] = source.send(b"r", OURS, TOKENS)
            sending.all_ready()
            for handover in (sending, *wanted):
                handover.wait()
            assert [receiving.store_tokens for receiving in wanted] == [48, 0]
            assert np.array_equal(gathered(source, OURS, TOKENS), gathered(destination, THEIRS, TOKENS))


def test_a_request_that_is_cancelled_while_it_is_fetched_is_over_after_the_fetch() -> None:
    with Executor(layout_of()) as source:
        scene = Scene(source, [3, 3])
        with scene.destination as destination:
            scene.shelves[0].may_go.clear()
            wanted = destination.receive(b"r", THEIRS, TOKENS, source, token_ids=list(range(TOKENS)))
            wanted[1].cancel()
            with pytest.raises(Cancelled):
                wanted[1].wait()
            assert not wanted[0].is_over
            scene.shelves[0].may_go.set()
            with pytest.raises(Cancelled):
                wanted[0].wait()
            assert [isinstance(rank.outcome_of(b"r"), Cancelled) for rank in destination.ranks] == [True, True]
