"""The fast form of `CacheLayout.locate`: places as sums of index times stride, so that numpy makes many at once.

Keys and values may differ in size (quantised with different bits), so a stride may depend on which of the two is meant: strides are of
one rank's K, or of its V.
"""

from functools import lru_cache
from typing import NamedTuple

from kvstore.kvcache.layouts.copies import Int64s
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.orders import TRANSPOSED


class Step(NamedTuple):
    """How far the place moves when an index grows by one. Also a place itself: so many steps from region 0, byte 0."""

    regions: int
    size_bytes: int

    def moved(self, step: "Step", times: int) -> "Step":
        """The place `times` steps on."""
        return Step(self.regions + times * step.regions, self.size_bytes + times * step.size_bytes)


class Placed(NamedTuple):
    """Tokens in a rank's pool: the block of each and its place in the block. Arrays of one length."""

    blocks: Int64s
    tokens: Int64s


class Places(NamedTuple):
    """Regions and offsets in bytes. Arrays of one length."""

    regions: Int64s
    offsets: Int64s


class Strides(NamedTuple):
    """Of K or V of one rank; indexes of layers and heads are those within the rank."""

    start: Step
    """Where all indexes are 0."""
    block: Step
    layer: Step
    head: Step
    token: Step
    """Of no use where records are quantised: a token is then no place of its own."""
    value: Step
    """Between the `head_dim` values of an element; of no use where records are quantised."""

    def places(self, placed: Placed, first: Step) -> Places:
        """Where these tokens are if block 0's first token is at `first`."""
        blocks, tokens = placed
        return Places(
            first.regions + blocks * self.block.regions + tokens * self.token.regions,
            first.size_bytes + blocks * self.block.size_bytes + tokens * self.token.size_bytes,
        )


@lru_cache(maxsize=1024)
def strides_of(layout: CacheLayout, rank: int, kv: int) -> Strides:
    """Strides of keys (`kv` 0) or values (1) in the pool of `rank`. Raises InvalidArgument if there is no such rank."""
    steps: dict[str, Step] = {}
    outer, inner, transposed = layout.axes
    for position, axis in enumerate(outer):
        steps[axis] = Step(layout.regions_of(rank, outer[position + 1 :]), 0)
    for position, axis in enumerate(inner):
        # K comes before V: a step from one to the other is as long as K's part.
        steps[axis] = Step(0, layout.bytes_of(rank, inner[position + 1 :], kv=0 if axis == "kv" else kv))
    start = Step(0, 0).moved(steps["kv"], kv)
    value_bytes, element_bytes = layout.spec.dtype_bytes, layout.spec.dtype_bytes * layout.spec.head_dim
    value = Step(0, value_bytes)
    if TRANSPOSED[kv] in transposed:
        steps["token"], value = value, Step(0, value_bytes * layout.spec.block_tokens)
    elif transposed:  # the other one is: this one is a record, too, of elements one after another
        steps["token"] = Step(0, element_bytes)
    return Strides(start, steps["block"], steps["layer"], steps["head"], steps["token"], value)
