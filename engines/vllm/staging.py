"""Memory between an engine's pools and the store: chunks of rows, made when they are first needed and kept.

Memory that is touched for the first time is many times slower than a copy: 120 MiB of it took 300 ms.
"""

import threading
from typing import Final

import torch

CHUNK_BYTES: Final = 16 << 20
"""About what one request to the store moves: large enough that its round trip does not count."""


class Staging:
    """So many chunks at the most. Threads may use it at once."""

    def __init__(self, value_bytes: int, max_bytes: int) -> None:
        """Chunks of as many values of `value_bytes` as CHUNK_BYTES hold, one at least; as many chunks as `max_bytes` hold, one at least."""
        self.chunk_values = max(1, CHUNK_BYTES // value_bytes)
        self._shape = (self.chunk_values, value_bytes)
        self._left = max(1, max_bytes // (self.chunk_values * value_bytes))
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor | None:
        """A chunk, uint8 `[chunk_values, value_bytes]` of undefined content; None while all are in use. Its taker gives it back."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._left:
                return None
            self._left -= 1
        return torch.empty(self._shape, dtype=torch.uint8)

    def give_back(self, chunk: torch.Tensor) -> None:
        with self._lock:
            self._free.append(chunk)
