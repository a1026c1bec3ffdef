"""Numbers by which the connections of one UCX worker tell their messages apart."""

import threading
from typing import Final

MAX_CONNECTION_ID: Final = (1 << 28) - 1


class ConnectionIds:
    """Numbers from 1 to `max_id`, each one connection's at a time. Thread-safe."""

    def __init__(self, max_id: int = MAX_CONNECTION_ID) -> None:
        self._max_id = max_id
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._last_id = 0

    def take(self) -> int:
        """One that no connection has, and that was given up as long ago as possible."""
        with self._lock:
            while True:
                self._last_id = self._last_id % self._max_id + 1
                if self._last_id not in self._taken:
                    self._taken.add(self._last_id)
                    return self._last_id

    def give_back(self, connection_id: int) -> None:
        """A second time is a no-op."""
        with self._lock:
            self._taken.discard(connection_id)
