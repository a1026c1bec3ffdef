"""The node's side of the page in which a writer of this host is offered its next slot: protocol/writer_page.py."""

import fcntl
import os
import threading
from collections.abc import Sequence

from kvstore.protocol.errors import Broken, TierFailed
from kvstore.protocol.writer_page import (
    AT_NUMBER,
    AT_OFFSET,
    AT_PAGE_MAGIC,
    AT_SIZE,
    AT_SLAB,
    AT_SLABS_AHEAD,
    AT_WRITING,
    PAGE_BYTES,
    PAGE_MAGIC,
    SLABS_AHEAD,
)
from kvstore.transfer.memory.mapping import map_slab


class WriterPage:
    """See the module. A client that writes nonsense there keeps one slot of its own tenant from being taken back.

    Belongs to a connection; its memory goes with the last of both mappings. The node's loop is the only caller.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        self._words[AT_PAGE_MAGIC] = PAGE_MAGIC
        self._fence = threading.Lock()

    def offer(self, number: int, slab: int, offset: int, size_bytes: int, slabs_ahead: Sequence[int] = ()) -> None:
        words = self._words
        for at, ahead in enumerate(slabs_ahead[:SLABS_AHEAD], AT_SLABS_AHEAD):
            words[at] = ahead + 1
        words[AT_SLAB], words[AT_OFFSET], words[AT_SIZE] = slab, offset, size_bytes
        with self._fence:  # whoever sees the number sees what it is of
            pass
        words[AT_NUMBER] = number

    def clear(self) -> None:
        self._words[AT_NUMBER] = 0

    def withdraw(self, number: int) -> bool:
        words = self._words
        words[AT_NUMBER] = 0
        with self._fence:  # a full barrier between this store and the load
            pass
        if words[AT_WRITING] != number:
            return True
        words[AT_NUMBER] = number
        return False


def make_page() -> tuple[WriterPage, int]:
    """A new page, and its descriptor for the client, which the caller closes. Raises TierFailed: the system has no descriptor or memory."""
    try:
        fd = os.memfd_create("kvstore-writer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as refusal:
        raise TierFailed(f"no shared memory for a writer's page: {refusal}") from refusal
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return WriterPage(map_slab(os.dup(fd), PAGE_BYTES, writable=True).memory), fd
    except (OSError, Broken) as refusal:
        os.close(fd)
        raise TierFailed(f"no shared memory of {PAGE_BYTES} bytes for a writer's page: {refusal}") from refusal
