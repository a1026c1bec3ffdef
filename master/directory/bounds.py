"""Times and limits of a directory: plain values, made from the master's settings."""

from dataclasses import dataclass, field

from kvstore.master.directory.placement.copies import CopyLimits
from kvstore.master.directory.writes.record_policy import ALL


@dataclass(frozen=True, slots=True)
class DirectoryTiming:
    """Times of a directory, in seconds."""

    reserve_ttl_s: float = 30.0
    """Lifetime of reservations."""
    node_ttl_s: float = 10.0
    """Silence until a node is dead."""
    slow_start_s: float = 30.0
    """Ramp-up of a new node."""
    forget_node_s: float = 60.0
    """Delay until a dead node's blocks are forgotten."""
    measured_rate_ttl_s: float = 60.0
    """Lifetime of measured rates."""
    repair_after_s: float = 30.0
    """Delay until a dead node's replicas are copied again."""


@dataclass(frozen=True, slots=True)
class HotCopyLimits:
    """Limits of hot copies: up to `copies` further nodes (0: none), one for each `reads_per_s` by hosts without a
    copy."""

    copies: int = 0
    reads_per_s: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLimits:
    """Times and limits: live nodes, known dead nodes, tombstones, reservations, copies under way, bytes a
    second of home copies (0: none), and hot copies."""

    timing: DirectoryTiming = field(default_factory=DirectoryTiming)
    nodes: int = 1024
    absent_nodes: int = 1024
    kept_removals: int = 100_000
    reservations: int = 1 << 20
    pace: CopyLimits = field(default_factory=CopyLimits)
    home_copy_bytes_per_s: int = 0
    spread: HotCopyLimits = field(default_factory=HotCopyLimits)
    recorded: str = ALL
    """Blocks that have a record: see record_policy.py."""
