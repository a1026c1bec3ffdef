"""Slabs of nodes on this host that a client has mapped: the cache of mappings, and how those that are missing are asked for, each once.
Sans-I/O: see effects.py."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvstore.client.core.effects import AnyChannel, Operation, RequestFdsEffect, RunInThreadEffect, SpawnEffect
from kvstore.protocol.errors import Broken, Closed, StaleHandle
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.node_messages import MapSlabs
from kvstore.rpc.client.blocking_socket import MAX_FDS
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.mapping import MappedSlab, map_slab


class SlabKey(NamedTuple):
    """`epoch` tells one process of a node from the next: slab ids begin anew."""

    node_id: int
    epoch: int
    slab: int
    writable: bool


Found = tuple[SlabKey, int, int]
"""A slab that the node still has: its descriptor, which whoever takes it closes, and its size in bytes."""


class SlabCache:
    """Mapped slabs by key, and those that a background thread maps ahead of their use. Thread-safe.

    Slabs stay until their node's process ends, or says that they are gone: they are the node's memory, not this process's. Views and
    copies under way keep the mapping that they use.
    """

    def __init__(self) -> None:
        self._slabs: dict[SlabKey, MappedSlab] = {}
        self._ahead: list[Found] = []
        """Announced, and not begun: in the order of their use."""
        self._has_mapper = False
        """A thread maps what is announced, one slab after another: there is one at a time, however many calls announce some."""
        self._coming: dict[SlabKey, threading.Event] = {}
        """Of slabs that were announced, until they are mapped or given up."""
        self._dropped: list[MappedSlab] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def get(self, keys: Sequence[SlabKey]) -> list[MappedSlab]:
        """Raises StaleHandle when one is not there: the node's process ended meanwhile. Raises Closed when the client was closed."""
        try:
            return [self._slabs[key] for key in keys]
        except KeyError as error:
            if self._is_closed:
                raise Closed("the client is closed") from None
            raise StaleHandle(f"{error.args[0]} is gone") from None

    def found(self, key: SlabKey) -> MappedSlab | None:
        """The slab, if it is mapped."""
        return self._slabs.get(key)

    def missing(self, keys: Sequence[SlabKey]) -> list[SlabKey]:
        """Which of `keys` are not mapped, each once."""
        missing = [key for key in keys if key not in self._slabs]
        return list(dict.fromkeys(missing)) if missing else missing

    def absent(self, keys: Sequence[SlabKey]) -> list[SlabKey]:
        """Which of `keys` are neither mapped nor announced."""
        with self._lock:
            return [key for key in dict.fromkeys(keys) if key not in self._slabs and key not in self._coming]

    def held(self, node_id: int, epoch: int) -> list[int]:
        """The slabs of a node's process that are mapped, those mapped first in front."""
        with self._lock:
            return list(dict.fromkeys(key.slab for key in self._slabs if key.node_id == node_id and key.epoch == epoch))

    def drop(self, node_id: int, epoch: int, slabs: Iterable[int]) -> None:
        """These are gone at their node. `unmap_dropped` ends their mappings."""
        with self._lock:
            for slab in slabs:
                found = [self._slabs.pop(SlabKey(node_id, epoch, slab, writable), None) for writable in (False, True)]
                self._dropped += [each for each in found if each is not None]

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def unmap_dropped(self) -> None:
        """End the mappings of dropped slabs that nobody uses: 50 ms a GiB."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        del dropped

    def coming(self, keys: Sequence[SlabKey]) -> list[threading.Event]:
        """Wait for these before you ask for `keys`."""
        with self._lock:
            return [self._coming[key] for key in keys if key in self._coming]

    def map_now(self, found: list[Found]) -> None:
        """Map slabs, each taken from `found`, and close every descriptor. Slabs of the node's earlier processes are dropped. Raises
        Broken."""
        try:
            for taken in _taken(found):
                self._map(taken)
        finally:
            self.give_up(found)

    def announce(self, found: Iterable[Found]) -> bool:
        """Have these mapped by `map_announced`. True: no thread is at it, and the caller begins one, or calls `give_up_announced`."""
        with self._lock:
            for one in found:
                self._coming.setdefault(one[0], threading.Event())
                self._ahead.append(one)
            has_mapper, self._has_mapper = self._has_mapper, True
        return not has_mapper

    def map_announced(self) -> None:
        """Map announced slabs until none is left, those announced meanwhile too. One that cannot be mapped is left to whoever needs it."""
        try:
            while (taken := self._next_announced()) is not None:
                with contextlib.suppress(Broken):
                    self._map(taken)
            self.unmap_dropped()
        except BaseException:
            self.give_up_announced()
            raise

    def take_announced(self, keys: Sequence[SlabKey]) -> list[Found]:
        """Those of `keys` that were announced and that no thread has begun: the caller maps them now, or gives them up."""
        with self._lock:
            taken = [one for one in self._ahead if one[0] in keys]
            for one in taken:
                self._ahead.remove(one)
        return taken

    def give_up(self, found: list[Found]) -> None:
        """Map no more of these: their descriptors are closed, and whoever waits for one goes on."""
        for key, fd, _ in _taken(found):
            os.close(fd)
            self._end_wait(key)

    def give_up_announced(self) -> None:
        """No thread is there for what is announced."""
        with self._lock:
            self._has_mapper = False
        self.give_up(self._ahead)

    def _next_announced(self) -> Found | None:
        """None: there is nothing left, and from now on the next one to announce something begins a thread."""
        with self._lock:
            if not self._ahead:
                self._has_mapper = False
                return None
            return self._ahead.pop(0)

    def _map(self, found: Found) -> None:
        key, fd, size_bytes = found
        try:
            self._add(key, map_slab(fd, size_bytes, writable=key.writable, transparent_hugepages=True))
        finally:
            self._end_wait(key)

    def _end_wait(self, key: SlabKey) -> None:
        with self._lock:
            coming = self._coming.pop(key, None)  # two threads may have announced the same slab: there is one thing to wait for
        if coming is not None:
            coming.set()

    def _add(self, key: SlabKey, slab: MappedSlab) -> None:
        with self._lock:
            for old in [old for old in self._slabs if old.node_id == key.node_id and old.epoch != key.epoch]:
                del self._slabs[old]
            self._slabs[key] = slab
            if key.writable:
                # One mapping serves both: a second one would fault the same pages in again, 60 ms a GiB.
                self._slabs[key._replace(writable=False)] = MappedSlab(slab.memory.toreadonly())

    def close(self) -> None:
        """Forget every mapping; views of it keep theirs. Nothing more is mapped ahead."""
        with self._lock:
            self._is_closed = True
            self._slabs.clear()
        self.give_up(self._ahead)

    def __len__(self) -> int:
        return len(self._slabs)


def _taken(found: list[Found]) -> Iterator[Found]:
    """Take each from the front: of two threads one gets it."""
    with contextlib.suppress(IndexError):
        while True:
            yield found.pop(0)


MAPPING_WORK_BYTES: Final = 1 << 30
"""Mapping a slab faults all of its pages in: never on an event loop."""


class SlabMapping:
    """The slabs that a client has mapped, and how it comes to more. Its threads and tasks share it."""

    def __init__(self) -> None:
        self.slabs = SlabCache()

    def map_slabs(
        self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline, *, writable: bool
    ) -> Operation[list[MappedSlab]]:
        """Have these slabs mapped: they, in order. Raises StaleHandle for one that is gone, Broken for one that cannot be mapped,
        Closed where the client was closed meanwhile."""
        keys = [SlabKey(node_id, channel.welcome.epoch, slab, writable) for slab in slabs]
        missing = self.slabs.missing(keys)
        if not missing:
            return self.slabs.get(keys)
        if announced := self.slabs.take_announced(missing):  # a slab at a time is mapped ahead: the others are mapped here beside it
            yield from self._map(announced)
            missing = self.slabs.missing(missing)
        if coming := self.slabs.coming(missing):
            yield RunInThreadEffect(partial(_wait_for, coming, deadline), MAPPING_WORK_BYTES)
            missing = self.slabs.missing(missing)
        for start in range(0, len(missing), MAX_FDS):
            wanted = missing[start : start + MAX_FDS]
            found = yield from self._ask_for_slabs(channel, wanted, deadline)
            count = len(found)
            yield from self._map(found)
            yield from self._unmap_dropped()
            if count < len(wanted):
                raise StaleHandle(f"node {node_id} named a slab that it does not have")
        return self.slabs.get(keys)

    def let_go(self, channel: AnyChannel, node_id: int, deadline: Deadline) -> Operation[None]:
        """Unmap the slabs that the node has given up."""
        epoch = channel.welcome.epoch
        held = self.slabs.held(node_id, epoch)[:MAX_BATCH]
        if held:
            answer, _ = yield RequestFdsEffect(channel, MapSlabs([], 0, held), deadline)
            self.slabs.drop(node_id, epoch, answer.freed)
            yield from self._unmap_dropped()

    def map_ahead(self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline) -> Operation[None]:
        """Have slabs that later puts will use mapped in the background, if the system has a thread for that, and those unmapped there
        that the node has given up."""
        keys = self.slabs.absent([SlabKey(node_id, channel.welcome.epoch, slab, True) for slab in slabs])[:MAX_FDS]
        if not keys:
            return
        if not self.slabs.announce((yield from self._ask_for_slabs(channel, keys, deadline))):
            return
        try:
            yield SpawnEffect(self._map_announced())
        except BaseException as error:  # a thread that has begun all the same finds none left
            self.slabs.give_up_announced()
            if not isinstance(error, RuntimeError):
                raise

    def _map_announced(self) -> Operation[None]:
        yield RunInThreadEffect(self.slabs.map_announced, MAPPING_WORK_BYTES)

    def _unmap_dropped(self) -> Operation[None]:
        if self.slabs.has_dropped:
            yield RunInThreadEffect(self.slabs.unmap_dropped, MAPPING_WORK_BYTES)

    def _map(self, found: list[Found]) -> Operation[None]:
        try:
            yield RunInThreadEffect(partial(self.slabs.map_now, found), MAPPING_WORK_BYTES)
        finally:
            self.slabs.give_up(found)  # it may not have been begun: an event loop has ended

    def _ask_for_slabs(self, channel: AnyChannel, keys: Sequence[SlabKey], deadline: Deadline) -> Operation[list[Found]]:
        """Those that the node still has. Mappings of slabs that it has given up since end here, so that their memory
        does: whoever maps nothing new holds at most what the node had at one time."""
        node_id, epoch = keys[0].node_id, keys[0].epoch
        held = self.slabs.held(node_id, epoch)[:MAX_BATCH]
        answer, fds = yield RequestFdsEffect(channel, MapSlabs([key.slab for key in keys], int(keys[0].writable), held), deadline)
        self.slabs.drop(node_id, epoch, answer.freed)
        there = [(key, size) for key, size in zip(keys, answer.sizes, strict=False) if size]
        return [(key, fd, size) for (key, size), fd in zip(there, fds, strict=False)]


def _wait_for(coming: Sequence[threading.Event], deadline: Deadline) -> None:
    for one in coming:
        one.wait(deadline.left_s())
