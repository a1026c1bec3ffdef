"""Positions from which all layer groups of a hybrid model can resume, and what each group needs for it. Pure.

Full attention needs all blocks before a position, a sliding window the blocks of the last tokens. Recurrent layers
(Mamba, linear attention) need their state at that very position, which is not made of blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client.tensors.parts import ValueShape
from kvstore.client.tensors.pools import Blocks
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import InvalidArgument

Present = NDArray[np.bool_]
"""Presence of each block of a sequence, or of the state at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers with blocks and a block table of their own."""

    name: str
    """Part of the keys, as are the following fields: engines share groups of one name."""
    spec: CacheSpec
    """Spec of these layers alone."""
    window_tokens: int = 0
    """Sliding window: tokens needed before a position; 0: all."""
    values: ValueShape = ValueShape()

    @property
    def block_tokens(self) -> int:
        return self.spec.block_tokens

    def first_needed(self, tokens: int) -> int:
        """First block needed to resume after `tokens` tokens."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.window_tokens else 0

    def can_go_on(self, present: Present) -> Present:
        """For each block, whether these layers can resume from its end."""
        return can_resume(present, block_tokens=self.block_tokens, window_tokens=self.window_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Layers with a recurrent state per sequence: bytes that only their engine interprets."""

    name: str
    form: str
    """Text that identifies the format of the bytes: shapes, element types, order."""
    state_bytes: int
    """Size for one sequence of this rank."""
    block_tokens: int
    """States are kept after multiples of this."""

    def can_go_on(self, present: Present) -> Present:
        """For each block, whether these layers can resume from its end: the state must be present."""
        return present


AnyGroup = CacheGroup | StateGroup


@dataclass(frozen=True, slots=True)
class GroupBlockTable:
    """Block table of one group for a sequence."""

    pool: Any
    """A tensor or an `EnginePool`, as `TensorCache` takes it."""
    blocks: Blocks
    """Pool indexes of the blocks from `first_block` of the sequence on. Entries outside a window are ignored."""
    first_block: int = 0

    def part(self, start: int, stop: int) -> Blocks:
        """Pool indexes of blocks [start, stop) of the sequence. Raises InvalidArgument if the table lacks some."""
        if not self.first_block <= start <= stop <= self.first_block + len(self.blocks):
            have = f"{self.first_block} to {self.first_block + len(self.blocks)}"
            raise InvalidArgument(f"blocks {start} to {stop} of the sequence are needed, but the table has blocks {have}")
        return self.blocks[start - self.first_block : stop - self.first_block]


def check_groups(groups: Sequence[AnyGroup]) -> None:
    """Raises InvalidArgument unless there are groups, with distinct names."""
    names = [group.name for group in groups]
    if not names or "" in names or len(set(names)) < len(names):
        raise InvalidArgument(f"groups need distinct, non-empty names, not {names}")


class Resumable(Protocol):
    """The part of a group that `longest` uses."""

    @property
    def block_tokens(self) -> int: ...

    def can_go_on(self, present: Present) -> Present: ...


def can_resume(present: Present, *, block_tokens: int, window_tokens: int) -> Present:
    """For each block, whether all blocks needed to resume from its end are present: those of the last `window_tokens`,
    or all (0)."""
    ends = np.arange(1, len(present) + 1)
    first = np.maximum(0, ends * block_tokens - window_tokens) // block_tokens if window_tokens else np.zeros_like(ends)
    missing = np.concatenate(([0], np.cumsum(~present)))
    resumable: Present = missing[ends] == missing[first]
    return resumable


def longest(groups: Sequence[Resumable], present: Sequence[Present], *, limit_tokens: int) -> int:
    """Most tokens, up to a limit, after which every group can resume. `present` is per group and block."""
    step = math.lcm(*(group.block_tokens for group in groups))
    possible = np.ones(limit_tokens // step, np.bool_)
    for group, of_group in zip(groups, present, strict=True):
        ends = group.can_go_on(of_group)[step // group.block_tokens - 1 :: step // group.block_tokens]
        possible = possible[: len(ends)] & ends[: len(possible)]
    found = np.flatnonzero(possible)
    return int(found[-1] + 1) * step if len(found) else 0
