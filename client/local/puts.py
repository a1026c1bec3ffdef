"""Puts of one small value to the node of this host: one message and its answer, beside the generators of client/writes/, which
take several times as long as the node does. What is not as plain as that goes their way: nothing has been stored then.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import xxhash

from kvstore.client.arguments import check_deadline
from kvstore.client.buffers import as_source
from kvstore.client.forks import Process
from kvstore.client.locations import Hint
from kvstore.client.resources import ClientResources
from kvstore.client.routes import KnownNode
from kvstore.client.writes.batch import UNRESERVED
from kvstore.protocol.errors import Draining, InvalidTicket, Unavailable
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, ASK_AGAIN, STORED, Put
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.address import Address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.pool import Pool

_ACKS: Final = {"node": ACK_NODE, "cluster": ACK_CLUSTER}


@dataclass(slots=True)
class _OnePut:
    """A Put of a block that nobody has reserved, packed."""

    TYPE: ClassVar[int] = Put.TYPE
    SINCE: ClassVar[int] = Put.SINCE
    body: bytes
    key: bytes
    size_bytes: int
    ack: int

    def pack(self) -> bytes:
        return self.body

    def pack_for(self, version: int) -> bytes:
        return self.body


class LocalPuts:
    """See the module. Thread-safe; for a client that may block."""

    def __init__(self, resources: ClientResources, pool: Pool) -> None:
        self._resources = resources
        self._pool = pool
        self._settings = resources.settings
        self._nodes = resources.daemons.nodes
        self._process = Process.number

    def put(self, key: bytes, value: Any, namespace: Any, parent: bytes | None, ack: str | None, deadline_s: float | None) -> bool | None:
        """Whether the node stored the block, or had it already; None: it is to be put the usual way, which also says what is wrong with an
        argument. Raises what a put raises."""
        settings = self._settings
        node = self._nodes.get(self._nodes.local_id)
        is_plain = type(key) is bytes and 0 < len(key) <= MAX_KEY_BYTES and type(namespace) is str and type(value) not in (list, tuple)
        told = _ACKS.get(ack or settings.ack)
        if node is None or node.node_id in self._nodes.closed or not is_plain or told is None or Process.number != self._process:
            return None
        if parent is None:
            parent = b""
        elif type(parent) is not bytes or not 0 < len(parent) <= MAX_KEY_BYTES:
            return None
        if deadline_s is not None:
            check_deadline(deadline_s)
        source = as_source(value)
        address = node.route.address()
        if len(source) > settings.put_inline_bytes or not address.unix:
            return None
        body = Put.pack_one(told, namespace, key, len(source), 0, xxhash.xxh3_64_intdigest(source), parent)
        if body is None:
            return None
        put = _OnePut(body, key, len(source), told)
        deadline = Deadline(settings.deadline_s if deadline_s is None else deadline_s)
        try:
            loan = self._pool.take(address, deadline, node.route.hello)
        except (Unavailable, InvalidTicket):
            return None
        try:
            flag = self._ask(node, address, loan.channel if loan.reused else None, put, source, deadline)
        except BaseException as error:
            loan.give_back(error)
            if isinstance(error, Draining):
                self._nodes.closed.add(node.node_id)
            if isinstance(error, Draining) or (isinstance(error, Unavailable) and not loan.channel.is_open):
                return None  # it takes no new blocks; or it hung up, and may have begun anew
            raise
        loan.give_back()
        return self._told(node, put, flag)

    def _ask(self, node: KnownNode, address: Address, channel: Channel | None, put: _OnePut, source: memoryview, deadline: Deadline) -> int:
        """The node's answer; ASK_AGAIN, too, where it was not asked: the connection is new, or another's."""
        if channel is None or not node.route.is_meant(address, channel.welcome):
            return ASK_AGAIN
        early = self._resources.early_puts
        if put.ack == ACK_NODE:
            early.begin(node)
        reply = channel.call(put, Flags, deadline, (source,))
        if put.ack == ACK_NODE:
            early.answered(node, channel.welcome.epoch)
        return reply.flags[0] if reply.flags else ASK_AGAIN

    def _told(self, node: KnownNode, put: _OnePut, flag: int) -> bool | None:
        resources = self._resources
        if flag == STORED:
            resources.hints.learn(((put.key, Hint(node.node_id, UNRESERVED, put.size_bytes)),))
            resources.counters.add(requests=1, puts=1, bytes_out=put.size_bytes)
            return True
        if flag == ASK_AGAIN:
            return None
        resources.early_puts.has_unhinted |= put.ack == ACK_NODE
        resources.counters.add(requests=1, already_present=1)
        return False
