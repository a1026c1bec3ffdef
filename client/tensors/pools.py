"""A rank's KV cache in the engine's memory, viewed block by block: one tensor or several, K and V joined or apart,
transposed or not.

A `CacheLayout` describes the memory order; its strides give the views. Nothing here copies elements or uses the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.client.tensors.arrays import is_tensor
from kvstore.kvcache.layouts.layout import CacheLayout, Strides, strides_of
from kvstore.kvcache.models.table import dtype_bytes
from kvstore.protocol.errors import InvalidArgument

Blocks: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

NUMPY_TYPES: Final = ("float64", "float32", "float16")
"""Dtypes of DTYPE_BYTES that numpy supports."""
_SAME: Final = ("kv_factor", "head_dim", "block_tokens", "dtype")


@dataclass(frozen=True, slots=True)
class PoolPlane:
    """Part of a pool that one tensor with regular strides covers."""

    layers: range
    """Relative to the rank."""
    kinds: range
    """Range over K (0) and V (1)."""
    values: Any
    """View of shape `[blocks, layers, kinds, heads, tokens, head_dim]`."""


class BlockPool:
    """Blocks of one rank. Threads may use distinct blocks concurrently."""

    def __init__(self, planes: Sequence[PoolPlane]) -> None:
        self.planes = planes
        first = planes[0].values
        self.block_count = len(first)
        self.is_tensor = is_tensor(first)
        self.device = first.device if self.is_tensor else None
        self.is_writable = self.is_tensor or all(plane.values.flags.writeable for plane in planes)

    @property
    def is_on_gpu(self) -> bool:
        return self.device is not None and self.device.type != "cpu"

    def choose(self, blocks: Blocks | None) -> NDArray[np.int64]:
        """Validated block indexes, in order; None: all. Raises InvalidArgument for indexes out of range."""
        if blocks is None:
            return np.arange(self.block_count)
        try:
            chosen = np.asarray(blocks)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"blocks must be a flat list of numbers: {error}") from None
        is_list = chosen.ndim == 1 and (not chosen.size or chosen.dtype.kind in "iu")
        if not is_list or (chosen.size and not 0 <= chosen.min() <= chosen.max() < self.block_count):
            raise InvalidArgument(f"blocks must be a flat list of block numbers from 0 to {self.block_count - 1}")
        return chosen.astype(np.int64)


class EnginePool(BlockPool):
    """A rank's pool in the tensors that its engine allocated, by a layout. Created once, it is passed in place of a
    tensor.

    Examples of orders (kvcache/layouts/orders.py):

    - `layer | kv block token head`: a tensor per layer.
    - `kv layer | block token head`: a list of K's, then one of V's.
    - `layer | block head kv token K^T`: a tensor per layer, with transposed keys.
    """

    def __init__(self, layout: CacheLayout, tensors: Any, *, rank: int = 0) -> None:
        """Args:
            layout: of the elements in the engine's memory, so without a scheme; `pool_blocks` is that of its tensors.
            tensors: one per region of the layout, in order (a single one needs no list): torch tensors of one device, or numpy arrays,
                of the layout's element type or of uint8. Only the memory order counts, not the axes: any permutation of a dense tensor
                is accepted. They are used in place, and must stay allocated.
            rank: rank in the layout's parallelism.

        Raises:
            InvalidArgument: the tensors do not match the layout, or the layout has a region per block, token or head.
        """
        if not layout.spec.scheme.is_raw:
            raise InvalidArgument(f"an engine's tensors hold elements: leave the scheme {layout.spec.scheme.name} to the cache")
        if across := set(layout.axes.outer) - {"layer", "kv"}:
            raise InvalidArgument(f"a region of {layout.order} does not hold every {' and '.join(sorted(across))}: give tensors that do")
        given = list(tensors) if isinstance(tensors, Sequence) else [tensors]
        if len(given) != layout.region_count(rank):
            raise InvalidArgument(f"{len(given)} tensors, where {layout.order} has {layout.region_count(rank)}: one for each region")
        flat = [_elements(region, layout, layout.region_bytes(rank, number)) for number, region in enumerate(given)]
        if len({(is_tensor(region), getattr(region, "device", None)) for region in flat}) > 1:
            raise InvalidArgument("the tensors of a pool are of one kind and on one device: a rank's are")
        self.layout = layout
        self.rank = rank
        super().__init__(_planes(layout, rank, flat))

    def fits(self, layout: CacheLayout, rank: int) -> bool:
        """Return whether its blocks have the contents of a rank of another layout; orders may differ."""
        one, other = (
            (of.rank_layers(number), of.rank_heads(number), *(getattr(of.spec, name) for name in _SAME))
            for of, number in ((self.layout, self.rank), (layout, rank))
        )
        return one == other


def _planes(layout: CacheLayout, rank: int, regions: Sequence[Any]) -> list[PoolPlane]:
    strides = [strides_of(layout, rank, kv) for kv in range(layout.spec.kv_factor)]
    kinds, kind_bytes = [range(kv, kv + 1) for kv in range(len(strides))], 0
    first, last = strides[0].start, strides[-1].start
    if len(strides) == 2 and strides[0][1:] == strides[1][1:] and first.regions == last.regions:
        kinds, kind_bytes = [range(2)], last.size_bytes - first.size_bytes
    count = layout.count(rank, "layer")
    layers = [range(layer, layer + 1) for layer in range(count)] if "layer" in layout.axes.outer else [range(count)]
    return [
        PoolPlane(of_layers, of_kinds, _view(layout, rank, regions, strides[of_kinds.start], of_layers, len(of_kinds), kind_bytes))
        for of_layers in layers
        for of_kinds in kinds
    ]


def _view(layout: CacheLayout, rank: int, regions: Sequence[Any], strides: Strides, layers: range, kinds: int, kind_bytes: int) -> Any:
    """View `[blocks, layers, kinds, heads, tokens, head_dim]` of the region with these layers."""
    spec, value_bytes = layout.spec, layout.spec.dtype_bytes
    start = strides.start.moved(strides.layer, layers.start)
    shape = (layout.pool_blocks, len(layers), kinds, layout.count(rank, "head"), spec.block_tokens, spec.head_dim)
    steps = (strides.block, strides.layer, None, strides.head, strides.token, strides.value)
    step_bytes = [kind_bytes if step is None else step.size_bytes for step in steps]
    region = regions[start.regions]
    if is_tensor(region):
        return region.as_strided(
            shape, [size // value_bytes for size in step_bytes], region.storage_offset() + start.size_bytes // value_bytes
        )
    return np.lib.stride_tricks.as_strided(
        region[start.size_bytes // value_bytes :],
        shape,
        [size // value_bytes * region.itemsize for size in step_bytes],
        writeable=region.flags.writeable,
    )


def _elements(region: Any, layout: CacheLayout, size_bytes: int) -> Any:
    """A region's elements in memory order, flat. Raises InvalidArgument unless it is such a region."""
    if not is_tensor(region) and not isinstance(region, np.ndarray):
        raise InvalidArgument(f"a pool is made of torch tensors or numpy arrays, not {type(region).__name__}")
    if region.nbytes != size_bytes:
        raise InvalidArgument(f"a tensor of {region.nbytes} bytes, {list(region.shape)}, where {layout.order} has {size_bytes}")
    if is_tensor(region):
        order = sorted(range(region.dim()), key=region.stride, reverse=True)
        ordered = region.detach().permute(order)
        is_dense = ordered.is_contiguous()
    else:
        order = sorted(range(region.ndim), key=region.strides.__getitem__, reverse=True)
        ordered = region.transpose(order)
        is_dense = ordered.flags.c_contiguous
    if not is_dense:
        raise InvalidArgument(f"a tensor with gaps, {list(region.shape)}: give the whole memory in which its blocks lie")
    flat, dtype = ordered.reshape(-1), layout.spec.dtype
    if str(region.dtype) in ("torch.uint8", "uint8"):
        flat = flat.view(_type_of(region, dtype))
    if not holds(flat, dtype):
        raise InvalidArgument(f"the elements are {region.dtype}, and those of the pool {dtype}")
    return flat


def holds(values: Any, dtype: str) -> bool:
    """Return whether the elements have this dtype. For bfloat16 and float8, which numpy lacks, unsigned integers count."""
    if is_tensor(values):
        return str(values.dtype) == f"torch.{dtype}"
    return values.dtype.isnative and values.dtype.name in (dtype, _stand_in(dtype))


def _type_of(values: Any, dtype: str) -> Any:
    """The library's dtype of this name."""
    if is_tensor(values):
        import torch

        return getattr(torch, dtype)
    return _stand_in(dtype)


def _stand_in(dtype: str) -> str:
    """Dtype of a numpy array of these: unsigned integers of equal size for dtypes that numpy lacks. ml_dtypes, once
    imported, may add a name for them."""
    return dtype if dtype in NUMPY_TYPES else f"uint{8 * dtype_bytes(dtype)}"
