"""What is known of a block that hosts without a copy read often (hot_copies.py), and whoever asks which copies are to stay
(last_copies.py)."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class HotBlock:
    """`count` nodes are to have this version besides one; 0: it has cooled. `made_at` are those of its holders that got it for its heat:
    they keep it as long as so many are to have it, and are the first to give it up."""

    generation: int
    count: int = 0
    made_at: set[int] = field(default_factory=set)
    not_before_ns: int = 0
    """A node that was to get a copy has not: no other is asked before."""
