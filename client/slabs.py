"""Slabs of local nodes, mapped into this process ahead of their use, and kept."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvstore.protocol.errors import Broken, Closed, StaleHandle
from kvstore.transfer.memory.mapping import Slab, map_slab


class SlabKey(NamedTuple):
    """`epoch` tells one process of a node from the next: slab ids begin anew."""

    node_id: int
    epoch: int
    slab: int
    writable: bool


class SlabCache:
    """Mapped slabs by key, and those that a background thread is mapping. Thread-safe.

    Slabs stay until their node's process ends, or says that they are gone: they are the node's memory, not this process's. Views and
    copies under way keep the mapping that they use.
    """

    def __init__(self, *, asks: bool = True) -> None:
        """`asks`: for huge pages (setting `transparent_hugepages`)."""
        self._asks = asks
        self._slabs: dict[SlabKey, Slab] = {}
        self._coming: dict[SlabKey, Future[None]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def get(self, keys: Sequence[SlabKey]) -> list[Slab]:
        """Raises StaleHandle when one is not there: the node's process ended meanwhile. Raises Closed when the client was closed."""
        try:
            return [self._slabs[key] for key in keys]
        except KeyError as error:
            if self._is_closed:
                raise Closed("the client is closed") from None
            raise StaleHandle(f"{error.args[0]} is gone") from None

    def missing(self, keys: Sequence[SlabKey]) -> list[SlabKey]:
        """Which of `keys` are not mapped, each once."""
        missing = [key for key in keys if key not in self._slabs]
        return list(dict.fromkeys(missing)) if missing else missing

    def held(self, node_id: int, epoch: int) -> list[int]:
        """The slabs of a node's process that are mapped, those mapped first in front."""
        with self._lock:
            return list(dict.fromkeys(key.slab for key in self._slabs if key.node_id == node_id and key.epoch == epoch))

    def drop(self, node_id: int, epoch: int, slabs: Iterable[int]) -> None:
        """These are gone at their node."""
        with self._lock:
            for slab in slabs:
                for writable in (False, True):
                    self._slabs.pop(SlabKey(node_id, epoch, slab, writable), None)

    def coming(self, keys: Sequence[SlabKey]) -> "list[Future[None]]":
        """What to wait for before asking for `keys`."""
        with self._lock:
            return [self._coming[key] for key in keys if key in self._coming]

    def map_now(self, found: "list[tuple[SlabKey, int, int]]") -> None:
        """Map (key, descriptor, size), each taken from the list, and close every descriptor. Slabs of the node's earlier processes are
        dropped. Raises Broken."""
        try:
            for key, fd, size_bytes in _taken(found):
                self._add(key, map_slab(fd, size_bytes, writable=key.writable, asks=self._asks))
        finally:
            self.give_up(found)

    def announce(self, found: "Iterable[tuple[SlabKey, int, int]]") -> None:
        """`map_announced` will be called with the same list soon, in another thread; else `give_up` is."""
        with self._lock:
            for key, _, _ in found:
                self._coming.setdefault(key, Future())

    def map_announced(self, found: "list[tuple[SlabKey, int, int]]") -> None:
        """Map announced slabs, each taken from the list. One that cannot be mapped is left to whoever needs it."""
        try:
            for key, fd, size_bytes in _taken(found):
                try:
                    with contextlib.suppress(Broken):
                        self._add(key, map_slab(fd, size_bytes, writable=key.writable, asks=self._asks))
                finally:
                    self._end_wait(key)
        finally:
            self.give_up(found)

    def give_up(self, found: "list[tuple[SlabKey, int, int]]") -> None:
        """What nobody has taken from the list is not mapped: its descriptors are closed, and whoever waits for it goes on."""
        for key, fd, _ in _taken(found):
            os.close(fd)
            self._end_wait(key)

    def _end_wait(self, key: SlabKey) -> None:
        with self._lock:
            coming = self._coming.pop(key, None)  # two threads may have announced the same slab: there is one thing to wait for
        if coming is not None:
            coming.set_result(None)

    def _add(self, key: SlabKey, slab: Slab) -> None:
        with self._lock:
            for old in [old for old in self._slabs if old.node_id == key.node_id and old.epoch != key.epoch]:
                del self._slabs[old]
            self._slabs[key] = slab
            if key.writable:
                # One mapping serves both: a second one would fault the same pages in again, 60 ms a GiB.
                self._slabs[key._replace(writable=False)] = Slab(slab.memory.toreadonly())

    def close(self) -> None:
        """Forget every mapping; views of it keep theirs."""
        with self._lock:
            self._is_closed = True
            self._slabs.clear()

    def __len__(self) -> int:
        return len(self._slabs)


def _taken(found: "list[tuple[SlabKey, int, int]]") -> "Iterator[tuple[SlabKey, int, int]]":
    """What is left of the list, from its front: each is taken by one thread only."""
    with contextlib.suppress(IndexError):
        while True:
            yield found.pop(0)
