"""Blocks in an engine's own memory, as keys that the scheduler knows, and the changes that the master does not have yet. Pure bookkeeping.

What the master has is a version. Changes go out one at a time: the next one once the answer to the last has said that it is there. An
answer with another version means that the master knows nothing: all goes out again.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.client.instances.client import EngineCacheChange
from kvstore.engines.kv_events import events
from kvstore.engines.kv_events.events import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, Event, keys_of_stored
from kvstore.kvcache.naming import Naming

MAX_CHANGED_BLOCKS: Final = 65_536
"""In one report; the master takes no more."""


class EngineBlocks:
    """Not thread-safe."""

    def __init__(self, naming: Naming, *, tenant: str) -> None:
        self._naming = naming
        self._tenant = tenant
        self._keys: dict[BlockHash, bytes] = {}
        self._version = 0
        """The last one given out."""
        self._heard = 0
        """The last one that the master has said it has; 0: it has nothing of this."""
        self._sent: EngineCacheChange | None = None
        """Under way, until an answer says what became of it."""
        self._news: dict[bytes, bool] = {}
        """Keys to be added (True) or removed, since the last change."""

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, happened: Sequence[Event]) -> None:
        """What the engine says has happened."""
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
                case _:  # of a lower medium
                    pass

    def clear(self) -> None:
        """Nothing is there, as far as is known."""
        self._keys.clear()
        self._begin_again()

    def change(self) -> EngineCacheChange | None:
        """What to tell the master now: the same again until `heard`; None: it knows all."""
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
        """The master has answered a report, and has this version."""
        if self._sent is not None and version == self._sent.version:
            self._heard, self._sent = version, None
        elif version != self._heard or self._sent is not None:
            self._begin_again()

    def _begin_again(self) -> None:
        """The master is to have an empty cache first, and then all that is here."""
        self._heard, self._sent = 0, None
        self._news = dict.fromkeys(self._keys.values(), True)

    def _tell(self, key: bytes, *, is_there: bool) -> None:
        """The last word counts, and goes to the end: what came first is told first."""
        self._news.pop(key, None)
        self._news[key] = is_there
