"""Limits and deadlines of `Jobs`, set by its caller."""

from dataclasses import dataclass

from kvstore.protocol.settings import Size, constant


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Queue limits, deadlines and probe timing of `Jobs`."""

    queue_bytes: Size = constant(Size(256 << 20))
    """Values of stores that wait or run, in total; stores beyond it are refused."""
    lookup_deadline_s: float = constant(0.5)
    """Default deadline of a lookup, from its submission; an engine's scheduler may wait for it."""
    load_deadline_s: float = constant(5.0)
    """Default deadline of a load, from its submission."""
    store_deadline_s: float = constant(30.0)
    """Default deadline of a store, from its submission."""
    read_workers: int = constant(2)
    """Threads for lookups and loads; more than one, so that a hanging node does not block all."""
    write_workers: int = constant(1)
    """Threads for stores."""
    queue_jobs: int = constant(4096)
    """Jobs that may wait, per queue (lookups and loads; stores); each takes some KB."""
    batch_bytes: int = constant(64 << 20)
    """Values that one client call moves, some 10 ms: a larger job can be cancelled between two calls."""
    probe_interval_s: float = constant(1.0)
    """Time between probes while the breaker is open."""
    probe_deadline_s: float = constant(2.0)
    """Deadline of a probe."""
