"""Layout of a model's cache blocks, and the namespace that they are stored under.

**Layout.** A block's value has the keys and then the values of each layer, each [heads, block_tokens, head_dim],
C-contiguous. Shapes come from the model's own cache of one token: layers may differ in heads and head_dim, and so may
keys and values.

**Namespace.** It covers everything that changes the bytes of the cache. The weights are identified by a sample of each
parameter: a fine-tuned or quantised model, or one with an adapter, merged or not, is another model, independent of the
folder that it was loaded from.

Does not use the store.
"""

import inspect
import json
import re
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
"""Layers whose whole state is the keys and values of tokens. Sliding-window layers are kept whole; their mask
selects the window."""


@dataclass(frozen=True, slots=True)
class LayerPlane:
    """Keys, or values, of one layer."""

    layer: int
    is_key: bool
    heads: int
    head_dim: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Layout:
    """Planes of a cache, in the order of a value."""

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
        """Text of everything that determines a value's form."""
        planes = [(plane.layer, plane.is_key, plane.heads, plane.head_dim) for plane in self.planes]
        return f"{self.block_tokens} {self.dtype} {planes}"

    def gather(self, cache: Any, row: int, first_block: int, out: torch.Tensor) -> None:
        """Copy blocks of sequence `row`, from `first_block` on, into `out`, uint8 [blocks, block_bytes] on the CPU."""
        for plane, part in self._parts(out):
            layer = cache.layers[plane.layer]
            begin, end = first_block * self.block_tokens, (first_block + len(out)) * self.block_tokens
            tokens = (layer.keys if plane.is_key else layer.values)[row, :, begin:end]
            part.copy_(tokens.unflatten(1, (-1, self.block_tokens)).transpose(0, 1))

    def scatter(self, values: torch.Tensor, row: int, first_block: int, planes: Sequence[torch.Tensor]) -> None:
        """Copy values, as `gather` writes them, into blocks of sequence `row` from `first_block` on."""
        for (_plane, part), tensor in zip(self._parts(values), planes, strict=True):
            begin, end = first_block * self.block_tokens, (first_block + len(values)) * self.block_tokens
            tensor[row, :, begin:end].unflatten(1, (-1, self.block_tokens)).transpose(0, 1).copy_(part)

    def empty(self, rows: int, tokens: int) -> list[torch.Tensor]:
        """Return an uninitialized tensor for each plane."""
        return [torch.empty(rows, plane.heads, tokens, plane.head_dim, dtype=self.dtype, device=plane.device) for plane in self.planes]

    def cache_of(self, planes: Sequence[torch.Tensor]) -> DynamicCache:
        """Return a cache of these tensors, without a copy."""
        cache = DynamicCache()
        for keys, values in zip(planes[::2], planes[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them
            cache.layers.append(layer)
        return cache

    def check(self, cache: Any, rows: int, tokens: int) -> None:
        """Raises InvalidArgument unless `cache` has keys and values of this layout for at least `tokens` tokens of
        `rows` rows."""
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
        """Return each plane's view of `values`: [blocks, heads, block_tokens, head_dim]."""
        parts, begin = [], 0
        for plane in self.planes:
            end = begin + self._plane_bytes(plane)
            part = values[:, begin:end].view(self.dtype).unflatten(1, (plane.heads, self.block_tokens, plane.head_dim))
            parts.append((plane, part))
            begin = end
        return parts


def layout_of(model: Any, block_tokens: int) -> Layout:
    """Return the layout of a model's cache, by running the model on one token.

    Raises InvalidArgument: a layer keeps other state than keys and values, or keys depend on later tokens.
    """
    if by_length := sorted({kind for kind in _rope_kinds(model) if "dynamic" in kind or kind == "longrope"}):
        raise InvalidArgument(
            f"this model rotates keys by {', '.join(by_length)}: the angles depend on the length of the whole input, so prompts with a "
            "common prefix cannot share them"
        )
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in FULL:
            raise InvalidArgument(f"layer {number} keeps a {type(layer).__name__}, whose state cannot be split into blocks of tokens")
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), **{_cache_name(model): cache}, use_cache=True)
    return layout_of_cache(cache, block_tokens)


def _rope_kinds(model: Any) -> Iterator[str]:
    """Yield the `rope_type` of all modules that have one, or have one per layer type. Modules that recompute
    frequencies have it."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        yield from kinds.values() if isinstance(kinds, Mapping) else [kinds] if isinstance(kinds, str) else ()


def _cache_name(model: Any) -> str:
    """Return the name of the forward pass's cache parameter: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def layout_of_cache(cache: Any, block_tokens: int) -> Layout:
    """Return the layout of a cache with one token. Raises InvalidArgument: its layers have several element types."""
    dtypes = {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)}
    if len(dtypes) != 1:
        raise InvalidArgument(f"keys and values have {len(dtypes)} element types: a value of the store has one")
    planes = [
        LayerPlane(number, is_key, tensor.shape[1], tensor.shape[3], tensor.device)
        for number, layer in enumerate(cache.layers)
        for is_key, tensor in ((True, layer.keys), (False, layer.values))
    ]
    return Layout(tuple(planes), dtypes.pop(), block_tokens)


SAMPLE_ELEMENTS: Final = 256
"""Spread evenly over a parameter: some milliseconds for a model of a thousand parameters."""
NOT_OF_THE_CACHE: Final = frozenset({"_name_or_path", "_commit_hash", "architectures", "torch_dtype", "use_cache", "transformers_version"})
"""Configuration entries that change no byte of the cache, or that other parts of the namespace cover."""


def namespace_of(model: Any, dtype: torch.dtype, shapes: str, *, name: str, block_tokens: int) -> Namespace:
    """Return the namespace of a model's blocks. `shapes` is `Layout.shapes`; `name` is for people. Raises
    InvalidArgument: see `weights_id`."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_CACHE}
    return Namespace(
        model=name or type(model).__name__,
        revision=weights_id(model),
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        extra={
            "attention": str(model.config._attn_implementation),  # implementations round differently
            "config": _digest(json.dumps(config, sort_keys=True, default=str)),
            "engine": f"transformers {transformers.__version__}",
            "shapes": _digest(shapes),
        },
    )


def weights_id(model: Any) -> str:
    """Return a hash of names, shapes, element types and samples of all parameters and buffers, and of which of PEFT's
    adapters are active. Equal on every device.

    Raises InvalidArgument: a parameter is on `meta`, so its contents are unknown.
    """
    hasher = xxhash.xxh3_128()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InvalidArgument(f"{name} is not loaded: a model that is off-loaded to disk cannot be identified; load it into memory")
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLE_ELEMENTS)
        hasher.update(flat[::step][:SAMPLE_ELEMENTS].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    hasher.update("\n".join(_active_adapters(model)).encode())
    return hasher.hexdigest()


def _active_adapters(model: Any) -> Iterator[str]:
    """Yield which adapters each layer applies, and their factors. A switch changes no parameter.

    Of all modules only PEFT's layers have the property `disable_adapters`.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            yield f"{name} {module.active_adapters} {module.disable_adapters} {getattr(module, 'scaling', None)}"


PLACEHOLDER: Final = re.compile(r"(image|video|audio)_token_(id|index)")
"""Names in model configurations of tokens that stand for pictures, videos or sound."""


def placeholder_tokens(model: Any) -> frozenset[int]:
    """Return the token ids that stand for other input than text. Block keys have token ids only."""
    config = model.config.to_dict()
    return frozenset(value for name, value in config.items() if PLACEHOLDER.fullmatch(name) and isinstance(value, int))


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
