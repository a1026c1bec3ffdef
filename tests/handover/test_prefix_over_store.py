"""A hand-over through a store and past it: blocks that are in the store are taken from there and not sent twice."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.handover.config import HandoverSettings
from kvstore.handover.prefix import RankPrefixStore
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, KVStoreError, Unavailable
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
        self.asked = 0

    def get_tensor(self, token_ids: Any, out: Any, *, blocks: Any, first_block: int, deadline_s: float) -> int:
        self.token_ids = token_ids
        self.asked += 1
        assert self.may_go.wait(10)
        if self.error is not None:
            raise self.error
        got = max(0, min(self._count - first_block, len(blocks)))
        for ours, theirs in zip(OURS[first_block : first_block + got], blocks[:got], strict=True):
            out[theirs] = self._source[ours][:, :, self._heads.start : self._heads.stop]
        return got


class Scene:
    """TP 1 to TP 2, whose ranks have a store of `count` blocks each."""

    def __init__(self, source: Executor, counts: list[int], **more: Any) -> None:
        self.shelves: list[Shelf] = []

        def store_of(rank: Rank) -> RankPrefixStore:
            self.shelves.append(Shelf(source.ranks[0], rank, counts[rank.rank]))
            return RankPrefixStore(self.shelves[-1], pool_of(rank))

        settings = HandoverSettings(deadline_s=20, direct_min_bytes=Size(0), **more)
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


def test_cancelled_request_is_over_after_its_fetch() -> None:
    with Executor(layout_of()) as source:
        scene = Scene(source, [3, 3])
        with scene.destination as destination:
            scene.shelves[0].may_go.clear()
            wanted = destination.receive(b"r", THEIRS, TOKENS, source, token_ids=list(range(TOKENS)))
            destination.until(lambda: scene.shelves[0].asked == 1)
            wanted[1].cancel()
            with pytest.raises(Cancelled):
                wanted[1].wait()
            assert not wanted[0].is_over
            scene.shelves[0].may_go.set()
            with pytest.raises(Cancelled):
                wanted[0].wait()
            assert [isinstance(rank.outcome_of(b"r"), Cancelled) for rank in destination.ranks] == [True, True]


@pytest.mark.promise("handover-fenced")
def test_request_ended_in_the_fetch_queue_is_never_fetched() -> None:
    with Executor(layout_of()) as source:
        source.fill(1)
        scene = Scene(source, [6, 6])
        with scene.destination as destination:
            rank, [shelf, _] = destination.ranks[0], scene.shelves
            shelf.may_go.clear()
            how: dict[str, Any] = {"tokens": TOKENS, "source": destination.counterpart(source), "token_ids": list(range(TOKENS))}
            first = rank.transceiver.receive(b"first", THEIRS, **how)
            late = rank.transceiver.receive(b"late", [20, 21, 22, 23, 24, 25], deadline_s=0.05, **how)
            cancelled = rank.transceiver.receive(b"cancelled", [26, 27, 28, 29, 30, 31], **how)
            cancelled.cancel()
            for handle, error in ((late, DeadlineExceeded), (cancelled, Cancelled)):
                with pytest.raises(error):
                    handle.wait()
                assert handle.is_over
                assert handle.is_fenced
            assert not first.is_over
            pool_of(rank)[20:32] = 7
            shelf.may_go.set()
            [sending] = source.send(b"first", OURS, TOKENS)
            sending.all_ready()
            destination.ranks[1].transceiver.receive(b"first", THEIRS, **how).wait()
            first.wait()
            after = rank.transceiver.receive(b"after", [8, 12, 13, 14, 15, 16], **how)
            [sending] = source.send(b"after", OURS, TOKENS)
            sending.all_ready()
            destination.ranks[1].transceiver.receive(b"after", [8, 12, 13, 14, 15, 16], **how).wait()
            after.wait()
            assert shelf.asked == 2
            assert (pool_of(rank)[20:32] == 7).all()


@pytest.mark.promise("handover-fenced")
def test_blocks_are_not_fenced_while_a_late_fetch_may_write() -> None:
    with Executor(layout_of()) as source:
        scene = Scene(source, [6, 6], fence_timeout_s=0.05)
        with scene.destination as destination:
            transceiver, [shelf, _] = destination.ranks[0].transceiver, scene.shelves
            shelf.may_go.clear()
            how: dict[str, Any] = {"tokens": TOKENS, "source": destination.counterpart(source), "token_ids": list(range(TOKENS))}
            receiving = transceiver.receive(b"r", THEIRS, deadline_s=0.5, **how)
            destination.until(lambda: shelf.asked == 1)
            assert not receiving.is_fenced
            with pytest.raises(DeadlineExceeded):
                receiving.wait()
            assert receiving.is_over
            assert not receiving.is_fenced
            shelf.may_go.set()


@pytest.mark.promise("handover-fenced")
@pytest.mark.parametrize(("first_token", "kept", "in_store"), [(48, 3, 5), (32, 2, 5), (80, 5, 0), (90, 6, 0), (40, 2, 0)])
def test_what_lies_before_the_first_token_is_nobodys_to_write(first_token: int, kept: int, in_store: int) -> None:
    """A block of which a part is here already is not taken from the store, nor is what follows it."""
    with Executor(layout_of()) as source:
        source.fill(1)
        scene = Scene(source, [5, 5])
        with scene.destination as destination:
            wanted = destination.receive(b"r", THEIRS, TOKENS, source, first_token=first_token, token_ids=list(range(TOKENS)))
            [sending] = source.send(b"r", OURS, TOKENS)
            sending.all_ready()
            for handover in (sending, *wanted):
                handover.wait()
            for rank in destination.ranks:
                assert not pool_of(rank)[THEIRS[:kept]].any()
            from_block = -(-first_token // SPEC.block_tokens)
            whole = gathered(source, OURS, TOKENS)[..., from_block * SPEC.block_tokens :, :]
            assert np.array_equal(whole, gathered(destination, THEIRS, TOKENS)[..., from_block * SPEC.block_tokens :, :])
            assert [receiving.store_tokens for receiving in wanted] == [in_store * SPEC.block_tokens] * 2
