"""Which tokens of a sequence all groups of a hybrid model's layers can go on from, and what each of them needs for that. Pure.

Layers that attend to everything need all blocks before a position; those with a sliding window the blocks of the last tokens; recurrent
ones (Mamba, linear attention) their state at that very position, which no block of tokens is made of.
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
"""Of the blocks of a sequence, or of the states at their ends: is it there?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that have blocks and a block table of their own."""

    name: str
    """In the keys, with all that follows: engines share what has the same name."""
    spec: CacheSpec
    """Of these layers alone: their number, heads, element type and tokens a block."""
    window_tokens: int = 0
    """Of a sliding window: how many tokens before a position are needed; 0: all."""
    values: ValueShape = ValueShape()

    @property
    def block_tokens(self) -> int:
        return self.spec.block_tokens

    def first_needed(self, tokens: int) -> int:
        """The first block that is needed to go on after so many tokens."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.window_tokens else 0

    def can_go_on(self, present: Present) -> Present:
        """For each block whether its end is a position from which these layers can go on."""
        return can_resume(present, block_tokens=self.block_tokens, window_tokens=self.window_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Layers that keep a state of a sequence, and nothing of its tokens: bytes that only their engine understands."""

    name: str
    form: str
    """What the bytes depend on, as a text: shapes, element types, their order."""
    state_bytes: int
    """Of one sequence, of this rank."""
    block_tokens: int
    """States are those after a multiple of so many tokens."""

    def can_go_on(self, present: Present) -> Present:
        """For each block whether its end is a position from which these layers can go on: the state must be there."""
        return present


AnyGroup = CacheGroup | StateGroup


@dataclass(frozen=True, slots=True)
class GroupBlockTable:
    """Where a group's blocks of a sequence lie."""

    pool: Any
    """A tensor or an `EnginePool`, as `TensorCache` takes it."""
    blocks: Blocks
    """Places in the pool of the blocks from `first_block` of the sequence on. Those that a window does not need are not looked at."""
    first_block: int = 0

    def part(self, start: int, stop: int) -> Blocks:
        """The places of blocks [start, stop) of the sequence. Raises InvalidArgument if it has none for them."""
        if not self.first_block <= start <= stop <= self.first_block + len(self.blocks):
            have = f"{self.first_block} to {self.first_block + len(self.blocks)}"
            raise InvalidArgument(f"blocks {start} to {stop} of the sequence are needed, and the table has those from {have}")
        return self.blocks[start - self.first_block : stop - self.first_block]


def check_groups(groups: Sequence[AnyGroup]) -> None:
    """Raises InvalidArgument unless there are some, each of a name of its own."""
    names = [group.name for group in groups]
    if not names or "" in names or len(set(names)) < len(names):
        raise InvalidArgument(f"groups have names, each its own, not {names}")


class Resumable(Protocol):
    """What `longest` asks of a group."""

    @property
    def block_tokens(self) -> int: ...

    def can_go_on(self, present: Present) -> Present: ...


def can_resume(present: Present, *, block_tokens: int, window_tokens: int) -> Present:
    """For each block whether all that are needed to go on from its end are there: those of the last `window_tokens`, or all (0)."""
    ends = np.arange(1, len(present) + 1)
    first = np.maximum(0, ends * block_tokens - window_tokens) // block_tokens if window_tokens else np.zeros_like(ends)
    missing = np.concatenate(([0], np.cumsum(~present)))
    resumable: Present = missing[ends] == missing[first]
    return resumable


def longest(groups: Sequence[Resumable], present: Sequence[Present], *, limit_tokens: int) -> int:
    """The most tokens, up to a limit, after which every group can go on. `present` is of each group, block by block."""
    step = math.lcm(*(group.block_tokens for group in groups))
    possible = np.ones(limit_tokens // step, np.bool_)
    for group, of_group in zip(groups, present, strict=True):
        ends = group.can_go_on(of_group)[step // group.block_tokens - 1 :: step // group.block_tokens]
        possible = possible[: len(ends)] & ends[: len(possible)]
    found = np.flatnonzero(possible)
    return int(found[-1] + 1) * step if len(found) else 0
