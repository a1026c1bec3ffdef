"""SGLang's pages: their names, their memory, and which prefixes of them can be restored.

Names and memory of SGLang's pages: which engines may read one another's, what they are called in the store, where they lie.

A page of a pool is one value: the bytes of its regions, one after another (K and V of all layers in a page-first pool, of each layer in a
layer-first one). Its key is the id of a kvcache Namespace, which covers all that changes these bytes, and SGLang's hash of the page, which
covers its tokens and all before it. Knows neither SGLang nor the store.

How much of a prefix can be restored, when models keep state in several pools: SGLang's rule, in plain values.

KV pages are needed from the first on. Another pool may need every page too, or only a window that ends where the prefix does (sliding
windows, states of linear layers): then some ends can be restored and shorter ones cannot, so the answer is a set of ends.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Final

from kvstore.client.memory import Memory
from kvstore.kvcache.namespace import Namespace

HASH: Final = re.compile(r"[0-9a-f]{64}")
"""SGLang's hash of a page, as a rule: SHA-256 in hexadecimal."""
MAX_TEXT_BYTES: Final = 200
"""Of any other name of a page that stands in a key itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Of the process whose pages they are, as SGLang has it."""

    tp: tuple[int, int] = (0, 1)
    """Rank and size; of the attention group where that has data parallelism."""
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


@dataclass(frozen=True, kw_only=True)
class PlainHostPool:
    """One of SGLang's host pools, in plain values."""

    name: str
    """What SGLang calls it: `kv`, `mamba`, `swa`, ..."""
    kind: str
    """Class of the pool, which orders and packs its elements."""
    model: str
    weights: str
    """Identity of the weights; see engines/weights/identity.py."""
    salt: str
    dtype: str
    """Element types as the engine calls them, not those of its storage."""
    layout: str
    """The order of its elements: `page_first`, `layer_first`, ..."""
    page_tokens: int
    regions: tuple[int, ...]
    """Bytes of the regions of one page, in order; at least one."""
    rank: Rank
    layers: str
    """Layers of the model, where the pool has but some."""
    is_replicated: bool
    """All tensor-parallel ranks hold equal bytes: MLA."""
    adapters: str = ""
    """Digest of the LoRAs that the engine was started with: SGLang's hash names them by name and path."""
    config: str = ""
    """Digest of the model's configuration."""
    told: str = ""
    """Digest of SGLang's arguments that change what it computes or how it stores it; see arguments.py."""
    draft: str = ""
    """The model that drafts tokens, where the pool has its pages."""

    @cached_property
    def namespace(self) -> Namespace:
        """Raises InvalidArgument."""
        extra = {
            "engine": "sglang",
            "pool": self.name,
            "kind": self.kind,
            "draft": self.draft,
            "config": self.config,
            "told": self.told,
            "layout": self.layout,
            "layers": self.layers,
            "regions": f"{len(self.regions)}:{blake2b(repr(self.regions).encode(), digest_size=8).hexdigest()}",
            "pp": _part(self.rank.pp),
            "cp": _part(self.rank.cp),
            "dcp": _part(self.rank.dcp),
        }
        return Namespace(
            model=self.model,
            revision=self.weights,
            adapter=self.adapters,
            dtype=self.dtype,
            block_tokens=self.page_tokens,
            heads=None if self.is_replicated or self.rank.tp[1] == 1 else self.rank.tp,
            extra={name: value for name, value in extra.items() if value},
            salt=self.salt,
            hash="sha256",
        )

    def under(self, weights: str, draft: str) -> "PlainHostPool":
        """Return the pool with other weights."""
        return replace(self, weights=weights, draft=self.draft and draft)

    @property
    def page_bytes(self) -> int:
        return sum(self.regions)

    @property
    def values_per_page(self) -> int:
        """See `HeadPool`, which has more."""
        return 1

    @property
    def value_bytes(self) -> int:
        return self.page_bytes

    @property
    def is_writer(self) -> bool:
        """SGLang itself has one of ranks with equal pages write them."""
        return True

    @property
    def is_in_place(self) -> bool:
        return True

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Of the pages that SGLang calls `hashes`."""
        prefix = self.namespace.id
        return [prefix + _name(each) for each in hashes]

    def places(self, pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[list[Memory]]:
        """Where the regions of each page lie, of what the pool says of all of them. Raises ValueError: that is not so many pages of it."""
        if tuple(sizes) != self.regions * pages or len(pointers) != len(sizes):
            raise ValueError(f"{len(sizes)} regions are not those of {pages} pages of {len(self.regions)} each")
        memory = [Memory(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        step = len(self.regions)
        return [memory[start : start + step] for start in range(0, len(memory), step)]


def _name(page_hash: str) -> bytes:
    """Different for different texts: what is no hash is marked."""
    if HASH.fullmatch(page_hash):
        return bytes.fromhex(page_hash)
    text = page_hash.encode()
    return b"text:" + text if len(text) <= MAX_TEXT_BYTES else b"long:" + blake2b(text, digest_size=32).digest()


def _part(rank: tuple[int, int]) -> str:
    return f"{rank[0]} of {rank[1]}" if rank[1] > 1 else ""


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
