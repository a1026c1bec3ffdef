"""Settings of jobs: `KVSTORE_JOBS_*`, or [jobs] in the TOML file, where an engine's plug-in reads them."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import Size, setting

SECTION: Final = "jobs"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How much may wait, for how long, and when the store counts as unreachable."""

    read_workers: int = setting(2, "Threads, or tasks of an event loop, that carry out lookups and loads.", minimum=1, maximum=64)
    write_workers: int = setting(1, "Threads, or tasks, that carry out stores.", minimum=1, maximum=64)
    queue_bytes: Size = setting(
        Size(256 << 20), "Values of stores that wait or are being written, together; what is over it is refused, and dropped.", minimum=1
    )
    queue_jobs: int = setting(4096, "Jobs that may wait, lookups and loads together, and stores; further ones are refused.", minimum=1)
    batch_bytes: Size = setting(
        Size(64 << 20), "Values that one call of the client moves: a job of more can be cancelled between two of them.", minimum=1
    )
    lookup_deadline_s: float = setting(
        0.5, "From the asking to the answer of a lookup, unless it names its own: an engine's scheduler may wait for it.", minimum=0.001
    )
    load_deadline_s: float = setting(5.0, "From the submission to the end of a load, unless it names its own.", minimum=0.001, maximum=3600)
    store_deadline_s: float = setting(
        30.0, "From the submission to the end of a store, unless it names its own.", minimum=0.001, maximum=3600
    )
    breaker_failures: int = setting(
        1, "Calls in a row that end with Unavailable or DeadlineExceeded before all are answered without asking the store.", minimum=1
    )
    probe_interval_s: float = setting(
        1.0, "How long the store is left alone then, before one call finds out whether it is back.", minimum=0.001
    )
    probe_deadline_s: float = setting(2.0, "For that call.", minimum=0.001, maximum=3600)
