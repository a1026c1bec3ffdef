"""Reads of one value beside the generators of reads/, which take longer than the read itself. Only the blocking client has them.

- A block in DRAM of this host: `nodes` names the nodes whose index may be read now, and the client reads there (local/reads.py).
  `make bench` has the rows: get, get_into and exists of one key, and view.
- A small value of another host's node whose place is known: one message. `make bench-transfer` has the row: get of 4 KiB from another
  host's node.

What is out of the ordinary is left to the operations, from the beginning.
"""

import time
from collections.abc import Callable
from typing import Final

from kvstore.client.connections.locations import CachedLocation
from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.arguments import check_deadline
from kvstore.client.core.buffers import fresh_bytes
from kvstore.client.core.forks import ForkGeneration
from kvstore.client.local.nodes import LocalNode, LocalNodes
from kvstore.client.local.reads import LocalReads
from kvstore.client.memory import checksum
from kvstore.client.reads.replica_lookup import FAR_HINT_NS
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.node_messages import INLINE, MISS, ReadBlocks, ReadBlocksReply
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.connection_pool import ConnectionLease, ConnectionPool
from kvstore.rpc.deadline import Deadline

SMALL_BYTES: Final = 256 << 10
"""Of larger values the copy and the hash are what takes time."""


class FastReads:
    """See the module. Thread-safe. None always means: to be read by an operation, in what is left of the deadline."""

    def __init__(
        self,
        resources: ClientResources,
        local: LocalNodes,
        reads: LocalReads,
        pool: ConnectionPool,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._local = local
        self._wanted = reads.wanted
        self._nodes = resources.daemons.nodes
        self._hints = resources.hints
        self._counters = resources.counters
        self._pool = pool
        self._clock_ns = clock_ns
        self._inline_bytes = int(resources.settings.get_inline_bytes)
        self._lease_ms = int(resources.settings.read_lease_s * 1000)
        self._small_bytes = min(SMALL_BYTES, int(resources.settings.engine_min_bytes) - 1)

    def nodes(self, deadline_s: float | None) -> tuple[LocalNode, ...] | None:
        """The nodes of this host that can be read without asking. None: they are to be asked first, by an operation."""
        if deadline_s is not None:
            check_deadline(deadline_s)
        local = self._local
        until_ns, nodes = local.at_hand
        if local.clock_ns() >= until_ns:
            if not local.renew():
                return None
            nodes = local.at_hand[1]
        return nodes if local.process == ForkGeneration.number else ()

    def get_remote(self, nodes: tuple[LocalNode, ...] | None, key: bytes, deadline: Deadline) -> bytes | None:
        """The value, if it is a small one of another host's node. `nodes` as the method gave them: the value is not in their DRAM."""
        hint = self._hint(nodes, key)
        if hint is None:
            return None
        value, room = fresh_bytes(hint.size_bytes)
        return value if self._read(key, hint, room, deadline) else None

    def get_remote_into(self, nodes: tuple[LocalNode, ...] | None, key: bytes, room: memoryview, deadline: Deadline) -> int | None:
        """As `get_remote`: the size of a value that is in `room` now. None: its content is undefined."""
        hint = self._hint(nodes, key)
        if hint is None or hint.size_bytes > len(room):
            return None
        size_bytes = hint.size_bytes
        return size_bytes if self._read(key, hint, room if size_bytes == len(room) else room[:size_bytes], deadline) else None

    def _hint(self, nodes: tuple[LocalNode, ...] | None, key: bytes) -> CachedLocation | None:
        """Where a block is, if it is small and nowhere else: of several replicas another is asked when the first does not answer."""
        if nodes is None or self._wanted:  # an operation looks for the nodes of this host, and maps what was found there
            return None
        hint = self._hints.find_one(key) if type(key) is bytes else None
        if hint is None or hint.replicas > 1 or hint.size_bytes > self._small_bytes:
            return None
        is_old = hint.asked_ns and self._nodes.may_come_nearer and hint.asked_ns <= self._clock_ns() - FAR_HINT_NS
        return None if is_old else hint

    def _read(self, key: bytes, hint: CachedLocation, room: memoryview, deadline: Deadline) -> bool:
        """Whether the value is in its room, and right."""
        node = self._nodes.get(hint.node_id)
        if node is None or (address := node.route.address()).unix:
            return False
        loan = self._pool.acquire_idle(address)
        if loan is None:
            return False
        try:
            is_read = node.route.is_meant(address, loan.channel.welcome) and self._ask(loan, key, hint, room, deadline)
        except KVStoreError as error:
            loan.release(error)
            return False
        except BaseException:
            loan.discard()
            raise
        loan.release()
        return is_read

    def _ask(self, loan: ConnectionLease[Channel], key: bytes, hint: CachedLocation, room: memoryview, deadline: Deadline) -> bool:
        """Raises as the channel does. A value that has not been read from it closes it, once it is given back."""
        channel = loan.channel
        message = ReadBlocks([key], (hint.generation,), self._inline_bytes, self._lease_ms)
        blocks = channel.call(message, ReadBlocksReply, deadline)
        if len(blocks.statuses) != 1 or blocks.lease:
            loan.discard()
            return False
        status, size_bytes = blocks.statuses[0], blocks.sizes[0]
        if status == INLINE and size_bytes == len(room):
            channel.read_into((room,), deadline)
            if checksum((room,)) == blocks.checksums[0]:
                self._counters.read_one(blocks.tiers[0], size_bytes)
                return True
            self._counters.add(checksum_failures=1)
        elif status == MISS:
            self._counters.add(stale_hints=1, retries=1)
            self._hints.forget((key,))
        return False
