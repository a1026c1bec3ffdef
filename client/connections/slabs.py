"""Mapped slabs of local nodes: the cache of mappings, and the requests for missing ones, one per slab. Sans-I/O: see
effects.py."""

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
from kvstore.transfer.memory.mapped_memory import MappedSlab, map_slab


class SlabKey(NamedTuple):
    """Slab of one process of a node: `epoch` distinguishes restarts, which reuse slab ids."""

    node_id: int
    epoch: int
    slab: int
    writable: bool


Found = tuple[SlabKey, int, int]
"""A slab with its descriptor, which the taker closes, and its size in bytes."""


class SlabCache:
    """Mapped slabs by key, and slabs to be mapped ahead by a background thread. Thread-safe.

    A mapping stays until its node restarts or frees the slab: the memory is the node's, not this process's. Views and
    copies in progress keep their mapping.
    """

    def __init__(self) -> None:
        self._slabs: dict[SlabKey, MappedSlab] = {}
        self._ahead: list[Found] = []
        """Announced slabs that no thread has begun to map, in order of use."""
        self._has_mapper = False
        """A thread is mapping announced slabs; at most one at a time."""
        self._pending: dict[SlabKey, threading.Event] = {}
        """Event per announced slab, set when it is mapped or given up."""
        self._dropped: list[MappedSlab] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def get(self, keys: Sequence[SlabKey]) -> list[MappedSlab]:
        """The mapped slabs. Raises StaleHandle if one is missing because its node restarted; Closed after `close`."""
        try:
            return [self._slabs[key] for key in keys]
        except KeyError as error:
            if self._is_closed:
                raise Closed("the client is closed") from None
            raise StaleHandle(f"{error.args[0]} is not mapped any more: its node has restarted") from None

    def found(self, key: SlabKey) -> MappedSlab | None:
        """The slab, if mapped."""
        return self._slabs.get(key)

    def missing(self, keys: Sequence[SlabKey]) -> list[SlabKey]:
        """The distinct keys that are not mapped."""
        missing = [key for key in keys if key not in self._slabs]
        return list(dict.fromkeys(missing)) if missing else missing

    def absent(self, keys: Sequence[SlabKey]) -> list[SlabKey]:
        """The distinct keys that are neither mapped nor announced."""
        with self._lock:
            return [key for key in dict.fromkeys(keys) if key not in self._slabs and key not in self._pending]

    def held(self, node_id: int, epoch: int) -> list[int]:
        """Mapped slabs of a node's process, the oldest mapping first."""
        with self._lock:
            return list(dict.fromkeys(key.slab for key in self._slabs if key.node_id == node_id and key.epoch == epoch))

    def drop(self, node_id: int, epoch: int, slabs: Iterable[int]) -> None:
        """Forget slabs that the node has freed; `unmap_dropped` unmaps them."""
        with self._lock:
            for slab in slabs:
                found = [self._slabs.pop(SlabKey(node_id, epoch, slab, writable), None) for writable in (False, True)]
                self._dropped += [each for each in found if each is not None]

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def unmap_dropped(self) -> None:
        """Unmap dropped slabs without users: 50 ms per GiB."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        del dropped

    def pending(self, keys: Sequence[SlabKey]) -> list[threading.Event]:
        """Events of announced slabs among `keys`, to wait for before requesting them."""
        with self._lock:
            return [self._pending[key] for key in keys if key in self._pending]

    def map_now(self, found: list[Found]) -> None:
        """Map slabs, popped from `found`, and close all descriptors. Mappings of the node's earlier processes are
        dropped. Raises Broken."""
        try:
            for taken in _taken(found):
                self._map(taken)
        finally:
            self.give_up(found)

    def announce(self, found: Iterable[Found]) -> bool:
        """Queue slabs for `map_announced`. True: no thread is mapping; the caller starts one or calls
        `give_up_announced`."""
        with self._lock:
            for one in found:
                self._pending.setdefault(one[0], threading.Event())
                self._ahead.append(one)
            has_mapper, self._has_mapper = self._has_mapper, True
        return not has_mapper

    def map_announced(self) -> None:
        """Map announced slabs until none is left. One that cannot be mapped is left to the call that needs it."""
        try:
            while (taken := self._next_announced()) is not None:
                with contextlib.suppress(Broken):
                    self._map(taken)
            self.unmap_dropped()
        except BaseException:
            self.give_up_announced()
            raise

    def take_announced(self, keys: Sequence[SlabKey]) -> list[Found]:
        """Take announced slabs of `keys` that no thread has begun; the caller maps them or gives them up."""
        with self._lock:
            taken = [one for one in self._ahead if one[0] in keys]
            for one in taken:
                self._ahead.remove(one)
        return taken

    def give_up(self, found: list[Found]) -> None:
        """Close the descriptors of these slabs and wake their waiters."""
        for key, fd, _ in _taken(found):
            os.close(fd)
            self._end_wait(key)

    def give_up_announced(self) -> None:
        """Give up all announced slabs, for want of a thread."""
        with self._lock:
            self._has_mapper = False
        self.give_up(self._ahead)

    def _next_announced(self) -> Found | None:
        """The next announced slab. None: the queue is empty, and the next announcement needs a new thread."""
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
            pending = self._pending.pop(key, None)  # one event, even if two threads announced the slab
        if pending is not None:
            pending.set()

    def _add(self, key: SlabKey, slab: MappedSlab) -> None:
        with self._lock:
            for old in [old for old in self._slabs if old.node_id == key.node_id and old.epoch != key.epoch]:
                del self._slabs[old]
            self._slabs[key] = slab
            if key.writable:
                # One mapping serves both: a second one would fault the same pages in again, 60 ms a GiB.
                self._slabs[key._replace(writable=False)] = MappedSlab(slab.memory.toreadonly())

    def close(self) -> None:
        """Forget every mapping; views keep theirs. Announced slabs are given up."""
        with self._lock:
            self._is_closed = True
            self._slabs.clear()
        self.give_up(self._ahead)

    def __len__(self) -> int:
        return len(self._slabs)


def _taken(found: list[Found]) -> Iterator[Found]:
    """Pop each from the front; concurrent callers get distinct ones."""
    with contextlib.suppress(IndexError):
        while True:
            yield found.pop(0)


MAPPING_WORK_BYTES: Final = 1 << 30
"""Weight of mapping a slab, which faults in all of its pages: never on an event loop."""


class SlabMapping:
    """Maps slabs of nodes on request. Threads and tasks of a client share it."""

    def __init__(self) -> None:
        self.slabs = SlabCache()

    def map_slabs(
        self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline, *, writable: bool
    ) -> Operation[list[MappedSlab]]:
        """Map these slabs and return them in order. Raises StaleHandle for one that was freed, Broken for one that
        cannot be mapped, Closed."""
        keys = [SlabKey(node_id, channel.welcome.epoch, slab, writable) for slab in slabs]
        missing = self.slabs.missing(keys)
        if not missing:
            return self.slabs.get(keys)
        if announced := self.slabs.take_announced(missing):  # the background thread maps one at a time: map the others here
            yield from self._map(announced)
            missing = self.slabs.missing(missing)
        if pending := self.slabs.pending(missing):
            yield RunInThreadEffect(partial(_wait_for, pending, deadline), MAPPING_WORK_BYTES)
            missing = self.slabs.missing(missing)
        for start in range(0, len(missing), MAX_FDS):
            wanted = missing[start : start + MAX_FDS]
            found = yield from self._request_slabs(channel, wanted, deadline)
            count = len(found)
            yield from self._map(found)
            yield from self._unmap_dropped()
            if count < len(wanted):
                raise StaleHandle(f"node {node_id} named a slab that it does not have")
        return self.slabs.get(keys)

    def unmap_freed(self, channel: AnyChannel, node_id: int, deadline: Deadline) -> Operation[None]:
        """Unmap the slabs that the node has freed."""
        epoch = channel.welcome.epoch
        held = self.slabs.held(node_id, epoch)[:MAX_BATCH]
        if held:
            answer, _ = yield RequestFdsEffect(channel, MapSlabs([], 0, held), deadline)
            self.slabs.drop(node_id, epoch, answer.freed)
            yield from self._unmap_dropped()

    def map_ahead(self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline) -> Operation[None]:
        """Map slabs for later puts in the background, if a thread is available, and unmap those that the node has
        freed."""
        keys = self.slabs.absent([SlabKey(node_id, channel.welcome.epoch, slab, True) for slab in slabs])[:MAX_FDS]
        if not keys:
            return
        if not self.slabs.announce((yield from self._request_slabs(channel, keys, deadline))):
            return
        try:
            yield SpawnEffect(self._map_announced())
        except BaseException as error:  # a thread that started nevertheless finds none left
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
            self.slabs.give_up(found)  # the work may not have begun, if the event loop ended

    def _request_slabs(self, channel: AnyChannel, keys: Sequence[SlabKey], deadline: Deadline) -> Operation[list[Found]]:
        """Request descriptors: the slabs that the node still has. Also drops mappings of freed slabs, so that their
        memory is released even if nothing new is mapped."""
        node_id, epoch = keys[0].node_id, keys[0].epoch
        held = self.slabs.held(node_id, epoch)[:MAX_BATCH]
        answer, fds = yield RequestFdsEffect(channel, MapSlabs([key.slab for key in keys], int(keys[0].writable), held), deadline)
        self.slabs.drop(node_id, epoch, answer.freed)
        there = [(key, size) for key, size in zip(keys, answer.sizes, strict=False) if size]
        return [(key, fd, size) for (key, size), fd in zip(there, fds, strict=False)]


def _wait_for(pending: Sequence[threading.Event], deadline: Deadline) -> None:
    for one in pending:
        one.wait(deadline.left_s())
