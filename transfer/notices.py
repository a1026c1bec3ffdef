"""Notifications of peers that this process's user has not taken yet: so many, and so many bytes of them, and no more.

A process whose user takes none, as a node's, would otherwise hold whatever peers send it, 64 KiB a message.
"""

import threading
from typing import Final

from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.protocol.transfers import MAX_NOTICE_BYTES

MAX_NOTICES: Final = 65_536
MAX_NOTICES_BYTES: Final = 16 << 20
"""Names of their senders included: 256 of the longest, or all 65,536 of 200 bytes."""


class Notices:
    """Thread-safe. `name` is the agent's that keeps them, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._kept: list[tuple[str, bytes]] = []
        self._bytes = 0

    def put(self, sender: str, message: bytes) -> None:
        """Keep one. Raises InvalidArgument: it is too long; Full: nobody takes those that are kept."""
        if len(message) > MAX_NOTICE_BYTES:
            raise InvalidArgument(f"a notification is at most {MAX_NOTICE_BYTES} bytes long")
        size_bytes = len(message) + len(sender)
        with self._lock:
            if len(self._kept) >= MAX_NOTICES or self._bytes + size_bytes > MAX_NOTICES_BYTES:
                raise Full(f"{self._name} has {len(self._kept)} notifications that nobody took")
            self._kept.append((sender, message))
            self._bytes += size_bytes

    def take(self) -> list[tuple[str, bytes]]:
        """(name of the agent, message) of what has come since the last call, in its order."""
        with self._lock:
            taken, self._kept, self._bytes = self._kept, [], 0
        return taken
