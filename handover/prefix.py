"""The beginning of a sequence out of a store, before senders are asked for the rest: blocks that are there are not sent a second time."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import KVStoreError


class TensorStore(Protocol):
    """What is needed of a store of blocks as tensors, for one rank; `kvstore.client.tensors.cache.TensorCache` is one."""

    def get_tensor(self, token_ids: Any, out: Any, *, blocks: Any, first_block: int, deadline_s: float) -> int:
        """Fetch the rank's blocks from its `first_block` of the sequence on, without a gap, into those of `out` [blocks, ...] that `blocks`
        names; how many."""


class RankPrefixStore:
    """A rank's view of a store: fetches straight into the rank's pool. As thread-safe as the store is, on different blocks.

    `pool` is a tensor over the rank's pool, [pool blocks, layers, kv, heads, block_tokens, head_dim] of any strides, as the store takes it.
    """

    def __init__(self, store: TensorStore, pool: Any) -> None:
        self._store = store
        self._pool = pool

    def fetch(self, token_ids: Any, blocks: NDArray[np.int64], *, first_block: int = 0, deadline_s: float) -> int:
        """Fetch what there is of the rank's blocks from `first_block` on; how many were got. `blocks` are these: indexes of the pool, in
        the order of the sequence.

        A store that fails has nothing: the senders have everything. The content of blocks not got is undefined.
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
    """Fetch what the store has of a sequence from `first_token` on, for one rank; up to which token the rank now needs nothing from
    senders, or 0 if the store had nothing.

    `blocks` are the sequence's, of which every cp-th lies in the rank's pool. What lies before `first_token` is in use and is not written:
    from a block that is here in part nothing is fetched, nor from those that follow it. A partial last block is not fetched.
    """
    cp, cp_rank, size = layout.parallel.cp, layout.parallel.coordinates(rank).cp, layout.spec.block_tokens
    own = blocks[: len(token_ids) // size][cp_rank::cp]
    first = max(0, -((cp_rank - first_token // size) // cp))  # the first of its own that is not all here
    if first >= len(own) or (first * cp + cp_rank) * size < first_token:
        return 0
    count = store.fetch(token_ids, own[first:], first_block=first, deadline_s=deadline_s)
    # The first block that the rank lacks: what lies before is here or other ranks'.
    return min(((first + count) * cp + cp_rank) * size, len(token_ids)) if count else 0
