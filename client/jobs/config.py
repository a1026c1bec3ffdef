"""Bounds and deadlines of jobs, which the caller of `Jobs` gives."""

from dataclasses import dataclass

from kvstore.protocol.settings import Size, constant


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How much may wait, for how long, and when the store counts as unreachable."""

    queue_bytes: Size = constant(Size(256 << 20))
    """Values of stores that wait or are being written, together; what is over it is refused, and dropped."""
    lookup_deadline_s: float = constant(0.5)
    """From the asking to the answer of a lookup, unless it names its own: an engine's scheduler may wait for it."""
    load_deadline_s: float = constant(5.0)
    """From the submission to the end of a load, unless it names its own."""
    store_deadline_s: float = constant(30.0)
    """From the submission to the end of a store, unless it names its own."""
    read_workers: int = constant(2)
    """Threads, or tasks of an event loop, that carry out lookups and loads: one that waits for a node that hangs does not hold up all."""
    write_workers: int = constant(1)
    """Threads, or tasks, that carry out stores."""
    queue_jobs: int = constant(4096)
    """Jobs that may wait, lookups and loads together, and stores: each takes some KB."""
    batch_bytes: int = constant(64 << 20)
    """Values that one call of the client moves, some 10 ms: a job of more can be cancelled between two of them."""
    probe_interval_s: float = constant(1.0)
    """How long the store is left alone then, before one call finds out whether it is back."""
    probe_deadline_s: float = constant(2.0)
    """For that call."""
