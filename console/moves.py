"""Blocks that moved or left, by reason, out of a cluster's status. Pure functions."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import COPY_REASONS

TIER_MOVES: Final = {"demotions": "demoted to a slower tier", "promotions": "promoted to a faster tier"}
COPIES: Final = {
    "home": "copied to their home node",
    "prefetch": "copied to a node that requested them",
    "hot": "copied because many hosts read them",
    "replica": "copied as replicas",
    "drain": "copied off drained nodes",
}
"""By reason of COPY_REASONS."""
EVICTIONS: Final = {
    "room": "evicted, the tier was full",
    "secondary": "evicted, the home node keeps them",
    "worth": "evicted, not worth a write to NVMe",
    "quota": "evicted, the tenant was over its quota",
    "table": "evicted, the block table was full",
}
"""By reason of TierStatus.evictions_by_reason."""
SKIPPED: Final = {
    "gone": "had left the writer's node before",
    "space": "their home had no space",
    "queue": "too many waited",
    "failed": "the copy failed",
}
"""Why blocks have no home copy, by suffix of the master's counters `home_copies_skipped_`."""
assert set(COPIES) == set(COPY_REASONS)


class Moves(NamedTuple):
    """Blocks that moved for one reason, since the nodes started, and their bytes if nodes count them. `counter` is the name in
    `counters_of`."""

    counter: str
    text: str
    blocks: int
    size_bytes: int | None = None


def counters_of(node: pb.NodeStatus) -> dict[str, int]:
    """Return the node's counters of moved blocks by name, for rates."""
    found = {f"copied_blocks_{reason}": node.counters.get(f"copied_blocks_{reason}", 0) for reason in COPIES}
    found |= {name: node.counters.get(name, 0) for name in ("prefetched_blocks", "prefetches_expected")}
    for name in TIER_MOVES:
        found[name] = sum(getattr(tier, name) for tier in node.tiers)
    for reason in EVICTIONS:
        found[f"evicted_{reason}"] = sum(tier.evictions_by_reason.get(reason, 0) for tier in node.tiers)
    return found


def moves(status: pb.StatusReply) -> list[Moves]:
    """Return the moved blocks of all nodes, by reason, in the order in which they are shown."""
    counters = [counters_of(node) for node in status.nodes]

    def total(name: str) -> int:
        return sum(one[name] for one in counters)

    def of_nodes(name: str) -> int:
        return sum(node.counters.get(name, 0) for node in status.nodes)

    def copied(reason: str) -> Moves:
        return Moves(f"copied_blocks_{reason}", COPIES[reason], total(f"copied_blocks_{reason}"), of_nodes(f"copied_bytes_{reason}"))

    return [
        *map(copied, COPIES),
        *(Moves(name, text, total(name)) for name, text in TIER_MOVES.items()),
        Moves("prefetched_blocks", "prefetched into DRAM", total("prefetched_blocks"), of_nodes("prefetched_bytes")),
        Moves("prefetches_expected", "queued for a prefetch because a hint expects their read", total("prefetches_expected")),
        *(Moves(f"evicted_{reason}", text, total(f"evicted_{reason}")) for reason, text in EVICTIONS.items()),
    ]


def home_copies_of(node: pb.NodeStatus) -> dict[str, int]:
    """Return the node's home copies: blocks that other nodes, their homes, fetched from it; that it fetched as their home; its own blocks
    without a home copy."""
    names = {"sent": "secondary_blocks", "received": "copied_blocks_home", "skipped": "home_copies_skipped"}
    return {name: node.counters.get(counter, 0) for name, counter in names.items()}


def skipped(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the number of blocks without a home copy by their text in SKIPPED, those above 0."""
    found = {text: counters.get(f"home_copies_skipped_{reason}", 0) for reason, text in SKIPPED.items()}
    return {text: blocks for text, blocks in found.items() if blocks}


def home_copies_by_node(status: pb.StatusReply, name: str) -> list[tuple[str, int]]:
    """Return (node name, blocks) by a name in `home_copies_of`, those above 0, the highest first."""
    found = ((node.name, home_copies_of(node)[name]) for node in status.nodes)
    return sorted((one for one in found if one[1]), key=lambda one: (-one[1], one[0]))
