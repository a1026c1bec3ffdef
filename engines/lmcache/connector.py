"""kvstore as a remote storage plug-in of LMCache within an engine's process, named in its configuration:

    remote_storage_plugins: ["kvstore"]
    extra_config:
      remote_storage_plugin.kvstore.module_path: kvstore.engines.lmcache.connector
      remote_storage_plugin.kvstore.class_name: KVStoreConnectorAdapter
      remote_storage_plugin.kvstore.master: 127.0.0.1:7440

Other entries are settings of LMCacheSettings. This module imports LMCache; only LMCache imports it.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from lmcache.utils import TORCH_DTYPE_TO_STR_DTYPE, CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.lmcache.keys import ChunkKeys, by_namespace
from kvstore.engines.lmcache.settings import element_type, from_extra_config
from kvstore.engines.reachability import ReachabilityCheck
from kvstore.engines.retention import RetentionReader
from kvstore.engines.weights.identity import identify
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.retention import Retention

log = logging.getLogger("kvstore.engines.lmcache")

PLUG_IN: Final = "kvstore"
SCHEME: Final = "plugin://"
RETENTION: Final = "lmcache.retention"
"""Member of vLLM's `kv_transfer_params` with retention hints: LMCache passes on those with this prefix only."""
PING_KEY: Final = b"lmcache:ping"
"""Key of no block: a miss proves that the store responds."""


class KVStoreConnectorAdapter(ConnectorAdapter):
    """Factory of the connector for plug-ins named `kvstore` or `kvstore.NAME`."""

    def can_parse(self, url: str) -> bool:
        return url.startswith(SCHEME) and extract_plugin_type(url.removeprefix(SCHEME)) == PLUG_IN

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        return KVStoreConnector(context)


