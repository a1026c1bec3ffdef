"""Split of the pages of one of SGLang's host pools by KV heads, from what the pool says of itself. Nothing of SGLang is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.engines.head_split import HeadSplit, head_split
from kvstore.engines.sglang.head_pages import HeadPool
from kvstore.engines.sglang.pages import Pool
from kvstore.protocol.errors import ConfigError

CUT_CLASS: Final = "MHATokenToKVPoolHost"
"""SGLang's class of host pools with K and V of KV heads, and its subclasses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHeads:
    """What the split needs to know of a host pool."""

    layout: str
    heads: int
    """KV heads of this rank."""
    layers: int
    page_tokens: int

    @property
    def runs(self) -> int | None:
        """Runs of heads in a region of a page, see `HeadPool`; None for a layout that is not known."""
        layouts = {
            "layer_first": self.page_tokens,
            "page_first": self.page_tokens * self.layers,
            "page_first_direct": self.page_tokens * self.layers,
            "page_head": 1,
        }
        return layouts.get(self.layout)


def host_heads(host_pool: object, page_tokens: int) -> HostHeads | None:
    """Return the heads of a pool of SGLang; None for one of another class, which has none that could be told apart."""
    if all(base.__name__ != CUT_CLASS for base in type(host_pool).__mro__):
        return None
    return HostHeads(
        layout=str(host_pool.layout),  # type: ignore[attr-defined]
        heads=int(host_pool.head_num),  # type: ignore[attr-defined]
        layers=int(host_pool.layer_num),  # type: ignore[attr-defined]
        page_tokens=page_tokens,
    )


def pool_split(share_tp: int, *, heads: int, tp: tuple[int, int], total_heads: int | None) -> HeadSplit:
    """Return the values of the pages of the rank `tp`, (rank, size), that has `heads` KV heads.

    `total_heads`: KV heads of the model, by which ranks with equal heads are told. Without it each rank counts as one with heads of its
    own: keys are then other ones than those of engines with fewer ranks, never equal ones for other bytes. Raises ConfigError with the
    numbers that are possible.
    """
    return head_split(share_tp, kv_heads=heads * tp[1] if total_heads is None else total_heads, tp=tp)


def by_heads(whole: Pool, host: HostHeads | None, share_tp: int, *, total_heads: Callable[[], int] | None) -> Pool | HeadPool:
    """Return `whole`, a pool of a rank, in values by KV heads. `total_heads` finds out the model's KV heads; None: see `pool_split`.

    Raises ConfigError: `share_tp` is not possible for the pool.
    """
    if host is None or host.runs is None:
        raise ConfigError(
            f"share_tp is {share_tp}: set it to 0, or --hicache-mem-layout to page_head, page_first, page_first_direct or layer_first: KV "
            f"heads cannot be told apart in the pages of pool {whole.name} ({whole.layout or 'no layout'})"
        )
    size = whole.rank.tp[1]
    total = total_heads() if total_heads is not None and size > share_tp and host.heads == 1 else None
    return HeadPool.of(whole, pool_split(share_tp, heads=host.heads, tp=whole.rank.tp, total_heads=total), host.runs)
