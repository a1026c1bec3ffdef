"""How a client has slabs of nodes on its host mapped: the node is asked for those that are missing, each once. Sans-I/O: see effects.py."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvstore.client.effects import AnyChannel, AskForFds, Later, Operation, Work
from kvstore.client.slabs import Found, SlabCache, SlabKey
from kvstore.protocol.errors import StaleHandle
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.node_messages import Slabs
from kvstore.rpc.blocking_socket import MAX_FDS
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.mapping import Slab

MAPPING_WORK_BYTES: Final = 1 << 30
"""Mapping a slab faults all of its pages in: never on an event loop."""


class SlabMapping:
    """The slabs that a client has mapped, and how it comes to more. Its threads and tasks share it."""

    def __init__(self, *, asks: bool = True) -> None:
        """`asks` as SlabCache."""
        self.slabs = SlabCache(asks=asks)

    def map_slabs(
        self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline, *, writable: bool
    ) -> Operation[list[Slab]]:
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
            yield Work(partial(_wait_for, coming, deadline), MAPPING_WORK_BYTES)
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
            answer, _ = yield AskForFds(channel, Slabs([], 0, held), deadline)
            self.slabs.drop(node_id, epoch, answer.gone)
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
            yield Later(self.slabs.map_announced)
        except BaseException as error:  # a thread that has begun all the same finds none left
            self.slabs.give_up_announced()
            if not isinstance(error, RuntimeError):
                raise

    def _unmap_dropped(self) -> Operation[None]:
        if self.slabs.has_dropped:
            yield Work(self.slabs.unmap_dropped, MAPPING_WORK_BYTES)

    def _map(self, found: list[Found]) -> Operation[None]:
        try:
            yield Work(partial(self.slabs.map_now, found), MAPPING_WORK_BYTES)
        finally:
            self.slabs.give_up(found)  # it may not have been begun: an event loop has ended

    def _ask_for_slabs(self, channel: AnyChannel, keys: Sequence[SlabKey], deadline: Deadline) -> Operation[list[Found]]:
        """Those that the node still has. Mappings of slabs that it has given up since end here, so that their memory
        does: whoever maps nothing new holds at most what the node had at one time."""
        node_id, epoch = keys[0].node_id, keys[0].epoch
        held = self.slabs.held(node_id, epoch)[:MAX_BATCH]
        answer, fds = yield AskForFds(channel, Slabs([key.slab for key in keys], int(keys[0].writable), held), deadline)
        self.slabs.drop(node_id, epoch, answer.gone)
        there = [(key, size) for key, size in zip(keys, answer.sizes, strict=False) if size]
        return [(key, fd, size) for (key, size), fd in zip(there, fds, strict=False)]


def _wait_for(coming: Sequence[threading.Event], deadline: Deadline) -> None:
    for one in coming:
        one.wait(deadline.left_s())
