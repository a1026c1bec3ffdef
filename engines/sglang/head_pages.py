"""Pages of SGLang's host pools, split by KV heads into several values, so that engines of any TP share them.

A region of a page is `[runs, heads, bytes]`. In layout `page_head` heads are outermost, so there is one run, a value is
contiguous in the pool, and pages move in place. In other layouts a value's heads are scattered over tokens and layers,
and pages move through staging memory.

Pools are described by their attributes; SGLang is not imported.
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
"""Staging memory of each thread that moves scattered pages; at least one page."""


@dataclass(frozen=True, kw_only=True)
class HeadPool:
    """Host pool whose pages have `split.count` values each."""

    pool: PlainHostPool
    """Description of one value: regions of one value, without TP."""
    split: HeadSplit
    runs: int
    """Runs of heads in a region, tokens times layers; 1 if heads are outermost."""
    _staging: threading.local = field(default_factory=threading.local, compare=False)

    @classmethod
    def of(cls, whole: PlainHostPool, split: HeadSplit, runs: int) -> "HeadPool":
        """Return the pool of `whole`, which describes pages with all heads of the rank. Its regions are multiples of
        `runs * split.count`."""
        tp_free = replace(whole.rank, tp=Rank().tp)
        return cls(pool=replace(whole, regions=tuple(size // split.count for size in whole.regions), rank=tp_free), split=split, runs=runs)

    def under(self, weights: str, draft: str) -> "HeadPool":
        """Return the pool with other weights."""
        return replace(self, pool=self.pool.under(weights, draft))

    @cached_property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Namespaces of the rank's values, in order."""
        return self.split.namespaces(self.pool.namespace)

    @cached_property
    def namespace(self) -> Namespace:
        """Label that the values are stored under: nodes evict a page's values together by it."""
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
        """Return the keys of all values of the pages with these SGLang hashes, page by page."""
        names = [key[len(self.pool.namespace.id) :] for key in self.pool.keys(hashes)]
        return [namespace.id + name for name in names for namespace in self.namespaces]

    @property
    def is_in_place(self) -> bool:
        """True if each value is contiguous in the pool."""
        return self.runs == 1

    @property
    def batch_pages(self) -> int:
        """Pages that one staging buffer holds."""
        return max(1, STAGING_BYTES // (self.value_bytes * self.split.count))

    def page_memory(self, pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[list[Memory]]:
        """Return the memory of each value's regions, for `is_in_place` pools. Raises ValueError: the sizes are not
        those of `pages` pages."""
        return [
            [Memory(pointer + value * size, size) for pointer, size in zip(page, self.pool.regions, strict=True)]
            for page in self.regions(pointers, sizes, pages)
            for value in range(self.split.count)
        ]

    def regions(self, pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[Sequence[int]]:
        """Return the addresses of each page's regions. Raises ValueError: the sizes are not those of `pages` pages."""
        wanted = tuple(size * self.split.count for size in self.pool.regions) * pages
        if tuple(sizes) != wanted or len(pointers) != len(sizes):
            raise ValueError(f"{len(sizes)} regions do not match {pages} pages of {len(self.pool.regions)} regions each")
        step = len(self.pool.regions)
        return [pointers[start : start + step] for start in range(0, len(pointers), step)]

    def rows(self, pages: int) -> NDArray[np.uint8]:
        """Return this thread's staging memory for at most `batch_pages` pages, `[pages, values, bytes]`. The next
        call returns the same memory."""
        kept = getattr(self._staging, "rows", None)
        if kept is None:
            kept = self._staging.rows = np.empty((self.batch_pages, self.split.count, self.value_bytes), np.uint8)
        rows: NDArray[np.uint8] = kept[:pages]
        return rows

    def pack(self, page: Sequence[int], row: NDArray[np.uint8]) -> None:
        """Copy the page with regions at these addresses into `row`, `[values, bytes]`."""
        for in_pool, in_row in self._parts(page, row):
            in_row[:] = in_pool

    def unpack(self, row: NDArray[np.uint8], page: Sequence[int]) -> None:
        """Copy `row`, as in `pack`, into the page."""
        for in_pool, in_row in self._parts(page, row):
            in_pool[:] = in_row

    def _parts(self, page: Sequence[int], row: NDArray[np.uint8]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield each region's memory in the pool and in `row`, both `[values, runs, bytes]`."""
        values, start = self.split.count, 0
        for pointer, size in zip(page, self.pool.regions, strict=True):
            region = np.frombuffer(view_of(pointer, size * values), np.uint8).reshape(self.runs, values, -1)
            yield region.transpose(1, 0, 2), row[:, start : start + size].reshape(values, self.runs, -1)
            start += size


HEAD_POOL_CLASS: Final = "MHATokenToKVPoolHost"
"""SGLang's base class of host pools with K and V by KV heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHeads:
    """Dimensions of a host pool that the split needs."""

    layout: str
    heads: int
    """KV heads of this rank."""
    layers: int
    page_tokens: int

    @property
    def runs(self) -> int | None:
        """Runs of heads in a page's region, see `HeadPool`; None: unknown layout."""
        layouts = {
            "layer_first": self.page_tokens,
            "page_first": self.page_tokens * self.layers,
            "page_first_direct": self.page_tokens * self.layers,
            "page_head": 1,
        }
        return layouts.get(self.layout)


def host_heads(host_pool: object, page_tokens: int) -> HostHeads | None:
    """Return the dimensions of a SGLang pool; None if its class has no separate heads."""
    if all(base.__name__ != HEAD_POOL_CLASS for base in type(host_pool).__mro__):
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
    """Return `whole`, a rank's pool, split into values by KV heads.

    `total_heads` returns the model's KV heads, which shows whether ranks replicate heads. Without it each rank counts
    as having its own heads: its keys then differ from those of engines with fewer ranks, but never collide.

    Raises ConfigError, which lists the possible numbers: `share_tp` is not possible for the pool.
    """
    if host is None or host.runs is None:
        raise ConfigError(
            f"share_tp is {share_tp}: set it to 0, or --hicache-mem-layout to page_head, page_first, page_first_direct or layer_first; KV "
            f"heads cannot be separated in the pages of pool {whole.name} ({whole.layout or 'no layout'})"
        )
    size = whole.rank.tp[1]
    heads = total_heads() if total_heads is not None and size > share_tp and host.heads == 1 else host.heads * size
    return HeadPool.of(whole, head_split(share_tp, kv_heads=heads, tp=whole.rank.tp), host.runs)
