"""The order of axes in a rank's pool of KV cache: how it is written, and what the usual engines have. It knows no sizes.

An order names the five axes from the outermost to the innermost: `block layer kv head token`. An element is the `head_dim` values of
one token and head; they are always contiguous. Axes before a `|` choose a region of memory (a tensor), those after it a place in it:
`layer | kv block token head` is one tensor a layer, [2, blocks, tokens, heads, head_dim]. Without a `|` the pool is one region.
"""

from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument

AXES: Final = ("block", "layer", "kv", "head", "token")

ORDERS: Final[dict[str, str]] = {
    "HND": "block layer kv head token",
    "NHD": "block layer kv token head",
    "trtllm": "block layer kv head token",
    "vllm-flash": "layer | kv block token head",
    "vllm-flash-hnd": "layer | kv block head token",
    "vllm-flashinfer": "layer | block kv token head",
    "vllm-flashinfer-hnd": "layer | block kv head token",
    "vllm-mla": "layer | block kv token head",
    "vllm-blocks": "block layer kv token head",
    "vllm-blocks-hnd": "block kv head layer token",
    "sglang": "kv layer | block token head",
    "sglang-layer-first": "kv layer block token head",
    "sglang-page-first": "kv block token layer head",
    "sglang-page-first-direct": "kv block layer token head",
    "sglang-page-head": "kv block head token layer",
}
"""Name to order. HND and NHD are whole blocks of all layers, with heads outside or inside of tokens.

Source: TensorRT-LLM `kvCacheManager` (a pool is [blocks, layers, kv, heads, tokens, dim]); vLLM `get_kv_cache_shape` and
`get_kv_cache_stride_order` in `v1/attention/backends/` (flash_attn; flashinfer, whose orders with the dimension of layers are the
vllm-blocks here; mla); SGLang `mem_cache/memory_pool.py` (a list of K tensors and one of V tensors, a tensor a layer) and
`memory_pool_host.py` (its host memory's layouts of the same names)."""


class Order(NamedTuple):
    """Axes that choose a region, and those inside of it; both from the outermost."""

    outer: tuple[str, ...]
    inner: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((*self.outer, "|", *self.inner) if self.outer else self.inner)


def parse_order(text: str) -> Order:
    """The order of this name (case does not matter), or the one written out.

    Raises:
        InvalidArgument: it is no name, and not each of the five axes exactly once with at most one `|`.
    """
    written = {name.lower(): order for name, order in ORDERS.items()}.get(text.strip().lower(), text)
    before, bar, after = written.partition("|")
    outer, inner = (tuple(before.split()), tuple(after.split())) if bar else ((), tuple(before.split()))
    if sorted(outer + inner) != sorted(AXES):
        raise InvalidArgument(
            f"the order {text!r} must name each of the axes {', '.join(AXES)} once, with at most one '|' after those that choose a region; "
            f"or be one of {', '.join(ORDERS)}"
        )
    return Order(outer, inner)
