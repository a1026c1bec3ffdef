"""Which versions of a key a get may return: the checker of the tests that kill processes under load.

A version is current from the start of its put until the end of the removal that it was there for. A get may return any version that was
current at some moment between its own start and end, or miss. Values are made of key *and* version, so that a stale one shows.

Source: CacheLib's ValueHistory (a hit must be a version that could have been current, a miss is always legal).
"""

import random
from dataclasses import dataclass

VERSION_BYTES = 8


def value_of(key: bytes, version: int, size: int) -> bytes:
    """`size` bytes that no other key, version or size shares."""
    return version.to_bytes(VERSION_BYTES, "big") + random.Random(b"%b %d %d" % (key, version, size)).randbytes(size - VERSION_BYTES)


def version_of(key: bytes, value: bytes) -> int:
    """Which version this is. Raises AssertionError for bytes that were never one of this key's."""
    version = int.from_bytes(value[:VERSION_BYTES], "big")
    assert value == value_of(key, version, len(value)), f"{key!r}: bytes that nobody put ({len(value)}, version {version}?)"
    return version


@dataclass(slots=True)
class _Life:
    """When a version could be read: from `since` on, until `over` (None: it still can)."""

    since: int
    over: int | None = None


class History:
    """One writer's operations in the order it does them; any number of readers. Times are ticks of `now`. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0
        self._lives: dict[bytes, dict[int, _Life]] = {}

    def now(self) -> int:
        """A moment after all that was recorded so far."""
        self._now += 1
        return self._now

    def begin_put(self, key: bytes) -> int:
        """The version to put. From now on it may be seen, whether or not the put succeeds."""
        lives = self._lives.setdefault(key, {})
        version = len(lives) + 1
        lives[version] = _Life(self.now())
        return version

    def not_stored(self, key: bytes, version: int) -> None:
        """The put was answered: another version is there. This one can never be seen."""
        del self._lives[key][version]
        self._lives[key][version] = _Life(0, 0)

    def removed(self, key: bytes) -> None:
        """A removal was acknowledged: none of the versions so far is current any more."""
        end = self.now()
        for life in self._lives.get(key, {}).values():
            life.over = end if life.over is None else life.over

    def check(self, key: bytes, version: int, started: int) -> None:
        """A get that began at `started` and ends now returned `version`. Raises AssertionError if it could not."""
        life = self._lives.get(key, {}).get(version)
        assert life is not None, f"{key!r}: version {version} was never put"
        assert life.over is None or life.over > started, f"{key!r}: version {version} was over at {life.over}, the get began at {started}"
