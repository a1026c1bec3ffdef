"""Blocks of a model's cache: their form, and the namespace that they are stored under.

How a block of a cache becomes one value: the keys and then the values of each layer, each [heads, block_tokens, head_dim], C-contiguous.

Shapes are those that the model itself gives to a token: layers may differ in heads and head_dim, keys and values too. It knows no store.

Which processes may read one another's blocks: all that changes the bytes of a model's cache, as a namespace.

The weights are told by a sample of each parameter: a fine-tuned model, a quantised one, or one with an adapter, merged or not, is another
model, whatever folder it was loaded from.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
import xxhash
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument

FULL = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that need nothing but keys and values of tokens. One with a window is kept whole here: its mask does the rest."""


@dataclass(frozen=True, slots=True)
class LayerPlane:
    """The keys, or the values, of one layer."""

    layer: int
    is_key: bool
    heads: int
    head_dim: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Layout:
    """The planes of a cache, in the order of a value."""

    planes: tuple[LayerPlane, ...]
    dtype: torch.dtype
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return sum(self._plane_bytes(plane) for plane in self.planes)

    def _plane_bytes(self, plane: LayerPlane) -> int:
        return plane.heads * self.block_tokens * plane.head_dim * int(self.dtype.itemsize)

    @property
    def shapes(self) -> str:
        """All that the form of a value depends on, as a text."""
        planes = [(plane.layer, plane.is_key, plane.heads, plane.head_dim) for plane in self.planes]
        return f"{self.block_tokens} {self.dtype} {planes}"

    def gather(self, cache: Any, row: int, first_block: int, out: torch.Tensor) -> None:
        """Copy blocks of a sequence from `first_block` on into `out`, [blocks, block_bytes] of uint8 on the CPU."""
        for plane, part in self._parts(out):
            layer = cache.layers[plane.layer]
            begin, end = first_block * self.block_tokens, (first_block + len(out)) * self.block_tokens
            tokens = (layer.keys if plane.is_key else layer.values)[row, :, begin:end]
            part.copy_(tokens.unflatten(1, (-1, self.block_tokens)).transpose(0, 1))

    def scatter(self, values: torch.Tensor, row: int, first_block: int, planes: Sequence[torch.Tensor]) -> None:
        """Copy values, as `gather` makes them, into blocks of a sequence from `first_block` on."""
        for (_plane, part), tensor in zip(self._parts(values), planes, strict=True):
            begin, end = first_block * self.block_tokens, (first_block + len(values)) * self.block_tokens
            tensor[row, :, begin:end].unflatten(1, (-1, self.block_tokens)).transpose(0, 1).copy_(part)

    def empty(self, rows: int, tokens: int) -> list[torch.Tensor]:
        """A tensor for each plane, of undefined content."""
        return [torch.empty(rows, plane.heads, tokens, plane.head_dim, dtype=self.dtype, device=plane.device) for plane in self.planes]

    def cache_of(self, planes: Sequence[torch.Tensor]) -> DynamicCache:
        """A cache that has these tensors, uncopied."""
        cache = DynamicCache()
        for keys, values in zip(planes[::2], planes[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them
            cache.layers.append(layer)
        return cache

    def check(self, cache: Any, rows: int, tokens: int) -> None:
        """Raises InvalidArgument unless a cache has keys and values, of this layout, for so many tokens of so many rows."""
        for plane in self.planes:
            layer = cache.layers[plane.layer] if plane.layer < len(cache.layers) else None
            tensor = None if layer is None else layer.keys if plane.is_key else layer.values
            shape = None if tensor is None else tuple(tensor.shape)
            if shape is None or shape[:2] != (rows, plane.heads) or shape[2] < tokens or shape[3:] != (plane.head_dim,):
                raise InvalidArgument(
                    f"layer {plane.layer} of the cache has shape {shape}, not ({rows}, {plane.heads}, {tokens} or more, {plane.head_dim}): "
                    "store the cache that `load` gave, of the same sequences"
                )

    def _parts(self, values: torch.Tensor) -> list[tuple[LayerPlane, torch.Tensor]]:
        """Of each plane what is its in values: [blocks, heads, block_tokens, head_dim]."""
        parts, begin = [], 0
        for plane in self.planes:
            end = begin + self._plane_bytes(plane)
            part = values[:, begin:end].view(self.dtype).unflatten(1, (plane.heads, self.block_tokens, plane.head_dim))
            parts.append((plane, part))
            begin = end
        return parts


def layout_of(model: Any, block_tokens: int) -> Layout:
    """Of a model's cache, as it makes one of a token. Raises InvalidArgument: its layers keep something else than keys and values, or
    keys that depend on what follows them."""
    if by_length := sorted({kind for kind in _rope_kinds(model) if "dynamic" in kind or kind == "longrope"}):
        raise InvalidArgument(
            f"this model turns keys by {', '.join(by_length)}: by other angles the longer its whole input is, so that no other prompt that "
            "begins alike can use them"
        )
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in FULL:
            raise InvalidArgument(f"layer {number} keeps a {type(layer).__name__}: what it keeps of a prefix is no block of tokens")
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), **{_cache_name(model): cache}, use_cache=True)
    return layout_of_cache(cache, block_tokens)


