"""Puts of one value by one message, for the blocking client.

They bypass the generators of client/writes/, which take several times as long as the node does (`make bench`: put of 4
KiB; `make bench-remote`; `make bench-local-puts`). The target is the node of this host. With `ack="node"` and no local
node, it is the node of another host that `PutTargets` names.

- A small value travels with the message.
- A larger local value is copied into a slot ahead (store/writes/slots_ahead.py); one message commits it. The first put
  of a size opens its slot by a message of its own. From the second put of a size on, each reply opens the slot of the
  next. A slot belongs to one connection, and so to one thread at a time.

A put that does not fit these cases returns None: nothing has been stored, and the caller runs the ordinary operation.
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
from kvstore.transfer.memory.mapped_memory import map_slab


class OfferedSlot:
    """Client side of a connection's writer page: the slot ahead that the node offers. Used only by the connection's
    holder."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the page behind `fd`, which stays the caller's. Raises Broken: not a writer page, or one of another
        release."""
        self._words = map_slab(os.dup(fd), size_bytes, writable=True).memory.cast("Q")
        if size_bytes != PAGE_BYTES or self._words[AT_PAGE_MAGIC] != PAGE_MAGIC:
            raise Broken("the writer page of a local node has an unknown format: run client and node of the same release")
        self._fence = threading.Lock()
        self._ahead = self._words[AT_SLABS_AHEAD : AT_SLABS_AHEAD + SLABS_AHEAD]
        self._known_ahead: list[int] = []

    def has(self, size_bytes: int) -> bool:
        """Return whether a slot of this size is offered now."""
        return bool(self._words[AT_NUMBER]) and self._words[AT_SIZE] == size_bytes

    def enter(self, size_bytes: int) -> tuple[int, int, int] | None:
        """Claim the slot for writing: (number, slab, offset in bytes); None if no slot of this size is offered.

        The slot stays the caller's until `leave`, or until the reply to its put.
        """
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
        """Slabs of the next slots, if the node has announced others since the last call; else []."""
        slabs = self._ahead.tolist()
        if slabs == self._known_ahead:
            return []
        self._known_ahead = slabs
        return [word - 1 for word in slabs if word]

    def leave(self) -> None:
        """End the claim on the slot."""
        self._words[AT_WRITING] = 0


T = TypeVar("T")


class RunOperation(Protocol):
    """Runs an operation to its end: `Driver.run`."""

    def __call__(self, operation: Operation[T], /) -> T: ...


COOLDOWN_NS: Final = 100_000_000
"""Pause after a node that had no free slot."""
_SLOT: Final = struct.Struct("<QQ")
"""Header of PutFromSlot, before the body of a Put: the slot's number and the size of the next slot."""


