"""The asyncio client: the calls that there are. What each does is an operation (operations.py), which async_driver.py carries out."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvstore.client.async_driver import AsyncDriver
from kvstore.client.base_client import BaseClient
from kvstore.client.connections.locations import Location
from kvstore.client.holds import Hold
from kvstore.client.operations import cluster_status, stored_keys
from kvstore.client.stats import timed_async
from kvstore.client.views import AsyncView
from kvstore.protocol.errors import KVStoreError

if TYPE_CHECKING:
    pass


class AsyncClient(BaseClient):
    """Client's twin for asyncio: the same calls, awaited. Tasks of one event loop may share it; a forked child must make its own.

    A cancelled call leaves nothing behind but blocks that were already stored; it ends when the copy under way has. Copies and hashes of
    more than 256 KiB are made in threads.

    Values are C-contiguous buffers of 1 byte to 1 GiB: bytes, bytearray, memoryview, numpy array, torch tensor (CPU or CUDA), Memory (a
    pointer and a size); or lists of such buffers, whose bytes in order are one value: they go to and from the store as they lie, nothing is
    joined. They are read or filled in place and must not change until the call returns. Keys are 1 to 255 bytes.

    Every call takes `deadline_s`, the time for all of it, and raises: InvalidArgument before anything is sent; Unavailable when no
    master can be reached; DeadlineExceeded; Unauthorized; Closed; Forked. A miss is None, never an error; wrong bytes are never returned.
    """

    def _connect(self) -> None:
        self._driver = AsyncDriver(self._operations)
        self._run = self._driver.run

    @timed_async
    async def put(
        self,
        key: bytes,
        value: Any,
        *,
        namespace: Any = "",
        parent: bytes | None = None,
        ack: str | None = None,
        replicas: int = 1,
        deadline_s: float | None = None,
    ) -> bool:
        """Store a block; False if it is already there. See `put_batch`."""
        operation = self._operations.put(
            [key], [value], namespace=namespace, parents=[parent], ack=ack, deadline_s=deadline_s, replicas=replicas
        )
        return (await self._run(operation))[0]

    @timed_async
    async def put_batch(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        replicas: int = 1,
        deadline_s: float | None = None,
    ) -> list[bool]:
        """Store blocks; False for each that is already there.

        `ack` (default: the client's setting) says when it returns. "node": once the node holds the blocks, where this client reads
        them; they live as long as that process, and the cluster hears of them within milliseconds (`flush` waits for it). False then
        is said of what this node has; what another one has becomes one more replica, and where the bytes differ the cluster's win.
        The node is that of this host. Where there is none, values up to 64 KiB go to the node that the master last chose for
        their size, for a second at a time; larger ones are acknowledged as by "cluster". "cluster": once every one of them can be read
        by all. "replicas": once they are at `replicas` nodes, too.

        `replicas`: at so many nodes each block is to be, 1 to 16, of different hosts where there are as many. It is written to one of
        them, and others copy it; what was there already is copied, too. The number outlives masters, and when a node dies, or is drained,
        another one gets a copy. A replica that its node evicts is not made anew for that. With more than one, "node" is acknowledged as
        "cluster" is.

        `namespace` is a text or a kvcache Namespace; `parents` names the block before each in its prefix, None for a first one.
        Raises Full when no room was freed, CatalogUnavailable when the blocks cannot be made visible. After an error some of the
        blocks may be stored.
        """
        return await self._run(
            self._operations.put(keys, values, namespace=namespace, parents=parents, ack=ack, deadline_s=deadline_s, replicas=replicas)
        )

    @timed_async
    async def put_batch_from(
        self,
        keys: Sequence[bytes],
        values: Sequence[Any],
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        deadline_s: float | None = None,
    ) -> list[bool | KVStoreError]:
        """As `put_batch`, with a result a key in place of an exception: True if it was stored, False if it is already there, else why it
        was not: InvalidArgument for a key or value that cannot be, Full, Unavailable, DeadlineExceeded, ... One key's trouble is not the
        others'. Raises for what concerns no key: the other arguments, Forked.
        """
        operation = self._operations.put_each(keys, values, namespace=namespace, parents=parents, ack=ack, deadline_s=deadline_s)
        return await self._run(operation)

    @timed_async
    async def replace(
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
        """Store blocks in place of those that are there: `remove`, then `put_batch`. True for each that was stored; False where another one
        is there: the old one, pinned or leased (`force` takes it all the same, and its pin), or one that someone put in between.

        A reader gets the old value, or a miss, or the new one, each whole; between the two steps it is a miss, and after an error it may
        stay one. Whoever is reading the old one, by a copy or a view, has it to the end. Raises as `remove` and `put_batch`.
        """
        operation = self._operations.replace(
            keys, values, namespace=namespace, parents=parents, force=force, ack=ack, deadline_s=deadline_s
        )
        return await self._run(operation)

    @timed_async
    async def flush(self, *, deadline_s: float | None = None) -> None:
        """Come back when the cluster knows everything that this client has put so far: it is durable at the master.

        Raises DeadlineExceeded: some of it is not yet, and stays where it is. Raises Unavailable: a node that took puts is gone, and
        with it what the cluster did not know (told once), or cannot be reached.
        """
        await self._run(self._operations.flush(deadline_s=deadline_s))

    @timed_async
    async def get(self, key: bytes, *, deadline_s: float | None = None) -> bytes | None:
        """The value, None on a miss."""
        return (await self._run(self._operations.get([key], deadline_s=deadline_s)))[0]

    @timed_async
    async def get_batch(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bytes | None]:
        """The values in order, None for each miss. Raises ChecksumMismatch when every replica of a block is damaged."""
        return await self._run(self._operations.get(keys, deadline_s=deadline_s))

    @timed_async
    async def get_into(self, key: bytes, buffer: Any, *, deadline_s: float | None = None) -> int | None:
        """Read a value into the writable `buffer`, or over those of a list: its size in bytes, None on a miss. Raises InvalidArgument
        if there is too little room."""
        return (await self._run(self._operations.get_into([key], [buffer], deadline_s=deadline_s)))[0]

    @timed_async
    async def get_batch_into(self, keys: Sequence[bytes], buffers: Any, *, deadline_s: float | None = None) -> list[int | None]:
        """Read values into writable buffers, which must not overlap: sizes in bytes, None for each miss, whose buffer may be written.

        Each may be a list of buffers, over which the value goes in order. `buffers` may be one C-contiguous array or CPU tensor: its rows
        are the buffers then, and cost no object each.

        Raises InvalidArgument naming the index of a buffer that is too small, ChecksumMismatch as `get_batch`. After an error the
        content of all the buffers is undefined.
        """
        return await self._run(self._operations.get_into(keys, buffers, deadline_s=deadline_s))

    @timed_async
    async def get_each_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> list[int | KVStoreError | None]:
        """As `get_batch_into`, with a result a key in place of an exception: the size, None on a miss, else what was wrong: InvalidArgument
        for a key that is none or a buffer that is too small, ChecksumMismatch, DeadlineExceeded, ... The content of a buffer whose key
        has no size for a result is undefined. Raises for what concerns no key: `deadline_s`, Forked.
        """
        return await self._run(self._operations.get_each_into(keys, buffers, deadline_s=deadline_s))

    @timed_async
    async def get_ranges_into(
        self, keys: Sequence[bytes], offsets: Sequence[int], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> list[int | KVStoreError | None]:
        """Fill each buffer with what stands in the value of its key from its offset on, in bytes: results as `get_each_into`, the size
        being the buffer's, and InvalidArgument where the value ends before. A key may be named several times, for several ranges.

        Of values in the DRAM of this host only the ranges are copied. All others are brought here whole, each once, and checked first.
        """
        return await self._run(self._operations.get_ranges_into(keys, offsets, buffers, deadline_s=deadline_s))

    def view(self, key: bytes, *, deadline_s: float | None = None) -> AsyncView:
        """Look at a value without copying it: `async with client.view(key) as memory`. See AsyncView."""
        return AsyncView(self._operations, self._run, key, deadline_s)

    async def ping(self, *, deadline_s: float | None = None) -> float:
        """Seconds that the master which owns the catalog takes to answer, the connection included where there is none yet."""
        begin_s = time.perf_counter()
        await self._run(self._operations.ping(deadline_s=deadline_s))
        return time.perf_counter() - begin_s

    async def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """As `Client.status`; asked in a thread."""
        return await asyncio.to_thread(cluster_status, self._operations.settings, await self._run(self._operations.asking(deadline_s)))

    async def keys(self, namespace: Any = None, *, limit: int | None = None, deadline_s: float | None = None) -> list[bytes]:
        """As `Client.keys`; asked in a thread."""
        deadline = await self._run(self._operations.asking(deadline_s))
        return await asyncio.to_thread(stored_keys, self._operations.settings, deadline, namespace, limit)

    @timed_async
    async def exists(self, key: bytes, *, hold: Hold | None = None, deadline_s: float | None = None) -> bool:
        """Can the block be read now? Asking keeps no block alive, unless in the name of a `hold`: see `match_prefix`."""
        return (await self._run(self._operations.exists([key], deadline_s=deadline_s, hold=hold)))[0]

    @timed_async
    async def exists_batch(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> list[bool]:
        """Which of the blocks can be read now? Asking keeps no block alive, unless in the name of a `hold`: see `match_prefix`."""
        return await self._run(self._operations.exists(keys, deadline_s=deadline_s, hold=hold))

    @timed_async
    async def match_prefix(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> int:
        """How many of the blocks, from the first on without a gap, can be read now? `hold`: see `Client.match_prefix`."""
        return await self._run(self._operations.match_prefix(keys, deadline_s=deadline_s, hold=hold))

    @timed_async
    async def release(self, hold: Hold) -> None:
        """As `Client.release`."""
        await self._run(self._operations.release(hold))

    @timed_async
    async def locate(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[list[Location]]:
        """The replicas of each block, [] for a miss."""
        return await self._run(self._operations.locate(keys, deadline_s=deadline_s))

    @timed_async
    async def remove(self, keys: Sequence[bytes], force: bool = False, *, deadline_s: float | None = None) -> int:
        """Delete blocks everywhere; how many were there and are gone, each counted once. Pinned and leased ones stay unless `force`."""
        return await self._run(self._operations.remove(keys, force=force, deadline_s=deadline_s))

    @timed_async
    async def remove_matching(
        self, *, namespace: Any = None, pattern: str | None = None, force: bool = False, deadline_s: float | None = None
    ) -> int:
        """Delete the tenant's blocks of a namespace, or those whose keys match a pattern, or both: how many were there and are gone.

        In a pattern `*` stands for any bytes of the key, `?` for any one, `[abc]` for one of those; the rest is taken as UTF-8. One
        message: the master looks through its directory, and stops at the deadline. Pinned and leased blocks stay unless `force`, and so
        may what is put meanwhile. Raises InvalidArgument for neither a namespace nor a pattern.
        """
        return await self._run(self._operations.remove_matching(namespace, pattern, force=force, deadline_s=deadline_s))

    async def remove_all(self, namespace: Any, *, force: bool = False, deadline_s: float | None = None) -> int:
        """As `Client.remove_all`."""
        return await self.remove_matching(namespace=namespace, force=force, deadline_s=deadline_s)

    @timed_async
    async def pin(self, keys: Sequence[bytes], *, ttl_s: float | None = None, deadline_s: float | None = None) -> list[bool]:
        """Keep blocks from eviction until `unpin`; True for each that is there.

        With `ttl_s` the pin ends by itself after that time, or as soon as a master is there again. It shortens no other pin: of several
        with an end the last one counts, and one without stays.
        """
        return await self._run(self._operations.pin(keys, pinned=True, deadline_s=deadline_s, ttl_s=ttl_s))

    @timed_async
    async def unpin(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bool]:
        """Let blocks be evicted again; True for each that is there."""
        return await self._run(self._operations.pin(keys, pinned=False, deadline_s=deadline_s))

    async def shared_memory(self, *, deadline_s: float | None = None) -> dict[str, str]:
        """The nodes of this host by name, and for each why this client does not reach it through shared memory: "" where it does."""
        return await self._run(self._operations.shared_memory(deadline_s))

    async def close(self) -> None:
        """Hang up; later calls raise Closed. Views must be over. A second close is a no-op.

        What a cancelled put had reserved is given back first, if a master answers soon.
        """
        if self._operations.is_forked:
            return  # what there is to close is the other process's
        await self._driver.close()
        self._operations.close()
        if self.tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.tracing.close)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
