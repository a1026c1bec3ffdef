"""Puts of one small value to the node of this host: one message and its answer, beside the generators of client/writes/, which
take several times as long as the node does. What is not as plain as that goes their way: nothing has been stored then.
"""

from typing import Any, Final

import xxhash

from kvstore.client.buffers import as_source
from kvstore.client.locations import Hint
from kvstore.client.resources import ClientResources
from kvstore.client.routes import KnownNode
from kvstore.client.writes.batch import UNRESERVED
from kvstore.protocol.errors import Draining, Unavailable
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, ASK_AGAIN, STORED, Put
from kvstore.protocol.one_put import OnePutForm
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.pool import Pool

_ACKS: Final = {"node": ACK_NODE, "cluster": ACK_CLUSTER}


class LocalPuts:
    """See the module. Thread-safe; for a client that may block."""

    def __init__(self, resources: ClientResources, pool: Pool) -> None:
        self._resources = resources
        self._pool = pool
        self._ack = resources.settings.ack
        self._max_bytes = resources.settings.put_inline_bytes
        self._nodes = resources.daemons.nodes
        self._early = resources.early_puts
        self._form = OnePutForm()
        self._hint = Hint(0, UNRESERVED, 0)
        """Of the last block stored: values of one size in a row share it."""

    def put(self, key: bytes, value: Any, namespace: Any, parent: bytes | None, ack: str | None, deadline: Deadline) -> bool | None:
        """Whether the node stored the block, or had it already; None: it is to be put the usual way within what is left of `deadline`,
        which also says what is wrong with an argument, and opens connections. Raises what a put raises."""
        kind, told = type(value), _ACKS.get(ack or self._ack)
        if type(key) is not bytes or type(namespace) is not str or kind is list or kind is tuple or told is None:
            return None
        if parent is None:
            parent = b""
        elif type(parent) is not bytes or not 0 < len(parent) <= MAX_KEY_BYTES:
            return None
        if kind is not bytes and isinstance(told_bytes := getattr(value, "nbytes", 0), int) and told_bytes > self._max_bytes:
            return None  # a tensor of a GPU, say, which is copied to this host once, where it is put
        source = value if kind is bytes else as_source(value)
        size_bytes = len(source)
        nodes = self._nodes
        node = nodes.get(nodes.local_id)
        if not 0 < size_bytes <= self._max_bytes or node is None or node.node_id in nodes.closed:
            return None
        body = self._form.pack(told, namespace, key, size_bytes, xxhash.xxh3_64_intdigest(source), parent)
        if body is None:
            return None
        address = node.route.address()
        lent = self._pool.borrow(address) if address.unix else None
        if lent is None:
            return None
        turn, channel = lent
        try:
            flag = self._ask(node, channel, told, body, source, deadline) if node.route.is_meant(address, channel.welcome) else ASK_AGAIN
        except BaseException as error:
            self._pool.lent(turn, channel).give_back(error)
            if isinstance(error, Draining):
                nodes.closed.add(node.node_id)
            if isinstance(error, Draining) or (isinstance(error, Unavailable) and not channel.is_open):
                return None  # it takes no new blocks; or it hung up, and may have begun anew
            raise
        self._pool.give_back(turn, channel)
        if flag == ASK_AGAIN:
            self._resources.daemons.doubt_owners(deadline)
        return self._told(node, key, size_bytes, told, flag)

    def _ask(self, node: KnownNode, channel: Channel, ack: int, body: bytes, source: bytes | memoryview, deadline: Deadline) -> int | None:
        """The node's answer."""
        if ack == ACK_NODE:
            self._early.begin(node)
        flag = channel.call_for_flag(Put.TYPE, Put.SINCE, body, source, deadline)
        if ack == ACK_NODE:
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
        if ack == ACK_NODE:
            self._early.had_some()
        resources.counters.add(requests=1, already_present=1)
        return False
