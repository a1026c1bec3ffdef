"""Puts of one value to a node that needs no reservation for it: one message and its answer, beside the generators of client/writes/, which
take several times as long as the node does (`make bench`: put of 4 KiB; `make bench-remote`; `make bench-local-puts`). Only the blocking
client has them.

The node is that of this host; with `ack="node"` and none here, a target of another host (PutTargets).

- A small value goes with the message.
- A larger one, on this host, goes into a slot that was opened ahead (store/writes/slots_ahead.py): a copy and one message. The first put
  of a size
  opens its slot by a message of its own. From the second one in a row on, the answer to each put brings the slot of the next. A slot
  belongs to the connection, and so to one thread at a time.

What is not as plain as that goes the usual way: nothing has been stored then.
"""

import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import xxhash

from kvstore.client.connections.locations import CachedLocation
from kvstore.client.connections.reservations import REFUSALS
from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.connections.slabs import SlabKey
from kvstore.client.core.buffers import as_source, nbytes_of
from kvstore.client.core.effects import Operation
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.writes.put_batch import UNRESERVED
from kvstore.protocol.batch_of_one import OnePut, OnePutForm
from kvstore.protocol.errors import Broken, Draining, Unavailable
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.node_messages import (
    ACK_CLUSTER,
    ACK_NODE,
    ACK_NODE_NO_WAIT,
    NODE_ACKS,
    RETRY_LATER,
    STORED,
    OpenSlotAhead,
    Put,
    PutFromSlot,
)
from kvstore.protocol.writer_page import (
    AT_NUMBER,
    AT_OFFSET,
    AT_PAGE_MAGIC,
    AT_SIZE,
    AT_SLAB,
    AT_SLABS_AHEAD,
    AT_WRITING,
    MAX_SLOT_AHEAD_BYTES,
    PAGE_BYTES,
    PAGE_MAGIC,
    SLABS_AHEAD,
)
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.connection_pool import ConnectionPool
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.mapping import map_slab


class OfferedSlot:
    """Belongs to a connection: whoever has that is the only caller."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes no ownership of `fd`. Raises Broken: it is no such page, or not one of this release."""
        self._words = map_slab(os.dup(fd), size_bytes, writable=True).memory.cast("Q")
        if size_bytes != PAGE_BYTES or self._words[AT_PAGE_MAGIC] != PAGE_MAGIC:
            raise Broken("a node of this host offers slots in a form that this release does not know")
        self._fence = threading.Lock()
        self._ahead = self._words[AT_SLABS_AHEAD : AT_SLABS_AHEAD + SLABS_AHEAD]
        self._told: list[int] = []

    def has(self, size_bytes: int) -> bool:
        """Whether a slot of this size is offered now."""
        return bool(self._words[AT_NUMBER]) and self._words[AT_SIZE] == size_bytes

    def enter(self, size_bytes: int) -> tuple[int, int, int] | None:
        """Begin to write the slot: (number, slab, offset in bytes). It stays this writer's until `leave`, or until its put is answered.

        None: no slot of this size is offered now."""
        words = self._words
        number = words[AT_NUMBER]
        if not self.has(size_bytes):
            return None
        words[AT_WRITING] = number
        with self._fence:  # a full barrier between this store and the load
            pass
        if words[AT_NUMBER] != number:
            self.leave()
            return None
        return number, words[AT_SLAB], words[AT_OFFSET]

    def new_slabs_ahead(self) -> list[int]:
        """Slabs that later slots will be in, where the node has named others since the last call."""
        told = self._ahead.tolist()
        if told == self._told:
            return []
        self._told = told
        return [word - 1 for word in told if word]

    def leave(self) -> None:
        """The slot is not written any more."""
        self._words[AT_WRITING] = 0


T = TypeVar("T")


class RunOperation(Protocol):
    """Drives an operation to its end: Driver's."""

    def __call__(self, operation: Operation[T], /) -> T: ...


REST_NS: Final = 100_000_000
"""A node that had no room for a slot is not asked for one again before this."""
_SLOT: Final = struct.Struct("<QQ")
"""What a PutFromSlot has before the body of a Put: the slot's number, and the size of the next one."""


