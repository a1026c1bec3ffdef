"""Sealed shared memory for local clients: indexes, reader slots, writer pages."""

import fcntl
import os
from collections.abc import Iterable

from kvstore.protocol.errors import Broken, TierFailed
from kvstore.protocol.settings import format_size
from kvstore.transfer.memory.mapped_memory import map_slab


def make_shared_memory(name: str, size_bytes: int, *, mode: int) -> tuple[int, memoryview]:
    """Return a descriptor, which the caller closes, and the memory, mapped read-write until its last view is released.

    The file appears in /proc as kvstore-`name`. `mode` 0o400 keeps other users from opening it for writing. Pages take
    memory once used. Raises TierFailed: the system has no descriptor or memory left.
    """
    try:
        fd = os.memfd_create(f"kvstore-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as refusal:
        raise TierFailed(f"no shared memory for a client's {name}: {refusal}") from refusal
    try:
        os.fchmod(fd, mode)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, map_slab(os.dup(fd), size_bytes, writable=True, populated=False).memory
    except (OSError, Broken) as refusal:
        os.close(fd)
        raise TierFailed(f"no shared memory of {format_size(size_bytes)} for a client's {name}: {refusal}") from refusal


def close_all(fds: Iterable[int]) -> None:
    """Close these descriptors."""
    for fd in fds:
        os.close(fd)
