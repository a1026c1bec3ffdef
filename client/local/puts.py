"""Puts of one value to a node that needs no reservation for it: one message and its answer, beside the generators of client/writes/, which
take several times as long as the node does. The node is that of this host; with `ack="node"` and none here, a target of another host
(client/put_targets.py). A small value goes with the message, a larger one, on this host, into a slot that was opened ahead (slot_puts.py).
What is not as plain as that goes their way: nothing has been stored then.
"""

from typing import Any, Final

import xxhash

from kvstore.client.buffers import as_source, nbytes_of
from kvstore.client.local.slot_puts import SlotPuts
from kvstore.client.locations import Hint
from kvstore.client.put_targets import REFUSALS
from kvstore.client.resources import ClientResources
from kvstore.client.routes import KnownNode
from kvstore.client.writes.batch import UNRESERVED
from kvstore.protocol.batch_of_one import OnePut, OnePutForm
from kvstore.protocol.errors import Draining, Unavailable
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, ACK_NODE_NOW, ASK_AGAIN, KEPT_ACKS, STORED, Put
from kvstore.protocol.writer_page import MAX_SLOT_AHEAD_BYTES
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.pool import Pool

_ACKS: Final = {"node": ACK_NODE, "cluster": ACK_CLUSTER}


class LocalPuts:
    """See the module. Thread-safe; for a client that may block."""

    def __init__(self, resources: ClientResources, pool: Pool, slots: SlotPuts) -> None:
        self._resources = resources
        self._slots = slots
        self._pool = pool
        self._ack = resources.settings.ack
        self._max_bytes = resources.settings.put_inline_bytes
        self._nodes = resources.daemons.nodes
        self._targets = resources.put_targets
        self._early = resources.early_puts
        self._form = OnePutForm()
        self._hint = Hint(0, UNRESERVED, 0)
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
            node, told = self._nodes.get(self._targets.node_id(len(source))), ACK_NODE_NOW
        if node is None:
            return None
        put = OnePut(told, namespace, key, len(source), xxhash.xxh3_64_intdigest(source) if is_small else 0, parent)
        address = node.route.address()
        lent = self._pool.borrow(address) if address.unix or told == ACK_NODE_NOW else None
        if lent is None:
            return None
        turn, channel = lent
        send = self._send if is_small else self._slots.send
        try:
            flag = send(node, channel, put, source, deadline) if node.route.is_meant(address, channel.welcome) else ASK_AGAIN
        except BaseException as error:
            self._pool.lent(turn, channel).give_back(error)
            self._targets.forget(node.node_id)
            if isinstance(error, Draining):
                self._nodes.closed.add(node.node_id)
            if isinstance(error, Draining) or (isinstance(error, Unavailable) and not channel.is_open):
                return None  # it takes no new blocks; or it hung up, and may have begun anew
            if told == ACK_NODE_NOW and isinstance(error, REFUSALS):
                return None
            raise
        self._pool.give_back(turn, channel)
        if flag == ASK_AGAIN and told == ACK_NODE_NOW:
            self._targets.forget(node.node_id)
        elif flag == ASK_AGAIN:
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
        if put.ack in KEPT_ACKS:
            self._early.begin(node)
        flag = channel.call_for_flag(Put.TYPE, body, source, deadline)
        if put.ack in KEPT_ACKS:
            self._early.answered(node, channel.welcome.epoch)
        return flag

    def _told(self, node: KnownNode, key: bytes, size_bytes: int, ack: int, flag: int | None) -> bool | None:
        resources = self._resources
        if flag == STORED:
            hint = self._hint
            if hint.size_bytes != size_bytes or hint.node_id != node.node_id:
                hint = self._hint = Hint(node.node_id, UNRESERVED, size_bytes)
            resources.hints.learn_one(key, hint)
            resources.counters.put_one(size_bytes)
            return True
        if flag is None or flag == ASK_AGAIN:
            return None
        if ack in KEPT_ACKS:
            self._early.had_some()
        resources.counters.add(requests=1, already_present=1)
        return False