class SlotPuts:
    """See the module. Thread-safe; for a client that may block. `send` is a step of a put of LocalPuts, which lends the channel."""

    def __init__(
        self, resources: ClientResources, local: LocalNodes, run: RunOperation, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
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
            flag = channel.call_for_flag(PutFromSlot.TYPE, _SLOT.pack(number, next_bytes) + body, b"", deadline)
            self._early.answered(node, channel.welcome.epoch)
        finally:
            offered.leave()
        return flag

    def _offered(self, channel: Channel, size_bytes: int, deadline: Deadline) -> OfferedSlot | None:
        """The channel's page, with a slot of that size if the node has room for one. None: it gave no page."""
        offered: OfferedSlot | None = channel.context
        if offered is not None and offered.has(size_bytes):
            return offered
        answer, fds = channel.call_for_fds(OpenSlotAhead(size_bytes), deadline)
        try:
            if fds:
                offered = channel.context = OfferedSlot(fds[0], answer.sizes[0])
        finally:
            for fd in fds:
                os.close(fd)
        return offered


_ACKS: Final = {"node": ACK_NODE, "cluster": ACK_CLUSTER}


class LocalPuts:
    """See the module. Thread-safe; for a client that may block."""

    def __init__(self, resources: ClientResources, pool: ConnectionPool, slots: SlotPuts) -> None:
        self._resources = resources
        self._slots = slots
        self._pool = pool
        self._ack = resources.settings.ack
        self._max_bytes = resources.settings.put_inline_bytes
        self._nodes = resources.daemons.nodes
        self._targets = resources.put_targets
        self._early = resources.early_puts
        self._form = OnePutForm()
        self._hint = CachedLocation(0, UNRESERVED, 0)
        """Of the last block stored: values of one size in a row share it."""

    def put(self, key: bytes, value: Any, namespace: Any, parent: bytes | None, ack: str | None, deadline: Deadline) -> bool | None:
        """Whether the node stored the block, or had it already; None: it is to be put the usual way within what is left of `deadline`,
        which also says what is wrong with an argument, and opens connections. Raises what a put raises."""
        if ack is not None and type(ack) is not str:
            return None
        kind, told = type(value), _ACKS.get(ack or self._ack)
        if type(key) is not bytes or type(namespace) is not str or kind is list or kind is tuple or told is None:
            return None
        if parent is None:
            parent = b""
        elif type(parent) is not bytes or not 0 < len(parent) <= MAX_KEY_BYTES:
            return None
        source = self._source(value, MAX_SLOT_AHEAD_BYTES if told == ACK_NODE else self._max_bytes)
        if source is None:
            return None
        is_small = len(source) <= self._max_bytes
        node = self._nodes.open_local()
        if node is None and told == ACK_NODE and is_small:
            node, told = self._nodes.get(self._targets.node_id(len(source))), ACK_NODE_NO_WAIT
        if node is None:
            return None
        put = OnePut(told, namespace, key, len(source), xxhash.xxh3_64_intdigest(source) if is_small else 0, parent)
        address = node.route.address()
        lent = self._pool.borrow(address) if address.unix or told == ACK_NODE_NO_WAIT else None
        if lent is None:
            return None
        turn, channel = lent
        send = self._send if is_small else self._slots.send
        try:
            flag = send(node, channel, put, source, deadline) if node.route.is_meant(address, channel.welcome) else RETRY_LATER
        except BaseException as error:
            self._pool.lent(turn, channel).release(error)
            self._targets.forget(node.node_id)
            if isinstance(error, Draining):
                self._nodes.closed.add(node.node_id)
            if isinstance(error, Draining) or (isinstance(error, Unavailable) and not channel.is_open):
                return None  # it takes no new blocks; or it hung up, and may have begun anew
            if told == ACK_NODE_NO_WAIT and isinstance(error, REFUSALS):
                return None
            raise
        self._pool.release(turn, channel)
        if flag == RETRY_LATER and told == ACK_NODE_NO_WAIT:
            self._targets.forget(node.node_id)
        elif flag == RETRY_LATER:
            self._resources.daemons.doubt_owners(deadline)
        return self._told(node, key, put.size_bytes, told, flag)

    def _source(self, value: Any, most_bytes: int) -> bytes | memoryview | None:
        """The bytes of a value of at most so many, which lie in the memory of this host; None: it is none."""
        source: bytes | memoryview
        if type(value) is bytes:
            source = value
        else:
            if (nbytes_of(value) or 0) > most_bytes or getattr(value, "is_cuda", False):
                return None  # a tensor of a GPU is copied to this host once, where it is put
            source = as_source(value)
        return source if 0 < len(source) <= most_bytes else None

    def _send(self, node: KnownNode, channel: Channel, put: OnePut, source: bytes | memoryview, deadline: Deadline) -> int | None:
        """Have the node store the value: its answer. None: the put has to be made the usual way."""
        body = self._form.pack(*put)
        if body is None:
            return None
        if put.ack in NODE_ACKS:
            self._early.begin(node)
        flag = channel.call_for_flag(Put.TYPE, body, source, deadline)
        if put.ack in NODE_ACKS:
            self._early.answered(node, channel.welcome.epoch)
        return flag

    def _told(self, node: KnownNode, key: bytes, size_bytes: int, ack: int, flag: int | None) -> bool | None:
        resources = self._resources
        if flag == STORED:
            hint = self._hint
            if hint.size_bytes != size_bytes or hint.node_id != node.node_id:
                hint = self._hint = CachedLocation(node.node_id, UNRESERVED, size_bytes)
            resources.hints.learn_one(key, hint)
            resources.counters.put_one(size_bytes)
            return True
        if flag is None or flag == RETRY_LATER:
            return None
        if ack in NODE_ACKS:
            self._early.had_some()
        resources.counters.add(requests=1, already_present=1)
        return False
