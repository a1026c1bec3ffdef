"""Puts of one large value to the node of this host, into a slot that was opened ahead: a copy and one message (store/puts/ahead.py).

The first put of a size opens its slot by a message of its own. From the second one in a row on, the answer to each put brings the slot of
the next. A slot belongs to the connection, and so to one thread at a time. What is not as plain as that is put by the usual way.
"""

import os
import struct
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from kvstore.client.effects import Operation
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.local.writer_page import OfferedSlot
from kvstore.client.resources import ClientResources
from kvstore.client.routes import KnownNode
from kvstore.client.slabs import SlabKey
from kvstore.protocol.batch_of_one import OnePut, OnePutForm
from kvstore.protocol.node_messages import OpenAhead, PutAhead
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline

T = TypeVar("T")


class Run(Protocol):
    """Drives an operation to its end: Driver's."""

    def __call__(self, operation: Operation[T], /) -> T: ...


REST_NS: Final = 100_000_000
"""A node that had no room for a slot is not asked for one again before this."""
_SLOT: Final = struct.Struct("<QQ")
"""What a PutAhead has before the body of a Put: the slot's number, and the size of the next one."""


class SlotPuts:
    """See the module. Thread-safe; for a client that may block. `send` is a step of a put of LocalPuts, which lends the channel."""

    def __init__(self, resources: ClientResources, local: LocalNodes, run: Run, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`local` are the nodes whose indexes are at hand, `run` drives an operation to its end."""
        self._mapping = resources.mapping
        self._copier = resources.copier
        self._early = resources.early_puts
        self._local = local
        self._run = run
        self._form = OnePutForm()
        self._clock_ns = clock_ns
        self._rest_until_ns = 0
        self._last_bytes = 0
        """Size of the last value: another one of that size is expected to follow."""

    def send(self, node: KnownNode, channel: Channel, put: OnePut, source: bytes | memoryview, deadline: Deadline) -> int | None:
        """Copy the value into a slot and have the node store it: its answer. `put` has no checksum yet.

        None: the put has to be made the usual way: the node has no slot for it, or shows the block already. Raises what a put raises.
        """
        size_bytes = put.size_bytes
        if self._clock_ns() < self._rest_until_ns or any(near.index.find(put.key) is not None for near in self._local.at_hand[1]):
            return None  # there is no slot, or to copy the value would be for nothing
        next_bytes = size_bytes if size_bytes == self._last_bytes else 0
        self._last_bytes = size_bytes
        entered = None
        if (offered := self._offered(channel, size_bytes, deadline)) is not None:
            entered = offered.enter(size_bytes)
        if offered is None or entered is None:
            self._rest_until_ns = self._clock_ns() + REST_NS
            return None
        number, slab, offset = entered
        try:
            mapped = self._mapping.slabs.found(SlabKey(node.node_id, channel.welcome.epoch, slab, True))
            if mapped is None:
                [mapped] = self._run(self._mapping.map_slabs(channel, node.node_id, [slab], deadline, writable=True))
            if ahead := offered.new_slabs_ahead():  # so that it goes on beside the copies
                self._run(self._mapping.map_ahead(channel, node.node_id, ahead, deadline))
            [checksum] = self._copier.gather_and_sum([(mapped.part(offset, size_bytes), [memoryview(source)])])
            body = self._form.pack(*put._replace(checksum=checksum))
            if body is None:
                return None
            self._early.begin(node)
            flag = channel.call_for_flag(PutAhead.TYPE, _SLOT.pack(number, next_bytes) + body, b"", deadline)
            self._early.answered(node, channel.welcome.epoch)
        finally:
            offered.leave()
        return flag

    def _offered(self, channel: Channel, size_bytes: int, deadline: Deadline) -> OfferedSlot | None:
        """The channel's page, with a slot of that size if the node has room for one. None: it gave no page."""
        offered: OfferedSlot | None = channel.context
        if offered is not None and offered.has(size_bytes):
            return offered
        answer, fds = channel.call_for_fds(OpenAhead(size_bytes), deadline)
        try:
            if fds:
                offered = channel.context = OfferedSlot(fds[0], answer.sizes[0])
        finally:
            for fd in fds:
                os.close(fd)
        return offered
