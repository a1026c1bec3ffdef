"""How long what a directory keeps is believed, and how much of it there may be at most: plain values, made of the master's settings."""

from dataclasses import dataclass, field

from kvstore.master.directory.placement.copies import CopyLimits
from kvstore.master.directory.writes.record_policy import ALL


@dataclass(frozen=True, slots=True)
class DirectoryTiming:
    """Seconds a reservation lasts, a silent node is believed, a new node warms up, a dead node's blocks are remembered, a measured rate
    counts, and the replicas of a dead node are waited for before others are made."""

    reserve_ttl_s: float = 30.0
    node_ttl_s: float = 10.0
    slow_start_s: float = 30.0
    forget_node_s: float = 60.0
    measured_rate_ttl_s: float = 60.0
    repair_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class HotCopyLimits:
    """How reads of a hot block are spread: over `copies` nodes besides its own at most (0: not at all), one for each `reads_per_s` by
    which hosts without a copy read it."""

    copies: int = 0
    reads_per_s: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLimits:
    """How long things last. Nodes that may live, dead ones that are known, removals kept for them one by one, puts granted and not yet
    published, what drains have under way, the share of its capacity that a node keeps free where others spill to it (0: nothing is
    spilled), and how reads of hot blocks are spread."""

    timing: DirectoryTiming = field(default_factory=DirectoryTiming)
    nodes: int = 1024
    absent_nodes: int = 1024
    kept_removals: int = 100_000
    reservations: int = 1 << 20
    pace: CopyLimits = field(default_factory=CopyLimits)
    spill_free_share: float = 0.0
    spread: HotCopyLimits = field(default_factory=HotCopyLimits)
    recorded: str = ALL
    """Which blocks have a record: see record_policy.py."""
