"""SGLang's pages: their keys, their memory, and which prefixes of them can be restored.

**Keys.** A page of a pool is one value: the bytes of its regions, one after another (K and V of all layers in a
page-first pool, of each layer in a layer-first pool). Its key is the id of a kvcache Namespace and SGLang's page hash.
The namespace covers everything that changes these bytes; the hash covers the tokens up to the page's end.

**Restorable prefixes**, when a model keeps state in several pools: SGLang's rule in plain values. KV pages are needed
from the first on. Another pool may need every page, or only a window that ends where the prefix does (sliding windows,
states of linear layers). Then some ends can be restored although shorter ones cannot, so the result is a set of ends.

Imports neither SGLang nor the client.
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
"""Usual form of SGLang's page hash: SHA-256 in hexadecimal."""
MAX_TEXT_BYTES: Final = 200
"""Other page names up to this length are part of the key; longer ones are hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Rank and size in each kind of parallelism, as in SGLang."""

    tp: tuple[int, int] = (0, 1)
    """Of the attention group if that has data parallelism."""
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


@dataclass(frozen=True, kw_only=True)
class PlainHostPool:
    """Description of one of SGLang's host pools, in plain values."""

    name: str
    """SGLang's name: `kv`, `mamba`, `swa`, ..."""
    kind: str
    """Class of the pool, which defines the order and packing of elements."""
    model: str
    weights: str
    """Identity of the weights; see engines/weights/identity.py."""
    salt: str
    dtype: str
    """Element types as the engine names them, not those of the storage."""
    layout: str
    """Order of the elements: `page_first`, `layer_first`, ..."""
    page_tokens: int
    regions: tuple[int, ...]
    """Bytes of each region of a page, in order; at least one."""
    rank: Rank
    layers: str
    """Layers of the model that the pool has, if not all."""
    is_replicated: bool
    """All tensor-parallel ranks hold equal bytes, as with MLA."""
    adapters: str = ""
    """Digest of the LoRAs that the engine was started with; SGLang's hash covers only their name and path."""
    config: str = ""
    """Digest of the model's configuration."""
    told: str = ""
    """Digest of SGLang's arguments that change the pages' bytes; see arguments.py."""
    draft: str = ""
    """Draft model, if the pool has its pages."""

    @cached_property
    def namespace(self) -> Namespace:
        """Raises InvalidArgument: a text is too long."""
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
        """`HeadPool` has more."""
        return 1

    @property
    def value_bytes(self) -> int:
        return self.page_bytes

    @property
    def is_writer(self) -> bool:
        """True: of ranks with equal pages, SGLang itself makes one write."""
        return True

    @property
    def is_in_place(self) -> bool:
        return True

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the keys of the pages with these SGLang hashes."""
        prefix = self.namespace.id
        return [prefix + _name(each) for each in hashes]

    def page_memory(self, pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[list[Memory]]:
        """Return the memory of each page's regions, from SGLang's lists for all pages. Raises ValueError: the sizes
        are not those of `pages` pages."""
        if tuple(sizes) != self.regions * pages or len(pointers) != len(sizes):
            raise ValueError(f"{len(sizes)} regions do not match {pages} pages of {len(self.regions)} regions each")
        memory = [Memory(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        step = len(self.regions)
        return [memory[start : start + step] for start in range(0, len(memory), step)]


def _name(page_hash: str) -> bytes:
    """Return the key's second part, distinct for distinct texts: names that are not hashes get a prefix."""
    if HASH.fullmatch(page_hash):
        return bytes.fromhex(page_hash)
    text = page_hash.encode()
    return b"text:" + text if len(text) <= MAX_TEXT_BYTES else b"long:" + blake2b(text, digest_size=32).digest()


def _part(rank: tuple[int, int]) -> str:
    return f"{rank[0]} of {rank[1]}" if rank[1] > 1 else ""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of a prefix that the store has, of one pool."""

    name: str
    found: Sequence[bool]
    window_pages: int | None
    """Number of last pages that a prefix needs; None: all."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Restorable lengths of one prefix, in pages."""

    pages: int
    """Longest prefix that can be restored."""
    by_pool: dict[str, int]
    """Longest prefix by each pool's own pages, if any."""
    restorable: list[int]
    """All lengths that can be restored, rising."""


def restorable_prefixes(kv_pages: int, kv_name: str, others: Sequence[PoolPages]) -> Hits:
    """Return the restorable lengths of a prefix with `kv_pages` leading KV pages. Each other pool's `found` has at
    least as many."""
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
    """Return the lengths whose window is complete: a long enough run of found pages ends there."""
    found, run = set(), 0
    for length in range(1, kv_pages + 1):
        run = run + 1 if pool.found[length - 1] else 0
        if run >= (length if pool.window_pages is None else min(length, max(1, pool.window_pages))):
            found.add(length)
    return found
