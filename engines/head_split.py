"""Split of a block's KV heads into values that do not depend on tensor parallelism, so that engines of any TP read what others wrote.

Value g of N holds the KV heads [g * H / N, (g + 1) * H / N) of all H. A tensor-parallel rank holds N / TP consecutive values. Where TP is
above H, ranks in a row hold one head between them, and the first of them writes it (as `kvcache/layouts` has it). Pure: no engine, no
tensor, no store.
"""

from dataclasses import dataclass, replace

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Values of a block that one tensor-parallel rank holds."""

    total: int
    """Values of a block, N."""
    first: int
    """Number of the rank's first value."""
    count: int
    """Values that the rank holds, in a row."""
    is_writer: bool = True
    """False for a rank whose heads a rank before it holds, too."""

    def label(self, template: Namespace) -> Namespace:
        """Return the namespace that all values of a block are stored under: nodes evict those of a block together by it."""
        values = {"values": str(self.total)} if self.total > 1 else {}
        return replace(template, heads=None, extra={**template.extra, **values})

    def namespaces(self, template: Namespace) -> tuple[Namespace, ...]:
        """Return the namespaces of the rank's values, in order: `template` with their heads. A value of all heads names none, as the
        namespace of an engine without tensor parallelism. `template` holds nothing else that depends on TP."""
        values = range(self.first, self.first + self.count)
        return tuple(replace(template, heads=(value, self.total) if self.total > 1 else None) for value in values)


def head_split(share_tp: int, *, kv_heads: int, tp: tuple[int, int]) -> HeadSplit:
    """Return the values of the rank `tp`, (rank, size), of a model with `kv_heads` KV heads, where a block has `share_tp` values.

    Raises ConfigError with the numbers that are possible: `share_tp` does not divide the heads, or the ranks do not divide `share_tp`.
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
