"""What is known of a block that a node without room has spilled (spilling.py), while both nodes have it (last_copies.py)."""

from typing import NamedTuple


class Guest(NamedTuple):
    """The node that took the block, and the one that spilled it."""

    node_id: int
    source_node_id: int
