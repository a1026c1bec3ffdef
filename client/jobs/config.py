"""Settings of jobs: `KVSTORE_JOBS_*`, or [jobs] in the TOML file, where an engine's plug-in reads them."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import Size, constant, setting

SECTION: Final = "jobs"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How much may wait, for how long, and when the store counts as unreachable."""

    queue_bytes: Size = setting(
        Size(256 << 20), "Values of stores that wait or are being written, together; what is over it is refused, and dropped.", minimum=1
    )
    lookup_deadline_s: float = setting(
        0.5, "From the asking to the answer of a lookup, unless it names its own: an engine's scheduler may wait for it.", minimum=0.001
    )
    load_deadline_s: float = setting(5.0, "From the submission to the end of a load, unless it names its own.", minimum=0.001, maximum=3600)
    store_deadline_s: float = setting(
        30.0, "From the submission to the end of a store, unless it names its own.", minimum=0.001, maximum=3600
    )
    read_workers: int = constant(2)
    """Threads, or tasks of an event loop, that carry out lookups and loads: one that waits for a node that hangs does not hold up all."""
    write_workers: int = constant(1)
    """Threads, or tasks, that carry out stores."""
    queue_jobs: int = constant(4096)
    """Jobs that may wait, lookups and loads together, and stores: each takes some KB."""
    batch_bytes: int = constant(64 << 20)
    """Values that one call of the client moves, some 10 ms: a job of more can be cancelled between two of them."""
    breaker_failures: int = constant(1)
    """Calls in a row that end with Unavailable or DeadlineExceeded before all are answered without asking the store: each has waited for
    its deadline, and so has an engine's step."""
    probe_interval_s: float = constant(1.0)
    """How long the store is left alone then, before one call finds out whether it is back."""
    probe_deadline_s: float = constant(2.0)
    """For that call."""
