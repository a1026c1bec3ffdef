"""Split of a block's KV heads into values that are independent of tensor parallelism, so that engines of any TP share
blocks.

Value g of N holds the KV heads [g * H / N, (g + 1) * H / N) of all H. A tensor-parallel rank holds N / TP consecutive
values. If TP is above H, several consecutive ranks hold the same head, and the first of them writes it (like
`kvcache/layouts`). Pure functions, without engine, tensors or store.
"""

from dataclasses import dataclass, replace

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Values of a block that one tensor-parallel rank holds."""

    total: int
    """Number of values of a block, N."""
    first: int
    """Index of the rank's first value."""
    count: int
    """Number of consecutive values that the rank holds."""
    is_writer: bool = True
    """False for a rank whose heads an earlier rank holds, too."""

    def label(self, template: Namespace) -> Namespace:
        """Return the namespace that all values of a block are stored under; nodes evict a block's values together by
        it."""
        values = {"values": str(self.total)} if self.total > 1 else {}
        return replace(template, heads=None, extra={**template.extra, **values})

    def namespaces(self, template: Namespace) -> tuple[Namespace, ...]:
        """Return the namespaces of the rank's values, in order: `template` with their heads.

        If one value has all heads, its namespace has no `heads`, as without tensor parallelism. `template` must not
        depend on TP.
        """
        values = range(self.first, self.first + self.count)
        return tuple(replace(template, heads=(value, self.total) if self.total > 1 else None) for value in values)


def head_split(share_tp: int, *, kv_heads: int, tp: tuple[int, int]) -> HeadSplit:
    """Return the values that tensor-parallel rank `tp`, (rank, size), holds of a block with `share_tp` values.

    Raises ConfigError, which lists the possible numbers: `share_tp` does not divide `kv_heads`, or the ranks do not
    divide `share_tp`.
    """
    rank, size = tp
    shards = min(size, kv_heads)
    if share_tp < 1 or kv_heads % share_tp or share_tp % shards or size % shards:
        possible = [str(number) for number in range(shards, kv_heads + 1, shards) if not kv_heads % number and not size % shards]
        raise ConfigError(
            f"share_tp is {share_tp}: a model with {kv_heads} KV heads on {size} tensor-parallel ranks takes "
            f"{', '.join([*possible, '0 (off)'])}; choose the same for all engines that share its blocks"
        )
    replicas, count = size // shards, share_tp // shards
    return HeadSplit(share_tp, rank // replicas * count, count, is_writer=rank % replicas == 0)
