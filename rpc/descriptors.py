"""Descriptors of this process: how many it may have, how many connections those are good for, and a spare one for when all are in use.
`RefusalLog` counts the connections that are refused.
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

INTERVAL_NS: Final = 60_000_000_000
"""Between two lines about one reason: clients that are refused try again many times a second."""


def allow_many_descriptors() -> None:
    """Raise this process's limit of open files to what the system allows: each connection takes one, each slab of DRAM two."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_open_files() -> int:
    """The limit of open files of this process."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def max_accepted() -> int:
    """Connections that this process may accept: half of its descriptors, for slabs, files and its own connections take the others. A peer
    that is refused waits for a connection of its own; one that nobody accepts waits in vain."""
    return max(1, max_open_files() // 2)


def described_limit() -> str:
    """The limit of open files and how to raise it, for a log line or an error."""
    return f"{max_open_files():,} open files that this process may have: raise ulimit -n, in a systemd unit LimitNOFILE="


class SpareDescriptor:
    """One descriptor kept open, so that a peer can be accepted and told the cause when no other is left. Not thread-safe."""

    def __init__(self) -> None:
        self._fd = -1
        self._take()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Inside, one descriptor more is free than before; it is the spare one again afterwards, unless another thread has taken it."""
        self.close()
        try:
            yield
        finally:
            self._take()

    def close(self) -> None:
        """A second close is a no-op."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> None:
        with suppress(OSError):
            self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class RefusalLog:
    """Counts refusals by reason; `total` of all. Reasons are few: each is kept."""

    def __init__(self) -> None:
        self.total = 0
        self._untold: dict[str, int] = {}
        self._told_ns: dict[str, int] = {}

    def count(self, reason: str, now_ns: int) -> str:
        """Count one refusal. The line to log, or "" while the last one of this reason is younger than INTERVAL_NS."""
        self.total += 1
        untold = self._untold[reason] = self._untold.get(reason, 0) + 1
        told_ns = self._told_ns.get(reason)
        if told_ns is not None and now_ns - told_ns < INTERVAL_NS:
            return ""
        self._told_ns[reason], self._untold[reason] = now_ns, 0
        since = "" if told_ns is None else f", {untold} since {(now_ns - told_ns) // 1_000_000_000} s ago"
        return f"refusing connections{since}: {reason}"
