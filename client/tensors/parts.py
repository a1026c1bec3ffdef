"""Mapping of a rank's shard to stored values. Pure: touches no tensor and no network.

A value holds one block for a group of heads and a group of layers. The groups do not depend on the engine's
parallelism, so engines of any tensor and pipeline parallelism share values. A rank's shard meets some values, each in
whole or in part.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ValueShape:
    """Heads and layers of one stored value, equal for all engines that share a cache."""

    heads: int = 1
    """KV heads. More make fewer and larger values, which a rank with fewer heads cannot put."""
    layers: int = 0
    """0: all layers of the model, which a pipeline stage cannot put."""


@dataclass(frozen=True, slots=True)
class ValuePart:
    """Intersection of a rank's shard with the values of one group of layers and heads: one value per block."""

    namespace: Namespace
    """Namespace of these values; its `layers` and `heads` identify the group."""
    layer_count: int
    """Layers per value."""
    head_count: int
    """KV heads per value."""
    value_layers: slice
    """The common layers, relative to the value."""
    value_heads: slice
    own_layers: slice
    """The common layers, relative to the rank."""
    own_heads: slice

    @property
    def model_layers(self) -> range:
        """The value's layers, relative to the model."""
        assert self.namespace.layers is not None
        return range(*self.namespace.layers)

    @property
    def is_whole(self) -> bool:
        """Return whether the rank holds the whole value, and so can write it."""
        return self.value_layers == slice(0, self.layer_count) and self.value_heads == slice(0, self.head_count)


def namespace_of(spec: CacheSpec, base: Namespace) -> Namespace:
    """Namespace of all values of `spec`: `base` with the scheme in its dtype, as `bfloat16+int4/64`.

    Raises InvalidArgument when `base` contradicts `spec`, or names layers or heads, which are each value's own.
    """
    if base.layers is not None or base.heads is not None:
        raise InvalidArgument("the namespace names layers or heads: leave both out, they are set for each value")
    if base.dtype != spec.dtype:
        raise InvalidArgument(f"the namespace's dtype is {base.dtype!r} and the cache's {spec.dtype!r}: give the elements' type in both")
    if base.block_tokens != spec.block_tokens:
        raise InvalidArgument(f"blocks of {base.block_tokens} tokens in the namespace and {spec.block_tokens} in the spec: they must agree")
    return base if spec.scheme.is_raw else dataclasses.replace(base, dtype=f"{spec.dtype}+{spec.scheme.name}")


def value_parts(spec: CacheSpec, namespace: Namespace, *, layers: range, heads: range, shape: ValueShape) -> tuple[ValuePart, ...]:
    """Values that a shard of the global `layers` and `heads` meets, by layers and then by heads.

    A group begins at every multiple of the layers and of the heads of `shape`; the last group of layers may be shorter.
    Raises InvalidArgument for a number out of range, or heads that do not divide evenly.
    """
    if not 0 <= shape.layers <= spec.layers:
        raise InvalidArgument(f"the layers of a value are 1 to {spec.layers}, or 0 for all of these, not {shape.layers}")
    if not 1 <= shape.heads <= spec.kv_heads or spec.kv_heads % shape.heads:
        raise InvalidArgument(f"the heads of a value divide the {spec.kv_heads} KV heads of the model, {shape.heads} does not")
    groups = spec.kv_heads // shape.heads
    return tuple(
        ValuePart(
            dataclasses.replace(namespace, layers=(of_layers.start, of_layers.stop), heads=(of_heads.start // shape.heads, groups)),
            len(of_layers),
            len(of_heads),
            _common(of_layers, layers, of_layers),
            _common(of_heads, heads, of_heads),
            _common(of_layers, layers, layers),
            _common(of_heads, heads, heads),
        )
        for of_layers in _groups(layers, shape.layers or spec.layers, spec.layers)
        for of_heads in _groups(heads, shape.heads, spec.kv_heads)
    )


def _groups(own: range, each: int, count: int) -> Iterator[range]:
    """Groups of size `each` that meet `own`, below `count`."""
    for start in range(own.start // each * each, own.stop, each):
        yield range(start, min(start + each, count))


def _common(left: range, right: range, origin: range) -> slice:
    return slice(max(left.start, right.start) - origin.start, min(left.stop, right.stop) - origin.start)