def _rope_kinds(model: Any) -> Iterator[str]:
    """The `rope_type` of all modules that have one, or one for each type of layer. All that recompute their frequencies have."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        yield from kinds.values() if isinstance(kinds, Mapping) else [kinds] if isinstance(kinds, str) else ()


def _cache_name(model: Any) -> str:
    """By which a forward pass is given its cache: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def layout_of_cache(cache: Any, block_tokens: int) -> Layout:
    """Of a cache that has a token. Raises InvalidArgument: its layers are of several element types."""
    dtypes = {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)}
    if len(dtypes) != 1:
        raise InvalidArgument(f"keys and values are of {len(dtypes)} element types: a value of the store has one")
    planes = [
        LayerPlane(number, is_key, tensor.shape[1], tensor.shape[3], tensor.device)
        for number, layer in enumerate(cache.layers)
        for is_key, tensor in ((True, layer.keys), (False, layer.values))
    ]
    return Layout(tuple(planes), dtypes.pop(), block_tokens)


SAMPLE_ELEMENTS: Final = 256
"""Of a parameter, evenly over it: some milliseconds for a model of a thousand parameters."""
NOT_OF_THE_CACHE: Final = frozenset({"_name_or_path", "_commit_hash", "architectures", "torch_dtype", "use_cache", "transformers_version"})
"""Entries of a configuration that change no byte of it, or that the namespace has elsewhere."""


def namespace_of(model: Any, dtype: torch.dtype, shapes: str, *, name: str, block_tokens: int) -> Namespace:
    """Of a model's blocks. `shapes` tells those of its layers; `name` is for people. Raises InvalidArgument: see `weights_id`."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_CACHE}
    return Namespace(
        model=name or type(model).__name__,
        revision=weights_id(model),
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        extra={
            "attention": str(model.config._attn_implementation),  # one rounds otherwise than another
            "config": _digest(json.dumps(config, sort_keys=True, default=str)),
            "engine": f"transformers {transformers.__version__}",
            "shapes": _digest(shapes),
        },
    )


def weights_id(model: Any) -> str:
    """A hash of the names, shapes, element types and samples of all parameters and buffers. Equal on every device.

    Raises InvalidArgument for parameters that are nowhere (on `meta`): what they will be cannot be known.
    """
    hasher = xxhash.xxh3_128()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InvalidArgument(f"{name} is not loaded: a model that is off-loaded to the disk cannot be told from others")
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLE_ELEMENTS)
        hasher.update(flat[::step][:SAMPLE_ELEMENTS].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
