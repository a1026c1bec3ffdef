"""Pages of SGLang's host pools whose KV heads are in several values, so that engines of any TP read them: their keys and their memory.

A region of a page is `[runs, heads, bytes]`: `page_head` has heads outermost, one run, so that a value lies in the pool as bytes in a row
and is moved in place. In other layouts the heads of a value lie apart in each token and layer: they are copied by way of staging memory.
What a pool is
made of is read from what it says of itself: nothing of SGLang is imported.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.client.memory import Memory, view_of
from kvstore.engines.head_split import HeadSplit, head_split
from kvstore.engines.sglang.pages import PlainHostPool, Rank
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError

STAGING_BYTES: Final = 16 << 20
"""Of each thread that moves pages by way of staging memory; a page at least."""


@dataclass(frozen=True, kw_only=True)
class HeadPool:
    """One of SGLang's host pools whose pages are `split.count` values each, page by page."""

    pool: PlainHostPool
    """Of one value: its regions are those of one value, and it names no TP."""
    split: HeadSplit
    runs: int
    """Runs of heads in a region: tokens times layers of it; 1 where heads are outermost."""
    _staging: threading.local = field(default_factory=threading.local, compare=False)

    @classmethod
    def of(cls, whole: PlainHostPool, split: HeadSplit, runs: int) -> "HeadPool":
        """`whole` describes pages with all heads of the rank. Its regions are multiples of `runs` times `split.count`."""
        tp_free = replace(whole.rank, tp=Rank().tp)
        return cls(pool=replace(whole, regions=tuple(size // split.count for size in whole.regions), rank=tp_free), split=split, runs=runs)

    def under(self, weights: str, draft: str) -> "HeadPool":
        """Return the pool with other weights."""
        return replace(self, pool=self.pool.under(weights, draft))

    @cached_property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Of the rank's values, in order."""
        return self.split.namespaces(self.pool.namespace)

    @cached_property
    def namespace(self) -> Namespace:
        """Label that the values are stored under, by which nodes evict those of a page together."""
        return self.split.label(self.pool.namespace)

    @property
    def is_writer(self) -> bool:
        return self.split.is_writer

    @property
    def values_per_page(self) -> int:
        return self.split.count

    @property
    def value_bytes(self) -> int:
        return self.pool.page_bytes

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the keys of all values of the pages that SGLang calls `hashes`, page by page."""
        names = [key[len(self.pool.namespace.id) :] for key in self.pool.keys(hashes)]
        return [namespace.id + name for name in names for namespace in self.namespaces]

    @property
    def is_in_place(self) -> bool:
        """Whether values lie in the pool as bytes in a row."""
        return self.runs == 1

    @property
    def batch_pages(self) -> int:
        """Pages that are moved at once by way of staging memory."""
        return max(1, STAGING_BYTES // (self.value_bytes * self.split.count))

    def places(self, pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[list[Memory]]:
        """Return where the regions of each value lie, of `is_in_place` pools. Raises ValueError: that is not so many pages of it."""
        return [
            [Memory(pointer + value * size, size) for pointer, size in zip(page, self.pool.regions, strict=True)]
            for page in self.regions(pointers, sizes, pages)
            for value in range(self.split.count)
        ]

    def regions(self, pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[Sequence[int]]:
        """Return the addresses of each page's regions. Raises ValueError: that is not so many pages of it."""
        wanted = tuple(size * self.split.count for size in self.pool.regions) * pages
        if tuple(sizes) != wanted or len(pointers) != len(sizes):
            raise ValueError(f"{len(sizes)} regions are not those of {pages} pages of {len(self.pool.regions)} each")
        step = len(self.pool.regions)
        return [pointers[start : start + step] for start in range(0, len(pointers), step)]

    def rows(self, pages: int) -> NDArray[np.uint8]:
        """Return memory of this thread for at most `batch_pages` pages, `[pages, values, bytes]`. The next call returns the same."""
        kept = getattr(self._staging, "rows", None)
        if kept is None:
            kept = self._staging.rows = np.empty((self.batch_pages, self.split.count, self.value_bytes), np.uint8)
        rows: NDArray[np.uint8] = kept[:pages]
        return rows

    def pack(self, page: Sequence[int], row: NDArray[np.uint8]) -> None:
        """Copy the page whose regions are at these addresses into `row`, `[values, bytes]`."""
        for in_pool, in_row in self._parts(page, row):
            in_row[:] = in_pool

    def unpack(self, row: NDArray[np.uint8], page: Sequence[int]) -> None:
        """Copy `row`, as in `pack`, into the page."""
        for in_pool, in_row in self._parts(page, row):
            in_pool[:] = in_row

    def _parts(self, page: Sequence[int], row: NDArray[np.uint8]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Of each region its memory in the pool and in `row`, both `[values, runs, bytes]`."""
        values, start = self.split.count, 0
        for pointer, size in zip(page, self.pool.regions, strict=True):
            region = np.frombuffer(view_of(pointer, size * values), np.uint8).reshape(self.runs, values, -1)
            yield region.transpose(1, 0, 2), row[:, start : start + size].reshape(values, self.runs, -1)
            start += size


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


def by_heads(
    whole: PlainHostPool, host: HostHeads | None, share_tp: int, *, total_heads: Callable[[], int] | None
) -> PlainHostPool | HeadPool:
    """Return `whole`, a pool of a rank, in values by KV heads. `total_heads` finds out the model's KV heads, by which ranks with equal
    heads are told; without it each rank counts as one with heads of its own: its keys are then other ones than those of engines with
    fewer ranks, never equal ones for other bytes.

    Raises ConfigError: `share_tp` is not possible for the pool, with the numbers that are.
    """
    if host is None or host.runs is None:
        raise ConfigError(
            f"share_tp is {share_tp}: set it to 0, or --hicache-mem-layout to page_head, page_first, page_first_direct or layer_first: KV "
            f"heads cannot be told apart in the pages of pool {whole.name} ({whole.layout or 'no layout'})"
        )
    size = whole.rank.tp[1]
    heads = total_heads() if total_heads is not None and size > share_tp and host.heads == 1 else host.heads * size
    return HeadPool.of(whole, head_split(share_tp, kv_heads=heads, tp=whole.rank.tp), host.runs)
