"""File descriptors of this process: the limit, connections that fit, and a spare one to refuse a peer with a reason."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

INTERVAL_NS: Final = 60_000_000_000
"""Shortest time between two log lines of one reason: refused clients retry many times a second."""


def allow_many_descriptors() -> None:
    """Raise this process's limit of open files to the hard limit: a connection takes one, a slab of DRAM two."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_open_files() -> int:
    """Return the limit of open files of this process."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def max_accepted() -> int:
    """Return how many connections this process accepts: half of its descriptors.

    The other half is for slabs, files and outgoing connections. Refusing a peer is better than leaving it in the
    backlog.
    """
    return max(1, max_open_files() // 2)


def open_files_limit() -> str:
    """Return the limit of open files and how to raise it, for a log line or an error."""
    return f"{max_open_files():,} open files that this process may have: raise ulimit -n, in a systemd unit LimitNOFILE="


class SpareDescriptor:
    """A descriptor in reserve, for accepting a peer and sending it the reason of its refusal. Not thread-safe."""

    def __init__(self) -> None:
        self._fd = -1
        self._take()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Free the descriptor inside the block, and reserve one again afterwards, unless another thread has taken it."""
        self.close()
        try:
            yield
        finally:
            self._take()

    def close(self) -> None:
        """Free the descriptor. A second close is a no-op."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> None:
        with suppress(OSError):
            self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class RefusalLog:
    """Rate-limited log of refused connections, by reason. Reasons are few; each is kept."""

    def __init__(self) -> None:
        self.total = 0
        self._unlogged: dict[str, int] = {}
        self._logged_ns: dict[str, int] = {}

    def count(self, reason: str, now_ns: int) -> str:
        """Count one refusal. Return the line to log, or "" within INTERVAL_NS of the previous line of this reason."""
        self.total += 1
        count = self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
        logged_ns = self._logged_ns.get(reason)
        if logged_ns is not None and now_ns - logged_ns < INTERVAL_NS:
            return ""
        self._logged_ns[reason], self._unlogged[reason] = now_ns, 0
        since = "" if logged_ns is None else f", {count} since {(now_ns - logged_ns) // 1_000_000_000} s ago"
        return f"refusing connections{since}: {reason}"
