"""Blocks in an engine's own memory, as the scheduler's keys, and the changes that the master has not acknowledged.

Each change has a version. One change is in flight at a time; the next is sent once the master has acknowledged the
last. If the master reports another version, it lost its state, and all blocks are sent again. Bookkeeping without I/O.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.client.instances.client import EngineCacheChange
from kvstore.engines.kv_events import events
from kvstore.engines.kv_events.events import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, Event, keys_of_stored
from kvstore.kvcache.naming import Naming

MAX_CHANGED_BLOCKS: Final = 65_536
"""Limit of one report, set by the master."""


class EngineBlocks:
    """Set of the engine's blocks and its unsent changes. Not thread-safe."""

    def __init__(self, naming: Naming, *, tenant: str) -> None:
        self._naming = naming
        self._tenant = tenant
        self._keys: dict[BlockHash, bytes] = {}
        self._version = 0
        """Version of the last change."""
        self._heard = 0
        """Version that the master acknowledged; 0: it has no blocks of this engine."""
        self._sent: EngineCacheChange | None = None
        """Change in flight."""
        self._news: dict[bytes, bool] = {}
        """Keys that were added (True) or removed since the last change."""

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, happened: Sequence[Event]) -> None:
        """Apply the engine's events."""
        for event in happened:
            match event:
                case BlocksStored(medium=events.GPU):
                    for name, key in keys_of_stored(event, self._naming, self._keys.get):
                        self._keys[name] = key
                        self._tell(key, is_there=True)
                case BlocksRemoved(medium=events.GPU):
                    for name in event.hashes:
                        if name in self._keys:
                            self._tell(self._keys.pop(name), is_there=False)
                case AllBlocksCleared():
                    self.clear()
                case _:  # of CPU memory or disk
                    pass

    def clear(self) -> None:
        """Drop all blocks: the engine's contents are unknown."""
        self._keys.clear()
        self._begin_again()

    def change(self) -> EngineCacheChange | None:
        """Return the change to send: the same one until `heard`. None: the master is up to date."""
        if self._sent is None and (self._news or not self._heard):
            news = deque(self._news.items())
            part = [news.popleft() for _ in range(min(len(news), MAX_CHANGED_BLOCKS))]
            self._news = dict(news)
            self._version += 1
            self._sent = EngineCacheChange(
                tenant=self._tenant,
                base_version=self._heard,
                version=self._version,
                added=[key for key, is_there in part if is_there],
                removed=[key for key, is_there in part if not is_there],
            )
        return self._sent

    def heard(self, version: int) -> None:
        """The master acknowledged a report and has this version."""
        if self._sent is not None and version == self._sent.version:
            self._heard, self._sent = version, None
        elif version != self._heard or self._sent is not None:
            self._begin_again()

    def _begin_again(self) -> None:
        """Send all blocks again, to a master with an empty cache."""
        self._heard, self._sent = 0, None
        self._news = dict.fromkeys(self._keys.values(), True)

    def _tell(self, key: bytes, *, is_there: bool) -> None:
        """Record the latest state of a key, at the end of the queue: changes are sent in order."""
        self._news.pop(key, None)
        self._news[key] = is_there