class KVStoreConnector(RemoteConnector):
    """Chunks of an engine's LMCache as blocks of the store. LMCache's event loop calls the coroutines, any thread the
    other methods.

    Errors of the store are never raised: chunks become misses, and failed stores are logged. A job holds references to
    its memory until it ends, even if its caller was cancelled.
    """

    def __init__(self, context: ConnectorContext) -> None:
        """Compute the checkpoint's fingerprint if LMCache's model name is its path or hub name. The store may start
        later.

        Raises:
            ConfigError: invalid settings, unreadable weights, or an element type that LMCache does not name.
        """
        config = context.config
        super().__init__(config, context.metadata)
        settings = from_extra_config(config.extra_config or {}, context.plugin_name or PLUG_IN)
        element_type(settings, TORCH_DTYPE_TO_STR_DTYPE[context.metadata.kv_dtype])
        self._settings = settings
        self._loop = context.loop
        self._allocator = context.local_cpu_backend
        weights = identify(context.metadata.model_name, settings.fingerprint, revision=settings.revision, log=log)
        self._names = ChunkKeys(dataclasses.replace(settings, revision=weights.text))
        # LMCache's keys have the rank and number of ranks: those of TP 2 and PP 2 are equal, and so are their chunks' sizes.
        self._form = f"{config.remote_serde}{', header' if self.save_chunk_meta else ''}, shape {tuple(context.metadata.kv_shape)}"
        client = Client(settings=settings.client())
        self._client = client
        self._jobs = Jobs(client, settings.jobs())
        self._check = ReachabilityCheck(client, settings.master, log)
        self._hints = RetentionReader(settings, log)

    # --- existence ---

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Return how many leading chunks exist without a gap."""
        return self._jobs.match_prefix(self._keys(keys))

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """As `batched_contains`. Does not pin: a chunk that is evicted before it is read is a miss."""
        return (await self._ended(partial(self._jobs.lookup_prefix, self._keys(keys)))).leading

    # --- puts ---

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[CacheEngineKey], memory_objs: list[MemoryObj]) -> None:
        names = self._keys(keys)
        values = [[self._header(each), each.byte_array] for each in memory_objs]
        hint = self._hint(keys)
        for namespace, indices in by_namespace(map(self._name, keys)).items():
            store = partial(
                self._jobs.store,
                [names[index] for index in indices],
                [values[index] for index in indices],
                namespace=namespace,
                retention=hint,
            )
            job = await self._ended(store, [memory_objs[index] for index in indices])
            if job.error is not None:
                log.warning("%d of %d chunks were not stored: %s", job.succeeded.count(False), len(indices), job.error)

    # --- gets ---

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Return memory for each key, whose reference the caller owns; None for a miss, or if LMCache has no memory."""
        named = self._keys(keys)
        objects = [self._allocator.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt) for _ in keys]
        wanted = [index for index, each in enumerate(objects) if each is not None]
        memory = [objects[index] for index in wanted]
        headers = [bytearray(self.remote_metadata_bytes if self.save_chunk_meta else 0) for _ in wanted]
        buffers = [
            [header, each.byte_array] if self.save_chunk_meta else each.byte_array for header, each in zip(headers, memory, strict=True)
        ]
        names = [named[index] for index in wanted]
        try:
            load = partial(self._jobs.load, names, buffers, retention=self._hint(keys))
            job = await self._ended(load, memory)
        except BaseException:
            for each in memory:
                each.ref_count_down()
            raise
        found: list[MemoryObj | None] = [None] * len(keys)
        for index, each, header, size in zip(wanted, memory, headers, job.results, strict=True):
            found[index] = self._chunk(each, header, size) if isinstance(size, int) else None
            if found[index] is not each:
                each.ref_count_down()
        return found

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """Return the chunks before the first miss."""
        found = await self.batched_get(keys)
        first_miss = found.index(None) if None in found else len(found)
        for each in found[first_miss:]:
            if each is not None:
                each.ref_count_down()
        return [each for each in found[:first_miss] if each is not None]

    # --- other calls ---

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Remove a chunk; return whether it existed and is removed. A chunk that another engine put milliseconds ago
        may stay."""
        names = self._keys([key])
        if not any(self._jobs.exists(names)):
            return False
        try:
            self._client.flush(deadline_s=self._settings.load_deadline_s)
            return self._client.remove(names, deadline_s=self._settings.load_deadline_s) == 1
        except Exception:
            log.exception("a chunk could not be removed")
            return False

    async def list(self) -> Sequence[str]:
        """Return nothing: chunk names cannot be recovered from the store's keys."""
        return []

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """Return 0 if the store responds, else the error's code."""
        job = await self._ended(partial(self._jobs.lookup, [PING_KEY]))
        return 0 if job.error is None else job.error.code

    async def close(self) -> None:
        """Cancel jobs under way and disconnect, without blocking LMCache's loop."""
        await self._loop.run_in_executor(None, self._check.close)
        await self._loop.run_in_executor(None, self._jobs.close)
        self._client.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _name(self, key: CacheEngineKey) -> tuple[Namespace, bytes]:
        return self._names.of_chunk(key, element_type(self._settings, TORCH_DTYPE_TO_STR_DTYPE[key.dtype]), self._form)

    def _keys(self, keys: Sequence[CacheEngineKey]) -> Sequence[bytes]:
        return [self._name(key)[1] for key in keys]

    def _hint(self, keys: Sequence[CacheEngineKey]) -> Retention | None:
        """Return the hint of the request whose chunks these are."""
        hints = self._hints.read(keys[0].request_configs, RETENTION) if keys else None
        return hints.of_unknown if hints is not None else None

    def _header(self, memory_obj: MemoryObj) -> bytes:
        if not self.save_chunk_meta:
            return b""
        shapes, dtypes = memory_obj.get_shapes(), memory_obj.get_dtypes()
        header: bytes = RemoteMetadata(memory_obj.get_size(), shapes, dtypes, memory_obj.get_memory_format()).serialize()
        return header

    def _chunk(self, memory_obj: MemoryObj, header: bytearray, size: int) -> MemoryObj | None:
        """Return the chunk that was read into memory of a full chunk: the same memory, or a copy if its shape or
        format differs. None: invalid header."""
        try:
            if not self.save_chunk_meta:
                return self.reshape_partial_chunk(memory_obj, size)
            found = RemoteMetadata.deserialize(bytes(header))
            if found.length + len(header) != size:
                return None
            if (found.shapes, found.dtypes, found.fmt) == (self.meta_shapes, self.meta_dtypes, self.meta_fmt):
                return memory_obj
            other = self._allocator.allocate(found.shapes, found.dtypes, found.fmt)
            if other is not None:
                place, bytes_there = (memoryview(each.byte_array).cast("B") for each in (other, memory_obj))
                if len(place) != found.length or found.length > len(bytes_there):
                    other.ref_count_down()
                    return None
                place[:] = bytes_there[: found.length]
            return other
        except Exception:
            log.exception("a chunk does not match its header")
            return None

    async def _ended(self, submit: Callable[..., object], memory: Sequence[MemoryObj] = ()) -> Job:
        """Submit a job and wait for it. Its memory stays referenced until the job ends, even if this coroutine is
        cancelled."""
        ended: asyncio.Future[Job] = self._loop.create_future()

        def end(job: Job) -> None:
            for each in memory:
                each.ref_count_down()
            if not ended.done():
                ended.set_result(job)

        def on_done(job: Job) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and LMCache's memory with it
                self._loop.call_soon_threadsafe(end, job)

        for each in memory:
            each.ref_count_up()
        submit(on_done=on_done)
        return await ended
