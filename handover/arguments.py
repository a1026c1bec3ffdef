"""What callers of a transceiver pass, checked and as it is used."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.handover_messages import MAX_REQUEST_ID_BYTES
from kvstore.transfer.memory.region import Region

MAX_DEADLINE_S: Final = 3600.0
"""What frames carry at most."""


def check_request_id(request_id: bytes) -> None:
    """Raises InvalidArgument."""
    if not isinstance(request_id, bytes) or not 1 <= len(request_id) <= MAX_REQUEST_ID_BYTES:
        raise InvalidArgument(f"a request id is 1 to {MAX_REQUEST_ID_BYTES} bytes, not {request_id!r:.80}")


def block_indexes(blocks: ArrayLike, layout: CacheLayout, *, tokens: int) -> NDArray[np.int64]:
    """A copy. Raises InvalidArgument: too few for the tokens, or outside of the pool."""
    indexes = np.array(blocks, np.int64).reshape(-1)
    if tokens < 1 or len(indexes) * layout.spec.block_tokens < tokens:
        raise InvalidArgument(f"{len(indexes)} blocks of {layout.spec.block_tokens} tokens for a sequence of {tokens} tokens")
    if indexes.min() < 0 or indexes.max() >= layout.pool_blocks:
        raise InvalidArgument(f"a block index is 0 to {layout.pool_blocks - 1}, not {indexes.min()} or {indexes.max()}")
    return indexes


def check_deadline(deadline_s: float) -> None:
    """Raises InvalidArgument."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise InvalidArgument(f"a deadline is more than 0 and at most {MAX_DEADLINE_S:g} s away, not {deadline_s!r}")


def check_regions(layout: CacheLayout, rank: int, regions: Sequence[Region]) -> None:
    """Raises InvalidArgument: there is no such rank, or its pool does not consist of these regions."""
    sizes = [layout.region_bytes(rank, number) for number in range(layout.region_count(rank))]
    given = [region.size_bytes for region in regions]
    if len(given) != len(sizes) or any(size < least for size, least in zip(given, sizes, strict=True)):
        raise InvalidArgument(
            f"the pool of rank {rank} has {len(sizes)} regions, the first of {sizes[0]} bytes; given are {len(given)}: {given[:4]}"
        )
