"""`Client`: the public methods. Each runs an operation (operations.py) on the blocking driver (driver.py)."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvstore.client.base_client import BaseClient
from kvstore.client.connections.locations import Location
from kvstore.client.core.buffers import as_destination, plain_memory
from kvstore.client.driver import Driver
from kvstore.client.holds import Hold
from kvstore.client.local.fast_puts import LocalPuts, SlotPuts
from kvstore.client.local.fast_reads import FastReads
from kvstore.client.operations import cluster_status, stored_keys
from kvstore.client.stats import timed
from kvstore.client.views import View
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.retention import Retention

if TYPE_CHECKING:
    pass


class Client(BaseClient):
    """Blocking client: puts and gets blocks. Thread-safe. In a forked child all calls raise Forked and `close` does
    nothing: create a client there.

    Values are C-contiguous buffers of 1 byte to 1 GiB: bytes, bytearray, memoryview, numpy array, torch tensor (CPU or
    CUDA), or Memory (a pointer and a size). A list of buffers is one value, their bytes in order, without a copy to
    join them. Buffers are read or filled in place and must not change until the call returns. Keys are 1 to 255 bytes.

    Every call takes `deadline_s`, the time for the whole call. It raises InvalidArgument before anything is sent;
    Unavailable when no master can be reached; DeadlineExceeded; Unauthorized; Closed; Forked. A miss is None, never an
    error; wrong bytes are never returned.
    """

    def _connect(self) -> None:
        resources, local = self._operations.resources, self._operations.local
        self._local_reads = self._operations.local_reads
        self._driver = Driver(self._operations)
        self._run = self._driver.run
        self._fast = FastReads(resources, local, self._local_reads, self._driver.pool)
        self._local_puts = LocalPuts(resources, self._driver.pool, SlotPuts(resources, local, self._run))

    def put(
        self,
        key: bytes,
        value: Any,
        *,
        namespace: Any = "",
        parent: bytes | None = None,
        ack: str | None = None,
        replicas: int = 1,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> bool:
        """Store a block; False if it is already there. See `put_batch`."""
        timings = self._timings
        timings.untimed -= 1
        if timings.untimed < 0:
            options: dict[str, Any] = {"namespace": namespace, "parent": parent, "ack": ack, "replicas": replicas}
            options.update(retention=retention, deadline_s=deadline_s)
            return timings.sample("put", lambda: Client.put(self, key, value, **options))
        deadline = self._operations.deadline(deadline_s)
        if retention is None and type(replicas) is int and replicas == 1:
            stored = self._local_puts.put(key, value, namespace, parent, ack, deadline)
            if stored is not None:
                return stored
        operation = self._operations.put(
            [key],
            [value],
            namespace=namespace,
            parents=[parent],
            ack=ack,
            deadline_s=deadline,
            replicas=replicas,
            retention=retention,
        )
        return self._run(operation)[0]

    @timed
    def put_batch(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        replicas: int = 1,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> list[bool]:
        """Store blocks; False for each that is already there.

        `values` may be one C-contiguous array or CPU tensor, whose rows are the values, without an object per row.

        `ack` (default: the client's setting) chooses the acknowledgement:

        - "node": the local node holds the blocks, and this client reads them there. They are uncommitted: lost if that
          process dies, and committed to the directory within milliseconds (`flush` waits for it). False then means that
          this node has the block; a block of another node becomes a further replica, and if the bytes differ, the
          committed ones win. Without a local node, values up to 64 KiB go to the node that the master last chose for
          their size, for a second at a time; larger ones are acknowledged as by "cluster".
        - "cluster": all clients can read every block.
        - "replicas": as "cluster", and each block has `replicas` replicas.

        `replicas` is the replica target, 1 to 16, on different hosts if possible. The block is written to one node, and
        the others copy it; existing blocks are copied too. The target outlives masters: a replica whose node dies or is
        drained is replaced. A replica that its node evicts is not. With a target above 1, "node" acts as "cluster".

        `namespace` is a text or a kvcache Namespace; `parents` gives the preceding block of each, None for a first one.
        `retention` is a hint for the order of eviction, sent to the node after the put: see `retain`. A hint that is
        lost does not fail the put; `lost_retention_hints` of `stats` counts its blocks.

        Raises Full if no space was freed, CatalogUnavailable if the blocks cannot be committed. After an error some of
        the blocks may be stored.
        """
        return self._run(
            self._operations.put(
                keys,
                values,
                namespace=namespace,
                parents=parents,
                ack=ack,
                deadline_s=deadline_s,
                replicas=replicas,
                retention=retention,
            )
        )

    @timed
    def put_batch_from(
        self,
        keys: Sequence[bytes],
        values: Sequence[Any],
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> list[bool | KVStoreError]:
        """As `put_batch`, with a result per key instead of an exception: True if stored, False if already there, else
        the error.

        Errors are InvalidArgument for a malformed key or value, Full, Unavailable, DeadlineExceeded, ... Keys fail
        independently. Raises for the other arguments, and Forked.
        """
        operation = self._operations.put_each(
            keys, values, namespace=namespace, parents=parents, ack=ack, deadline_s=deadline_s, retention=retention
        )
        return self._run(operation)

    @timed
    def replace(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        force: bool = False,
        ack: str | None = None,
        deadline_s: float | None = None,
    ) -> list[bool]:
        """Replace blocks: `remove`, then `put_batch`. True for each that was stored.

        False if another block is there: the old one, pinned or leased (`force` removes it nevertheless, with its pin),
        or one that was put in between. Concurrent readers get the old value, a miss, or the new value, never a mix;
        after an error the key may stay a miss. A copy or view in progress keeps the old value. Raises as `remove` and
        `put_batch`.
        """
        operation = self._operations.replace(
            keys, values, namespace=namespace, parents=parents, force=force, ack=ack, deadline_s=deadline_s
        )
        return self._run(operation)

    @timed
    def flush(self, *, deadline_s: float | None = None) -> None:
        """Wait until everything that this client has put is committed to the directory, and durable there.

        Raises DeadlineExceeded: some puts are not committed yet, and stay where they are. Raises Unavailable: a node
        was lost with uncommitted blocks (reported once), or is unreachable.
        """
        self._run(self._operations.flush(deadline_s=deadline_s))

    def get(self, key: bytes, *, retention: Retention | None = None, deadline_s: float | None = None) -> bytes | None:
        """Return the value, or None on a miss. `retention`, here and in the other gets: a hint for the blocks that were
        found, sent after the read; see `retain`."""
        timings = self._timings
        timings.untimed -= 1
        if timings.untimed < 0:
            return timings.sample("get", lambda: Client.get(self, key, retention=retention, deadline_s=deadline_s))
        if retention is not None:
            return self._run(self._operations.get([key], deadline_s=deadline_s, retention=retention))[0]
        nodes = self._fast.nodes(deadline_s)
        if nodes:
            value = self._local_reads.get(nodes, key)
            if value is not None:
                return value
        deadline = self._operations.deadline(deadline_s)
        value = self._fast.get_remote(nodes, key, deadline)
        return value if value is not None else self._run(self._operations.get([key], deadline_s=deadline))[0]

    @timed
    def get_batch(
        self, keys: Sequence[bytes], *, retention: Retention | None = None, deadline_s: float | None = None
    ) -> list[bytes | None]:
        """Return the values in order, None for each miss. Raises ChecksumMismatch when every replica of a block is
        damaged."""
        return self._run(self._operations.get(keys, deadline_s=deadline_s, retention=retention))

    def get_into(self, key: bytes, buffer: Any, *, retention: Retention | None = None, deadline_s: float | None = None) -> int | None:
        """Read a value into the writable `buffer`, or across a list of buffers: its size in bytes, None on a miss.

        Raises InvalidArgument if the value does not fit.
        """
        timings = self._timings
        timings.untimed -= 1
        if timings.untimed < 0:
            return timings.sample("get_into", lambda: Client.get_into(self, key, buffer, retention=retention, deadline_s=deadline_s))
        if retention is not None:
            return self._run(self._operations.get_into([key], [buffer], deadline_s=deadline_s, retention=retention))[0]
        view, finish = plain_memory(buffer), None
        if view is None:
            destination = as_destination(buffer)
            if len(destination.parts) > 1:
                return self._run(self._operations.get_into([key], [buffer], deadline_s=deadline_s))[0]
            [view], finish = destination.parts, destination.finish
        nodes = self._fast.nodes(deadline_s)
        if nodes:
            size = self._local_reads.get_into(nodes, key, view)
            if size is not None:
                if finish is not None:
                    finish()
                return size
        deadline = self._operations.deadline(deadline_s)
        size = self._fast.get_remote_into(nodes, key, view, deadline)
        if size is None:
            return self._run(self._operations.get_into([key], [buffer], deadline_s=deadline))[0]
        if finish is not None:
            finish()
        return size

    @timed
    def get_batch_into(
        self, keys: Sequence[bytes], buffers: Any, *, retention: Retention | None = None, deadline_s: float | None = None
    ) -> list[int | None]:
        """Read values into writable buffers, which must not overlap: sizes in bytes, None for each miss, whose buffer
        may be written.

        A buffer may be a list of buffers, filled in order. `buffers` may be one C-contiguous array or CPU tensor, whose
        rows are the buffers, without an object per row.

        Raises InvalidArgument naming the index of a buffer that is too small, ChecksumMismatch as `get_batch`. After an
        error the content of all buffers is undefined.
        """
        return self._run(self._operations.get_into(keys, buffers, deadline_s=deadline_s, retention=retention))

    @timed
    def get_each_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, retention: Retention | None = None, deadline_s: float | None = None
    ) -> list[int | KVStoreError | None]:
        """As `get_batch_into`, with a result per key instead of an exception: the size, None on a miss, else the error.

        Errors are InvalidArgument for a malformed key or a buffer that is too small, ChecksumMismatch,
        DeadlineExceeded, ... A buffer's content is undefined unless its result is a size. Raises for `deadline_s`, and
        Forked.
        """
        return self._run(self._operations.get_each_into(keys, buffers, deadline_s=deadline_s, retention=retention))

    @timed
    def get_ranges_into(
        self,
        keys: Sequence[bytes],
        offsets: Sequence[int],
        buffers: Sequence[Any],
        *,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> list[int | KVStoreError | None]:
        """Fill each buffer from the value of its key, starting at an offset in bytes. Results as `get_each_into`.

        The size is the buffer's; InvalidArgument if the value ends before. A key may be repeated for several ranges.
        Only the ranges of local values in DRAM are copied; other values are fetched whole, once each, and verified.
        """
        return self._run(self._operations.get_ranges_into(keys, offsets, buffers, deadline_s=deadline_s, retention=retention))

    def view(self, key: bytes, *, deadline_s: float | None = None) -> View:
        """View of a value without a copy: `with client.view(key) as memory`. See View."""
        return View(self._operations, self._run, self._fast, key, deadline_s)

    def ping(self, *, deadline_s: float | None = None) -> float:
        """Round-trip time in seconds to the masters that own the catalog, including a connection if none is open."""
        begin_s = time.perf_counter()
        self._run(self._operations.ping(deadline_s=deadline_s))
        return time.perf_counter() - begin_s

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Status of the cluster: nodes, tiers, blocks, counters, as printed by `kvstore status --json`."""
        return cluster_status(self._operations.settings, self._run(self._operations.begin_control_call(deadline_s)))

    def keys(self, namespace: Any = None, *, limit: int | None = None, deadline_s: float | None = None) -> list[bytes]:
        """The tenant's keys, unordered, of one namespace or of all (None); at most `limit`. For inspection: the master
        scans its directory, and all keys are returned at once."""
        return stored_keys(self._operations.settings, self._run(self._operations.begin_control_call(deadline_s)), namespace, limit)

    def exists(self, key: bytes, *, hold: Hold | None = None, deadline_s: float | None = None) -> bool:
        """Return whether the block is readable now. A lookup does not protect it from eviction, unless with a `hold`: see
        `match_prefix`."""
        if hold is not None:
            return (self._run(self._operations.exists([key], deadline_s=deadline_s, hold=hold)))[0]
        timings = self._timings
        timings.untimed -= 1
        if timings.untimed < 0:
            return timings.sample("exists", lambda: Client.exists(self, key, deadline_s=deadline_s))
        nodes = self._fast.nodes(deadline_s)
        if nodes and self._local_reads.exists(nodes, key):
            return True
        return self._run(self._operations.exists([key], deadline_s=deadline_s))[0]

    @timed
    def exists_batch(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> list[bool]:
        """Return which blocks are readable now. A lookup does not protect them from eviction, unless with a `hold`: see
        `match_prefix`."""
        return self._run(self._operations.exists(keys, deadline_s=deadline_s, hold=hold))

    @timed
    def match_prefix(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> int:
        """Return the number of leading blocks that are readable now.

        With a `hold` (`new_hold`) these are neither evicted nor demoted until `release`, or for the hold's duration.
        Several lookups may share one hold. A node holds at most a tenth of a tier, and a tenth of the tenant's quota
        there; further blocks are found without being held, and counted (`unheld_blocks` of `stats`). A hold ends early
        on `remove` with `force`, on a lowered quota, on a put that can evict nothing else, and with this client.
        """
        return self._run(self._operations.match_prefix(keys, deadline_s=deadline_s, hold=hold))

    @timed
    def release(self, hold: Hold) -> None:
        """End a hold of this client, once its blocks are loaded or not needed. Unknown and expired holds are ignored.
        Does not block: remote nodes are notified in the background. Raises Forked."""
        self._run(self._operations.release(hold))

    @timed
    def prefetch(self, keys: Sequence[bytes], to: str = "dram", *, deadline_s: float | None = None) -> int:
        """Have this host's node bring blocks into its DRAM in the background; return how many it has queued or requested
        from other nodes. Returns at once, before any block has arrived.

        `to` is "dram": the node's blocks on NVMe are copied into its DRAM, and blocks that it lacks are copied from
        other nodes. "local": only the latter. `keys` are at most 16,384, in the order in which they are needed.

        It is a hint. Blocks that are in DRAM already or nowhere are ignored. At most 1/16 of the node's DRAM may hold
        unread prefetched blocks; from the first block beyond that on, and while the node drains, it
        refuses blocks and counts them. A prefetch is no access: a block that is not read counts as wasted
        (docs/metrics.md). Raises Unavailable without a node on this host.
        """
        return self._run(self._operations.prefetch(keys, to=to, deadline_s=deadline_s))

    @timed
    def retain(self, keys: Sequence[bytes], retention: Retention, *, deadline_s: float | None = None) -> int:
        """Apply a hint for the order of eviction to blocks, wherever they are; return how many have it now.

        Of several hints on a block the highest live priority counts; of those with a `ttl_s` only one is kept, the
        highest. A hint moves with its block between tiers, and to copies at other nodes. It reorders the tenant's own
        evictions only, and does not survive a restart of the node. Blocks that are nowhere, and nodes that do not
        answer, are not counted. Needs permission to put; the hint of a get does not, but cannot lower a priority then.
        """
        return self._run(self._operations.retain(keys, retention, deadline_s=deadline_s))

    @timed
    def end_session(self, session: str, *, deadline_s: float | None = None) -> int:
        """End a session named in hints: its blocks are evicted first, except those that other sessions used. Return their
        number, over all nodes.

        A block belongs to the session that put it; `retain` gives a session the blocks that have none. Another session
        that puts or gets a block keeps it from being freed; calls without a session do not. Needs permission to put.
        Raises Unavailable once the others have ended it, if a node does not answer.
        """
        return self._run(self._operations.end_session(session, deadline_s=deadline_s))

    @timed
    def locate(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[list[Location]]:
        """Return the replicas of each block, [] for a miss."""
        return self._run(self._operations.locate(keys, deadline_s=deadline_s))

    @timed
    def remove(self, keys: Sequence[bytes], force: bool = False, *, deadline_s: float | None = None) -> int:
        """Delete blocks everywhere; return how many existed, each counted once. Pinned and leased ones stay unless
        `force`."""
        return self._run(self._operations.remove(keys, force=force, deadline_s=deadline_s))

    @timed
    def remove_matching(
        self, *, namespace: Any = None, pattern: str | None = None, force: bool = False, deadline_s: float | None = None
    ) -> int:
        """Delete the tenant's blocks of a namespace, or with keys that match a pattern, or both; return how many were
        deleted.

        In a pattern `*` matches any bytes, `?` any one byte, `[abc]` one of those; the rest is UTF-8. The master scans
        its directory, and stops at the deadline. Pinned and leased blocks stay unless `force`; blocks put meanwhile may
        stay. Raises InvalidArgument without namespace and pattern.
        """
        return self._run(self._operations.remove_matching(namespace, pattern, force=force, deadline_s=deadline_s))

    def remove_all(self, namespace: Any, *, force: bool = False, deadline_s: float | None = None) -> int:
        """Delete the tenant's blocks of a namespace; return how many were deleted. See `remove_matching`."""
        return self.remove_matching(namespace=namespace, force=force, deadline_s=deadline_s)

    @timed
    def pin(self, keys: Sequence[bytes], *, ttl_s: float | None = None, deadline_s: float | None = None) -> list[bool]:
        """Keep blocks from eviction until `unpin`; True for each that is there.

        With `ttl_s` the pin expires after that time, or once a master is available again. It shortens no other pin:
        among pins with a ttl the last one counts, and one without a ttl stays.
        """
        return self._run(self._operations.pin(keys, pinned=True, deadline_s=deadline_s, ttl_s=ttl_s))

    @timed
    def unpin(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bool]:
        """Allow eviction again; True for each block that is there."""
        return self._run(self._operations.pin(keys, pinned=False, deadline_s=deadline_s))

    def shared_memory(self, *, deadline_s: float | None = None) -> dict[str, str]:
        """Local nodes by name, with the reason why shared memory is not used, "" if it is."""
        return self._run(self._operations.shared_memory(deadline_s))

    def close(self) -> None:
        """Close all connections; later calls raise Closed. Views must have ended. A second close is a no-op.

        Reservations of an interrupted put are cancelled first, if a master replies soon.
        """
        if self._operations.is_forked:
            return  # the connections are the parent process's
        self._driver.close()
        self._operations.close()
        if self.tracing is not None:
            self.tracing.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
