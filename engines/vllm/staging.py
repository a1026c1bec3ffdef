"""Memory between an engine's pools and the store: chunks, made when they are first needed and kept.

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
        """As many as `max_bytes` hold, one at least, of CHUNK_BYTES, or of `value_bytes`, the largest value, if that is more."""
        self._chunk_bytes = max(CHUNK_BYTES, value_bytes)
        self._left = max(1, max_bytes // self._chunk_bytes)
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def values(self, value_bytes: int) -> int:
        """How many values of so many bytes a chunk has room for."""
        return self._chunk_bytes // value_bytes

    def take(self) -> torch.Tensor | None:
        """A chunk, uint8 of undefined content; None while all are in use. Its taker gives it back. Raises what torch does where there is no
        memory; the chunk may be tried for again."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._left:
                return None
            self._left -= 1
        try:
            return torch.empty(self._chunk_bytes, dtype=torch.uint8)
        except BaseException:
            with self._lock:
                self._left += 1
            raise

    def give_back(self, chunk: torch.Tensor) -> None:
        with self._lock:
            self._free.append(chunk)


def rows(chunk: torch.Tensor, count: int, value_bytes: int) -> torch.Tensor:
    """The first bytes of a chunk as `[count, value_bytes]`."""
    return chunk[: count * value_bytes].view(count, value_bytes)
