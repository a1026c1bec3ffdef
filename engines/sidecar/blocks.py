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
from kvstore.kvcache.key_names import Naming

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
        self._acknowledged_version = 0
        """Version that the master acknowledged; 0: it has no blocks of this engine."""
        self._sent: EngineCacheChange | None = None
        """Change in flight."""
        self._pending: dict[bytes, bool] = {}
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
                        self._record(key, is_there=True)
                case BlocksRemoved(medium=events.GPU):
                    for name in event.hashes:
                        if name in self._keys:
                            self._record(self._keys.pop(name), is_there=False)
                case AllBlocksCleared():
                    self.clear()
                case _:  # of CPU memory or disk
                    pass

    def clear(self) -> None:
        """Drop all blocks: the engine's contents are unknown."""
        self._keys.clear()
        self._resend_all()

    def change(self) -> EngineCacheChange | None:
        """Return the change to send: the same one until `acknowledged`. None: the master is up to date."""
        if self._sent is None and (self._pending or not self._acknowledged_version):
            pending = deque(self._pending.items())
            part = [pending.popleft() for _ in range(min(len(pending), MAX_CHANGED_BLOCKS))]
            self._pending = dict(pending)
            self._version += 1
            self._sent = EngineCacheChange(
                tenant=self._tenant,
                base_version=self._acknowledged_version,
                version=self._version,
                added=[key for key, is_there in part if is_there],
                removed=[key for key, is_there in part if not is_there],
            )
        return self._sent

    def acknowledged(self, version: int) -> None:
        """The master acknowledged a report and has this version."""
        if self._sent is not None and version == self._sent.version:
            self._acknowledged_version, self._sent = version, None
        elif version != self._acknowledged_version or self._sent is not None:
            self._resend_all()

    def _resend_all(self) -> None:
        """Send all blocks again, to a master with an empty cache."""
        self._acknowledged_version, self._sent = 0, None
        self._pending = dict.fromkeys(self._keys.values(), True)

    def _record(self, key: bytes, *, is_there: bool) -> None:
        """Record the latest state of a key, at the end of the queue: changes are sent in order."""
        self._pending.pop(key, None)
        self._pending[key] = is_there