class SlotPuts:
    """Puts of one large local value through a slot ahead. Thread-safe, blocking; `LocalPuts` acquires the
    connection."""

    def __init__(
        self, resources: ClientResources, local: LocalNodes, run: RunOperation, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`local` gives the local nodes' indexes; `run` runs an operation to its end."""
        self._mapping = resources.mapping
        self._copier = resources.copier
        self._uncommitted = resources.uncommitted_puts
        self._local = local
        self._run = run
        self._form = OnePutForm()
        self._clock_ns = clock_ns
        self._cooldown_until_ns = 0
        self._last_bytes = 0
        """Size of the last value; a put of the same size asks for a slot for the next."""

    def send(self, node: KnownNode, channel: Channel, put: OnePut, source: bytes | memoryview, deadline: Deadline) -> int | None:
        """Copy the value into a slot and commit it: the node's reply flag. `put` has no checksum yet.

        None: no slot is free, or the block is present already; the caller takes the ordinary path. Raises as a put.
        """
        size_bytes = put.size_bytes
        if self._clock_ns() < self._cooldown_until_ns or any(
            local.index.find(put.key) is not None for local in self._local.cached_fresh[1]
        ):
            return None  # no free slot, or the block is present: the copy would be wasted
        next_bytes = size_bytes if size_bytes == self._last_bytes else 0
        self._last_bytes = size_bytes
        entered = None
        if (offered := self._offered(channel, size_bytes, deadline)) is not None:
            entered = offered.enter(size_bytes)
        if offered is None or entered is None:
            self._cooldown_until_ns = self._clock_ns() + COOLDOWN_NS
            return None
        number, slab, offset = entered
        try:
            mapped = self._mapping.slabs.found(SlabKey(node.node_id, channel.welcome.epoch, slab, True))
            if mapped is None:
                [mapped] = self._run(self._mapping.map_slabs(channel, node.node_id, [slab], deadline, writable=True))
            if ahead := offered.new_slabs_ahead():  # mapped in the background, beside the copies
                self._run(self._mapping.map_ahead(channel, node.node_id, ahead, deadline))
            [checksum] = self._copier.gather_and_sum([(mapped.part(offset, size_bytes), [memoryview(source)])])
            body = self._form.pack(*put._replace(checksum=checksum))
            if body is None:
                return None
            self._uncommitted.begin(node)
            flag = channel.call_for_flag(PutFromSlot.TYPE, _SLOT.pack(number, next_bytes) + body, b"", deadline)
            self._uncommitted.answered(node, channel.welcome.epoch)
        finally:
            offered.leave()
        return flag

    def _offered(self, channel: Channel, size_bytes: int, deadline: Deadline) -> OfferedSlot | None:
        """The connection's page, with a slot of that size if the node has one free. None: the node gave no page."""
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
    """Puts of one value by one message, with or without a slot. Thread-safe, blocking."""

    def __init__(self, resources: ClientResources, pool: ConnectionPool, slots: SlotPuts) -> None:
        self._resources = resources
        self._slots = slots
        self._pool = pool
        self._ack = resources.settings.ack
        self._max_bytes = resources.settings.put_inline_bytes
        self._nodes = resources.daemons.nodes
        self._targets = resources.put_targets
        self._uncommitted = resources.uncommitted_puts
        self._form = OnePutForm()
        self._hint = CachedLocation(0, UNRESERVED, 0)
        """Location of the last stored block, shared by consecutive puts of one size."""

    def put(self, key: bytes, value: Any, namespace: Any, parent: bytes | None, ack: str | None, deadline: Deadline) -> bool | None:
        """Store one value: True if stored, False if the node had the block already. Raises as a put.

        None: the fast path does not apply. The caller runs the ordinary operation within what is left of `deadline`; it
        opens connections and reports malformed arguments.
        """
        if ack is not None and type(ack) is not str:
            return None
        kind, ack_code = type(value), _ACKS.get(ack or self._ack)
        if type(key) is not bytes or type(namespace) is not str or kind is list or kind is tuple or ack_code is None:
            return None
        if parent is None:
            parent = b""
        elif type(parent) is not bytes or not 0 < len(parent) <= MAX_KEY_BYTES:
            return None
        source = self._source(value, MAX_SLOT_AHEAD_BYTES if ack_code == ACK_NODE else self._max_bytes)
        if source is None:
            return None
        is_small = len(source) <= self._max_bytes
        node = self._nodes.open_local()
        if node is None and ack_code == ACK_NODE and is_small:
            node, ack_code = self._nodes.get(self._targets.node_id(len(source))), ACK_NODE_NO_WAIT
        if node is None:
            return None
        put = OnePut(ack_code, namespace, key, len(source), xxhash.xxh3_64_intdigest(source) if is_small else 0, parent)
        address = node.route.address()
        lent = self._pool.borrow(address) if address.unix or ack_code == ACK_NODE_NO_WAIT else None
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
                return None  # the node is draining, or its connection broke and it may have restarted
            if ack_code == ACK_NODE_NO_WAIT and isinstance(error, REFUSALS):
                return None
            raise
        self._pool.release(turn, channel)
        if flag == RETRY_LATER and ack_code == ACK_NODE_NO_WAIT:
            self._targets.forget(node.node_id)
        elif flag == RETRY_LATER:
            self._resources.daemons.suspect_owners(deadline)
        return self._finish(node, key, put.size_bytes, ack_code, flag)

    def _source(self, value: Any, most_bytes: int) -> bytes | memoryview | None:
        """The value's bytes, if it is in host memory and at most `most_bytes` long; else None."""
        source: bytes | memoryview
        if type(value) is bytes:
            source = value
        else:
            if (nbytes_of(value) or 0) > most_bytes or getattr(value, "is_cuda", False):
                return None  # a GPU tensor is copied to the host once, by the ordinary put
            source = as_source(value)
        return source if 0 < len(source) <= most_bytes else None

    def _send(self, node: KnownNode, channel: Channel, put: OnePut, source: bytes | memoryview, deadline: Deadline) -> int | None:
        """Send the value with the message: the node's reply flag. None: the ordinary put applies."""
        body = self._form.pack(*put)
        if body is None:
            return None
        if put.ack in NODE_ACKS:
            self._uncommitted.begin(node)
        flag = channel.call_for_flag(Put.TYPE, body, source, deadline)
        if put.ack in NODE_ACKS:
            self._uncommitted.answered(node, channel.welcome.epoch)
        return flag

    def _finish(self, node: KnownNode, key: bytes, size_bytes: int, ack: int, flag: int | None) -> bool | None:
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
            self._uncommitted.note_already_present()
        resources.counters.add(requests=1, already_present=1)
        return False
