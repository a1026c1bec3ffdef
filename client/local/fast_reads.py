"""Reads of one value without the generators of reads/, for the blocking client.

- A block in DRAM of this host: `nodes` gives the readable local nodes; client/local/reads.py reads from them. Rows of
  `make bench`: get, get_into and exists of one key, and view.
- A small value of a remote node with a cached location: one message. Row of `make bench-transfer`: get of 4 KiB from
  another host's node.

Any other case returns None, and the caller runs the ordinary operation.
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
from kvstore.client.reads.replica_lookup import REMOTE_HINT_TTL_NS
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.node_messages import INLINE, MISS, ReadBlocks, ReadBlocksReply
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.connection_pool import ConnectionLease, ConnectionPool
from kvstore.rpc.deadline import Deadline

SMALL_BYTES: Final = 256 << 10
"""Upper bound of the fast path: for larger values, copy and hash dominate."""


class FastReads:
    """Fast path of single reads. Thread-safe. None always means: run the ordinary operation with the same deadline."""

    def __init__(
        self,
        resources: ClientResources,
        local: LocalNodes,
        reads: LocalReads,
        pool: ConnectionPool,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._local = local
        self._unmapped_slabs = reads.unmapped_slabs
        self._nodes = resources.daemons.nodes
        self._hints = resources.hints
        self._counters = resources.counters
        self._pool = pool
        self._clock_ns = clock_ns
        self._inline_bytes = int(resources.settings.get_inline_bytes)
        self._lease_ms = int(resources.settings.read_lease_s * 1000)
        self._small_bytes = min(SMALL_BYTES, int(resources.settings.engine_min_bytes) - 1)

    def nodes(self, deadline_s: float | None) -> tuple[LocalNode, ...] | None:
        """Local nodes that are readable now. None: an operation must attach to nodes first. () in a forked child."""
        if deadline_s is not None:
            check_deadline(deadline_s)
        local = self._local
        until_ns, nodes = local.cached_fresh
        if local.clock_ns() >= until_ns:
            if not local.refresh():
                return None
            nodes = local.cached_fresh[1]
        return nodes if local.process == ForkGeneration.number else ()

    def get_remote(self, nodes: tuple[LocalNode, ...] | None, key: bytes, deadline: Deadline) -> bytes | None:
        """Return a small value of a remote node. `nodes` is the result of the method of that name; the value is not in
        their DRAM."""
        hint = self._hint(nodes, key)
        if hint is None:
            return None
        value, buffer = fresh_bytes(hint.size_bytes)
        return value if self._read(key, hint, buffer, deadline) else None

    def get_remote_into(self, nodes: tuple[LocalNode, ...] | None, key: bytes, buffer: memoryview, deadline: Deadline) -> int | None:
        """As `get_remote`, into `buffer`: the value's size. None: the buffer's content is undefined."""
        hint = self._hint(nodes, key)
        if hint is None or hint.size_bytes > len(buffer):
            return None
        size_bytes = hint.size_bytes
        return size_bytes if self._read(key, hint, buffer if size_bytes == len(buffer) else buffer[:size_bytes], deadline) else None

    def _hint(self, nodes: tuple[LocalNode, ...] | None, key: bytes) -> CachedLocation | None:
        """Cached location of a small block without another replica; a replicated block has a fallback that this path
        lacks."""
        if nodes is None or self._unmapped_slabs:  # an operation attaches to local nodes and maps the slabs
            return None
        hint = self._hints.find_one(key) if type(key) is bytes else None
        if hint is None or hint.replicas > 1 or hint.size_bytes > self._small_bytes:
            return None
        is_old = hint.asked_ns and self._nodes.may_gain_better_replica and hint.asked_ns <= self._clock_ns() - REMOTE_HINT_TTL_NS
        return None if is_old else hint

    def _read(self, key: bytes, hint: CachedLocation, buffer: memoryview, deadline: Deadline) -> bool:
        """Read into `buffer` and verify: whether it succeeded."""
        node = self._nodes.get(hint.node_id)
        if node is None or (address := node.route.address()).unix:
            return False
        connection = self._pool.acquire_idle(address)
        if connection is None:
            return False
        try:
            is_read = node.route.is_meant(address, connection.channel.welcome) and self._read_blocks(
                connection, key, hint, buffer, deadline
            )
        except KVStoreError as error:
            connection.release(error)
            return False
        except BaseException:
            connection.discard()
            raise
        connection.release()
        return is_read

    def _read_blocks(
        self, connection: ConnectionLease[Channel], key: bytes, hint: CachedLocation, buffer: memoryview, deadline: Deadline
    ) -> bool:
        """Send the request and read the reply. A value that stays unread closes the channel when its lease is
        returned."""
        channel = connection.channel
        message = ReadBlocks([key], (hint.generation,), self._inline_bytes, self._lease_ms)
        blocks = channel.call(message, ReadBlocksReply, deadline)
        if len(blocks.statuses) != 1 or blocks.lease:
            connection.discard()
            return False
        status, size_bytes = blocks.statuses[0], blocks.sizes[0]
        if status == INLINE and size_bytes == len(buffer):
            channel.read_into((buffer,), deadline)
            if checksum((buffer,)) == blocks.checksums[0]:
                self._counters.read_one(blocks.tiers[0], size_bytes)
                return True
            self._counters.add(checksum_failures=1)
        elif status == MISS:
            self._counters.add(stale_hints=1, retries=1)
            self._hints.forget((key,))
        return False
