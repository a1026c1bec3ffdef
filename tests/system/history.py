"""History of the versions that a get of a key may return: the checker of the tests that kill processes under load.

A version is current from the start of its put until the end of the call that ended it: its removal, or the put of a later version that
was stored. A get may return any version that was current between its own start and end, or miss. Values are made of key *and* version,
so that a stale one shows.

Source: CacheLib's ValueHistory (a hit must be a version that could have been current, a miss is always legal).
"""

import hashlib
from dataclasses import dataclass

import numpy as np

VERSION_BYTES = 8


def value_of(key: bytes, version: int, size: int) -> bytes:
    """`size` bytes that no other key, version or size shares."""
    seed = int.from_bytes(hashlib.blake2b(b"%b %d %d" % (key, version, size), digest_size=16).digest())
    words = np.random.SFC64(seed).random_raw(-(-size // 8))
    return version.to_bytes(VERSION_BYTES, "big") + words.tobytes()[: size - VERSION_BYTES]


def version_of(key: bytes, value: bytes) -> int:
    """Return the version of a value. Raises AssertionError for bytes that were never a value of this key."""
    version = int.from_bytes(value[:VERSION_BYTES], "big")
    assert value == value_of(key, version, len(value)), f"{key!r}: bytes that nobody put ({len(value)}, version {version}?)"
    return version


@dataclass(slots=True)
class _Life:
    """Interval in which a version can be read: from the start of its put until `over` (None: it still can).

    A failed put may take effect at any later time (`is_open_ended`)."""

    over: int | None = None
    is_open_ended: bool = False


class History:
    """Operations of the writers of some keys in the order of the calls, one at a time for each key. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0
        self._lives: dict[bytes, list[_Life]] = {}

    def now(self) -> int:
        """A moment after all that was recorded so far."""
        self._now += 1
        return self._now

    def begin_put(self, key: bytes) -> int:
        """The version to put, from 0 on. From now on it may be seen, whether or not the put is acknowledged."""
        lives = self._lives.setdefault(key, [])
        lives.append(_Life())
        return len(lives) - 1

    def stored(self, key: bytes, version: int) -> None:
        """The put was acknowledged as the one that is there: none before it is."""
        self._end(self._lives[key][:version])

    def failed(self, key: bytes, version: int) -> None:
        """The put ended with an error that says nothing of its effect."""
        self._lives[key][version].is_open_ended = True

    def removed(self, key: bytes) -> None:
        """A removal was acknowledged: none of the versions so far is there."""
        self._end(self._lives.get(key, []))

    def check(self, key: bytes, value: bytes, started: int) -> None:
        """A get that began at `started` and ends now returned `value`. Raises AssertionError if it could not."""
        version = version_of(key, value)
        lives = self._lives.get(key, [])
        assert version < len(lives), f"{key!r}: version {version} was never put"
        over = lives[version].over
        assert over is None or over > started, f"{key!r}: version {version} was over at {over}, the get began at {started}"

    def _end(self, lives: list[_Life]) -> None:
        end = self.now()
        for life in lives:
            if life.over is None and not life.is_open_ended:
                life.over = end
