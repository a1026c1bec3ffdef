"""Prefixes from a store: blocks that the store has are fetched before senders are asked for the rest."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import KVStoreError


class TensorStore(Protocol):
    """Store of blocks as tensors, for one rank; `kvstore.client.tensors.cache.TensorCache` implements it."""

    def get_tensor(self, token_ids: Any, out: Any, *, blocks: Any, first_block: int, deadline_s: float) -> int:
        """Fetch the rank's blocks from its `first_block` on, without a gap, into the entries `blocks` of `out`
        [blocks, ...]. Return how many."""


class RankPrefixStore:
    """A rank's access to a store, which fetches directly into the rank's pool. As thread-safe as the store, for
    distinct blocks.

    `pool` is a tensor over the rank's pool, [pool blocks, layers, kv, heads, block_tokens, head_dim] with any strides.
    """

    def __init__(self, store: TensorStore, pool: Any) -> None:
        self._store = store
        self._pool = pool

    def fetch(self, token_ids: Any, blocks: NDArray[np.int64], *, first_block: int = 0, deadline_s: float) -> int:
        """Fetch the rank's blocks from `first_block` on; return how many. `blocks` are their pool indices, in order of
        the sequence.

        Errors of the store count as a miss. Blocks that were not fetched have undefined contents.
        """
        try:
            return self._store.get_tensor(token_ids, self._pool, blocks=blocks, first_block=first_block, deadline_s=deadline_s)
        except KVStoreError:
            return 0


def fetch_prefix(
    store: RankPrefixStore,
    layout: CacheLayout,
    rank: int,
    token_ids: Any,
    blocks: NDArray[np.int64],
    *,
    first_token: int,
    deadline_s: float,
) -> int:
    """Fetch a sequence's blocks from `first_token` on, for one rank. Return the token up to which senders need to send
    nothing; 0 on a miss.

    `blocks` are the sequence's, of which every cp-th is in the rank's pool. Tokens before `first_token` are in use and
    never written: a partially present block is not fetched, nor are the blocks after it. A partial last block is not
    fetched.
    """
    cp, cp_rank, size = layout.parallel.cp, layout.parallel.coordinates(rank).cp, layout.spec.block_tokens
    own = blocks[: len(token_ids) // size][cp_rank::cp]
    first = max(0, -((cp_rank - first_token // size) // cp))  # its first block that is not fully present
    if first >= len(own) or (first * cp + cp_rank) * size < first_token:
        return 0
    count = store.fetch(token_ids, own[first:], first_block=first, deadline_s=deadline_s)
    # The first block that the rank lacks: earlier ones are present or on other ranks.
    return min(((first + count) * cp + cp_rank) * size, len(token_ids)) if count else 0
