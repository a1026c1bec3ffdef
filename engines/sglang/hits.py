"""How much of a prefix can be restored, when models keep state in several pools: SGLang's rule, in plain values.

KV pages are needed from the first on. Another pool may need every page too, or only a window that ends where the prefix does (sliding
windows, states of linear layers): then some ends can be restored and shorter ones cannot, so the answer is a set of ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Which pages of a prefix the store has, of one pool."""

    name: str
    found: Sequence[bool]
    window_pages: int | None
    """Only so many last pages of a prefix are needed; None: all of it."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Of one prefix, in pages."""

    pages: int
    """The longest prefix that can be restored."""
    by_pool: dict[str, int]
    """The longest one by each pool's own pages, where there is any."""
    restorable: list[int]
    """The lengths that can be restored, rising."""


def restorable_prefixes(kv_pages: int, kv_name: str, others: Sequence[PoolPages]) -> Hits:
    """`kv_pages` are there from the first on. Each other pool's `found` is of as many pages at least."""
    lengths = set(range(1, kv_pages + 1))
    by_pool = {kv_name: kv_pages} if kv_pages else {}
    for pool in others:
        if not lengths:
            break
        own = _lengths(pool, kv_pages)
        if own:
            by_pool[pool.name] = max(own)
        lengths &= own
    restorable = sorted(lengths)
    return Hits(restorable[-1] if restorable else 0, by_pool, restorable)


def _lengths(pool: PoolPages, kv_pages: int) -> set[int]:
    """Prefixes whose window is there: those in which a run of found pages is long enough, at the end."""
    found, run = set(), 0
    for length in range(1, kv_pages + 1):
        run = run + 1 if pool.found[length - 1] else 0
        if run >= (length if pool.window_pages is None else min(length, max(1, pool.window_pages))):
            found.add(length)
    return found
