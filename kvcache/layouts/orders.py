"""Axis orders of a rank's KV pool: their notation, and the orders of common engines. Independent of sizes.

An order lists the five axes from the outermost to the innermost: `block layer kv head token`. An element is the
`head_dim` values of one token and head. Axes before a `|` select a memory region (a tensor), those after it a position
in it: `layer | kv block token head` is one tensor a layer, [2, blocks, tokens, heads, head_dim]. Without a `|` the pool
is one region.

The `head_dim` values of an element are contiguous, unless the order ends in `K^T`, `V^T` or both: a block, layer and
head are then [head_dim, tokens], the form of kernels that multiply by them. `token` must be the last axis in that case.
"""

from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument

AXES: Final = ("block", "layer", "kv", "head", "token")
TRANSPOSED: Final = ("K^T", "V^T")
"""Suffixes of an order, for keys and values, indexed like the axis kv."""

ORDERS: Final[dict[str, str]] = {
    "HND": "block layer kv head token",
    "NHD": "block layer kv token head",
    "trtllm": "block layer kv head token",
    "vllm-flash": "layer | kv block token head",
    "vllm-flash-hnd": "layer | kv block head token",
    "vllm-flashinfer": "layer | block kv token head",
    "vllm-flashinfer-hnd": "layer | block kv head token",
    "vllm-mla": "layer | block kv token head",
    "vllm-cpu": "layer | block head kv token K^T",
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
`get_kv_cache_stride_order` in `v1/attention/backends/` (flash_attn; flashinfer, whose orders with the dimension of layers are the vllm-
blocks here; mla) and its CPU backend (a tensor a layer, [blocks, heads, tokens, 2 x head_dim], whose keys lie transposed); SGLang
`mem_cache/memory_pool.py` (a list of K tensors and one of V tensors, a tensor a layer) and `memory_pool_host.py` (its host memory's
layouts of the same names)."""


class Order(NamedTuple):
    """Axes that select a region, and axes within it, both from the outermost."""

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    transposed: tuple[str, ...] = ()
    """Suffixes of TRANSPOSED that the order has."""

    def __str__(self) -> str:
        return " ".join((*self.outer, *("|" if self.outer else ""), *self.inner, *self.transposed))


def parse_order(text: str) -> Order:
    """Return the order of this name, in any case, or the one spelled out.

    Raises:
        InvalidArgument: neither a name nor the five axes exactly once with at most one `|`; or a transposed order whose
            last axis is not `token`.
    """
    written = {name.lower(): order for name, order in ORDERS.items()}.get(text.strip().lower(), text)
    before, bar, after = written.partition("|")
    outer, rest = (before.split(), after.split()) if bar else ([], before.split())
    marks = [mark for mark in TRANSPOSED if mark in rest]
    inner = rest[: len(rest) - len(marks)]
    if sorted(outer + inner) != sorted(AXES) or sorted(rest[len(inner) :]) != marks:
        raise InvalidArgument(
            f"the order {text!r} must name each of the axes {', '.join(AXES)} once, with at most one '|' after those that choose a region; "
            f"or be one of {', '.join(ORDERS)}"
        )
    if marks and inner[-1:] != ["token"]:
        raise InvalidArgument(f"the order {text!r} transposes head_dim and tokens, so that its last axis must be 'token'")
    return Order(tuple(outer), tuple(inner), tuple(marks))
