"""Keys of the rows: keys of one length share a buffer, and a row has the length and position of its own.

An engine's key of 16 bytes takes 21 bytes this way; a bytes object takes 64 and a pointer to it 8."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

NO_ROW: Final = 0
"""Row 0 is no block's: queries use it for missing keys, and its holder set is never live."""
Bools = npt.NDArray[np.bool_]
RowNumbers = npt.NDArray[np.uint32]


class _KeysOfLength:
    """Keys of one length. Slots of removed keys are reused."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.data = bytearray()
        self.free = array("I")

    def add(self, key: bytes) -> int:
        if self.free:
            slot = self.free.pop()
            self.data[slot * self.length : (slot + 1) * self.length] = key
        else:
            slot = len(self.data) // self.length
            self.data += key
        return slot

    def add_all(self, keys: Sequence[bytes]) -> RowNumbers:
        """As `add`, for each; return the slots."""
        reused = min(len(self.free), len(keys))
        begin = len(self.data) // self.length
        slots = np.arange(begin - reused, begin - reused + len(keys), dtype=np.uint32)
        self.data += b"".join(keys[reused:])
        if reused:
            slots[:reused] = np.array(self.free[-reused:], np.uint32)[::-1]
            del self.free[-reused:]
            bytes_of = np.frombuffer(self.data, np.uint8).reshape(-1, self.length)
            bytes_of[slots[:reused]] = np.frombuffer(b"".join(keys[:reused]), np.uint8).reshape(-1, self.length)
        return slots


class RowKeys:
    """Keys by row; b"" for a row without one. Row 0 never has one. Not thread-safe."""

    def __init__(self) -> None:
        self._lengths, self._slots = array("B", (0,)), array("I", (0,))
        self._alike: dict[int, _KeysOfLength] = {}

    def __len__(self) -> int:
        """Upper bound of all row numbers."""
        return len(self._lengths)

    def __getitem__(self, row: int) -> bytes:
        length = self._lengths[row]
        begin = self._slots[row] * length
        return bytes(self._alike[length].data[begin : begin + length]) if length else b""

    def append(self, key: bytes) -> int:
        """Append a row with this key; return its number."""
        row = len(self)
        self._lengths.append(0)
        self._slots.append(0)
        self.set(row, key)
        return row

    def extend(self, keys: Sequence[bytes]) -> None:
        """As `append`, for each."""
        lengths = bytes(map(len, keys))
        if lengths.count(lengths[:1]) < len(keys):
            for key in keys:
                self.append(key)
        elif keys:
            alike = self._of(lengths[0])
            first = len(alike.data) // alike.length
            alike.data += b"".join(keys)
            self._lengths.frombytes(lengths)
            self._slots.extend(range(first, first + len(keys)))

    def set(self, row: int, key: bytes) -> None:
        """Set the key of a row without one."""
        self._slots[row] = self._of(len(key)).add(key)
        self._lengths[row] = len(key)

    def set_all(self, rows: RowNumbers, keys: Sequence[bytes]) -> None:
        """As `set`, for each of at least one."""
        length = len(keys[0])
        if list(map(len, keys)).count(length) < len(keys):
            for row, key in zip(rows.tolist(), keys, strict=True):
                self.set(row, key)
            return
        np.frombuffer(self._slots, np.uint32)[rows] = self._of(length).add_all(keys)
        np.frombuffer(self._lengths, np.uint8)[rows] = length

    def clear(self, row: int) -> None:
        """Remove the key of a row that has one."""
        self._alike[self._lengths[row]].free.append(self._slots[row])
        self._lengths[row] = 0

    def clear_all(self, rows: RowNumbers) -> None:
        """As `clear`, of different rows, at least one."""
        of_rows = np.frombuffer(self._lengths, np.uint8)[rows]
        slots = np.frombuffer(self._slots, np.uint32)[rows]
        for length in np.unique(of_rows).tolist():
            self._alike[length].free.frombytes(slots[of_rows == length].tobytes())
        np.frombuffer(self._lengths, np.uint8)[rows] = 0

    def are(self, rows: RowNumbers, keys: "npt.NDArray[np.bytes_]", length: int) -> Bools:
        """Return, for each row, which must have a key, True if it equals the one at the same position of `keys`, all
        of `length` bytes."""
        alike = self._alike.get(length)
        if alike is None:
            return np.zeros(len(rows), np.bool_)
        slots = np.frombuffer(self._slots, np.uint32)[rows]
        if len(self._alike) == 1:
            return self._equal(alike, slots, keys)
        is_alike: Bools = np.frombuffer(self._lengths, np.uint8)[rows] == length
        return self._equal(alike, slots * is_alike, keys) & is_alike

    def check_integrity(self, with_keys: Iterable[int]) -> None:
        """Assert that exactly these rows have keys, and each slot is one row's or free. For tests; O(rows)."""
        named = set(with_keys)
        assert named == {row for row, length in enumerate(self._lengths) if length}
        for length, alike in self._alike.items():
            slots = [self._slots[row] for row in named if self._lengths[row] == length]
            assert sorted([*slots, *alike.free]) == list(range(len(alike.data) // length)), length

    def _of(self, length: int) -> _KeysOfLength:
        return self._alike.get(length) or self._alike.setdefault(length, _KeysOfLength(length))

    def _equal(self, alike: _KeysOfLength, slots: RowNumbers, keys: "npt.NDArray[np.bytes_]") -> Bools:
        words, rest = divmod(alike.length, 8)
        if rest:
            # numpy strips trailing zeros before it compares; for strings of one length the result is the same.
            same: Bools = np.frombuffer(alike.data, keys.dtype)[slots] == keys
            return same
        # Takes a third of the time; engines' hashes have such lengths.
        is_same = np.frombuffer(alike.data, np.uint64).reshape(-1, words).take(slots, axis=0) == keys.view(np.uint64).reshape(-1, words)
        same = is_same[:, 0]
        for word in range(1, words):
            same &= is_same[:, word]
        return same
