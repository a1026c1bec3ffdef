"""A host pool as SGLang lays it out, of numpy memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.engines.sglang.head_pages import HostHeads
from kvstore.engines.sglang.pages import PlainHostPool, Rank

PAGES, TOKENS, LAYERS, ELEMENTS = 5, 4, 3, 6
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
ORDERS = {"layer_first": "LPNHD", "page_first": "PNLHD", "page_first_direct": "PLNHD", "page_head": "PHNLD"}
"""Pages, tokens, layers, heads, elements: memory order of K, and of V after it."""


class HostPool:
    """Pages of one rank with `heads` KV heads."""

    def __init__(self, layout: str, heads: int, seed: int | None = None) -> None:
        self.layout, self.heads = layout, heads
        sizes = {"P": PAGES, "N": TOKENS, "L": LAYERS, "H": heads, "D": ELEMENTS}
        self._order = ORDERS[layout]
        shape = (2, *(sizes[axis] for axis in self._order))
        self._memory: NDArray[np.float32] = np.zeros(shape, np.float32)
        if seed is not None:
            self._memory[:] = np.random.default_rng(seed).normal(size=shape)

    @property
    def pages(self) -> NDArray[np.float32]:
        """As `[2, pages, layers, tokens, heads, elements]`."""
        return self._memory.transpose(0, *(1 + self._order.index(axis) for axis in "PLNHD"))

    def meta(self, *pages: int) -> tuple[list[int], list[int]]:
        """As SGLang's `get_page_buffer_meta`."""
        halves = self._memory if self.layout != "layer_first" else self._memory.swapaxes(0, 1)
        regions = [
            half[page]
            for page in pages
            for half in (halves if self.layout != "layer_first" else (of_layer for layer in halves for of_layer in layer))
        ]
        return [region.ctypes.data for region in regions], [region.nbytes for region in regions]

    def describe_pool(self, tp: tuple[int, int], **changed: Any) -> PlainHostPool:
        fields: dict[str, Any] = {
            "name": "kv",
            "kind": "MHATokenToKVPoolHost",
            "model": "llama",
            "weights": "sampled-1",
            "layers": "0:3",
            "salt": "",
            "dtype": "float32",
            "layout": self.layout,
            "page_tokens": TOKENS,
            "regions": tuple(self.meta(0)[1]),
            "rank": Rank(tp=tp),
            "is_replicated": False,
        }
        return PlainHostPool(**fields | changed)

    def host_heads(self) -> HostHeads:
        return HostHeads(layout=self.layout, heads=self.heads, layers=LAYERS, page_tokens=TOKENS)
