"""Jobs as tests make them, without a client."""

from collections.abc import Sequence
from typing import Any

from kvstore.client.jobs.job import Job, JobKind


def job(kind: JobKind = JobKind.STORE, sizes: Sequence[int] = (10, 20, 30), *, deadline_ns: int = 1 << 62, **attributes: Any) -> Job:
    """With a key a size; due at no time."""
    made = Job(kind, "request", [b"%d" % i for i in range(len(sizes))], deadline_ns=deadline_ns, budget_s=1.0)
    made.sizes = list(sizes)
    made.values = [bytes(size) for size in sizes]
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
