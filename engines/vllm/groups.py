"""Groups of an engine's layers with a block table each, as vLLM's hybrid cache manager makes them: which blocks of each a prefix needs.

A model whose layers are all alike is one group. Layers with a sliding window need the blocks of the last tokens only, and their engine lets
the others go while the request runs; layers with a recurrent state (Mamba, short convolutions) have a block at some of its places, which
holds the state after the last token there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.client.tensors.groups import Present, can_resume


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What the plan knows of one."""

    block_tokens: int
    window_tokens: int = 0
    """How many tokens before a position are needed to go on from there; 0: all. 1 for a state."""
    is_state: bool = False
    """The engine says by itself which of its blocks holds a state that is whole: see `Plan.step`."""

    def first_needed(self, tokens: int) -> int:
        """The first block that is needed to go on after so many tokens."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.window_tokens else 0

    def can_go_on(self, present: Present) -> Present:
        """For each block of a sequence whether its end is a position from which these layers can go on."""
        return can_resume(present, block_tokens=self.block_tokens, window_tokens=self.window_tokens)


def fail_whole(groups: Sequence[LayerGroup]) -> bool:
    """Whether a block that does not come fails all that its request was to load: what lies before it is no prefix to go on from where only
    a window's blocks were loaded, and vLLM cannot say of which of several groups a block is."""
    return len(groups) > 1 or any(group.window_tokens for group in groups)
