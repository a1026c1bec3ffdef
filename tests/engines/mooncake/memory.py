"""Memory with an address."""

from typing import Any

import numpy as np


class Room:
    """`size` bytes of this process, of one value."""

    def __init__(self, size: int, fill: int = 0) -> None:
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.full(size, fill, np.uint8)
        self.at = int(self.array.ctypes.data)

    @classmethod
    def of(cls, value: bytes) -> "Room":
        room = cls(len(value))
        room.array[:] = np.frombuffer(value, np.uint8)
        return room

    def bytes(self) -> bytes:
        return self.array.tobytes()
