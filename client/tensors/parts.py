"""Which values of the store a rank's shard of the cache is made of. Pure: nothing here touches a tensor or the network.

A value holds one block of tokens for a group of heads and a group of layers that do not depend on who computes them, so that engines of
any tensor and pipeline parallelism read what others wrote. A rank's shard meets some of these values, each in whole or in part.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ValuePart:
    """What a rank's shard has in common with the values of one group of layers and heads: one value a block."""

    namespace: Namespace
    """Of these values; its `layers` and `heads` name the group."""
    layer_count: int
    """Layers that a value holds."""
    head_count: int
    """KV heads that a value holds."""
    value_layers: slice
    """The common layers, counted from the value's first."""
    value_heads: slice
    own_layers: slice
    """The same layers, counted from the rank's first."""
    own_heads: slice

    @property
    def model_layers(self) -> range:
        """The value's layers, of the model's."""
        assert self.namespace.layers is not None
        return range(*self.namespace.layers)

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of the value, and so can write it."""
        return self.value_layers == slice(0, self.layer_count) and self.value_heads == slice(0, self.head_count)


def namespace_of(spec: CacheSpec, base: Namespace) -> Namespace:
    """The namespace of all values of `spec` together: `base` with the scheme in its dtype, as `bfloat16+int4/64`.

    Raises InvalidArgument when `base` contradicts `spec`, or names layers or heads, which are each value's own.
    """
    if base.layers is not None or base.heads is not None:
        raise InvalidArgument("the namespace names layers or heads: leave both out, they are set for each value")
    if base.dtype != spec.dtype:
        raise InvalidArgument(f"the namespace's dtype is {base.dtype!r} and the cache's {spec.dtype!r}: give the elements' type in both")
    if base.block_tokens != spec.block_tokens:
        raise InvalidArgument(f"blocks of {base.block_tokens} tokens in the namespace and {spec.block_tokens} in the spec: they must agree")
    return base if spec.scheme.is_raw else dataclasses.replace(base, dtype=f"{spec.dtype}+{spec.scheme.name}")


def value_parts(
    spec: CacheSpec, namespace: Namespace, *, layers: range, heads: range, heads_per_value: int, layers_per_value: int
) -> tuple[ValuePart, ...]:
    """The values that a shard of the global `layers` and `heads` meets, by layers and then by heads.

    A group begins at every multiple of `layers_per_value` (0: one group of all layers) and of `heads_per_value`; the last group of layers
    may be shorter. Raises InvalidArgument for a number out of range, or heads that cannot be grouped evenly.
    """
    layers_each = layers_per_value or spec.layers
    if not 0 <= layers_per_value <= spec.layers:
        raise InvalidArgument(f"layers_per_value is 1 to {spec.layers}, or 0 for all of these, not {layers_per_value}")
    if not 1 <= heads_per_value <= spec.kv_heads or spec.kv_heads % heads_per_value:
        raise InvalidArgument(f"heads_per_value divides the {spec.kv_heads} KV heads of the model, {heads_per_value} does not")
    groups = spec.kv_heads // heads_per_value
    return tuple(
        ValuePart(
            dataclasses.replace(namespace, layers=(of_layers.start, of_layers.stop), heads=(of_heads.start // heads_per_value, groups)),
            len(of_layers),
            len(of_heads),
            _common(of_layers, layers, of_layers),
            _common(of_heads, heads, of_heads),
            _common(of_layers, layers, layers),
            _common(of_heads, heads, heads),
        )
        for of_layers in _groups(layers, layers_each, spec.layers)
        for of_heads in _groups(heads, heads_per_value, spec.kv_heads)
    )


def _groups(own: range, each: int, count: int) -> Iterator[range]:
    """The groups of `each` that meet `own`, of the numbers below `count`."""
    for start in range(own.start // each * each, own.stop, each):
        yield range(start, min(start + each, count))


def _common(left: range, right: range, origin: range) -> slice:
    return slice(max(left.start, right.start) - origin.start, min(left.stop, right.stop) - origin.start)
