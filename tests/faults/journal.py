"""Journals of the clients' operations, one file a client, which survive every kind of death. judging.py checks them.

A record is 32 bytes, written by one system call as the operation ends; a put has one before it begins, too, for it may take effect though
its writer dies. Times are those of the machine's monotonic clock, which all processes share.
"""

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

_RECORD: Final = struct.Struct("<BBBxIQQQ")
_COLUMNS: Final = {"act": ("u1", 0), "outcome": ("u1", 1), "ack": ("u1", 2), "version": ("<u4", 4), "key": ("<u8", 8)} | {
    "began_ns": ("<u8", 16),
    "ended_ns": ("<u8", 24),
}
DTYPE: Final = np.dtype(
    {
        "names": list(_COLUMNS),
        "formats": [form for form, _ in _COLUMNS.values()],
        "offsets": [offset for _, offset in _COLUMNS.values()],
        "itemsize": _RECORD.size,
    }
)
"""A journal's records as columns."""
ACKS: Final = ("node", "cluster", "replicas")
"""In `ack` by number."""


class Act(IntEnum):
    PUT = 1
    REMOVE = 2
    GET = 3
    LOCATE = 4
    """`version` has a bit for each node that held the block."""
    OTHER = 5
    """Of which only time and outcome are judged."""


class Outcome(IntEnum):
    BEGUN = 0
    """`ended_ns` is 0."""
    DONE = 1
    ABSENT = 2
    """A get: a miss. A removal: there was nothing. A put: another version is there."""
    FAILED = 3
    """With an error that the world is to blame for: it may have had its effect."""
    UNEXPECTED = 4
    """With another error."""
    WRONG = 5
    """Bytes that no writer put under this key."""


class BlockName(NamedTuple):
    """Key of a block: its writer, the life (process) of that writer, and a number. No other writer writes it."""

    writer: int
    life: int
    number: int

    @property
    def key(self) -> bytes:
        return b"%d/%d/%d" % self

    def packed(self) -> int:
        return self.writer << 48 | self.life << 32 | self.number

    @classmethod
    def unpacked(cls, packed: int) -> "BlockName":
        return cls(packed >> 48, packed >> 32 & 0xFFFF, packed & 0xFFFFFFFF)


class Journal:
    """To write one. Records of several threads do not mix."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, act: Act, outcome: Outcome, block: int, began_ns: int, ended_ns: int, *, version: int = 0, ack: int = 0) -> None:
        """`block` is packed."""
        os.write(self._fd, _RECORD.pack(act, outcome, ack, version, block, began_ns, ended_ns))

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    """All records, in the order in which they were written. One that its writer was killed in is left out."""
    content = path.read_bytes()
    return np.frombuffer(content[: len(content) - len(content) % _RECORD.size], DTYPE)


class Board:
    """Progress of each writer, so that others can read its newest blocks: a file that all of them map."""

    def __init__(self, path: Path, writers: int) -> None:
        with path.open("a+b") as file:
            file.truncate(writers * 16)
            self._map = mmap.mmap(file.fileno(), writers * 16)
        self._words = memoryview(self._map).cast("Q")

    def tell(self, writer: int, life: int, count: int) -> None:
        """It has put `count` blocks in this life."""
        self._words[2 * writer + 1] = 0
        self._words[2 * writer] = life
        self._words[2 * writer + 1] = count

    def told(self, writer: int) -> tuple[int, int]:
        """Its life and count."""
        return self._words[2 * writer], self._words[2 * writer + 1]
