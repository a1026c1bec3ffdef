"""Run by LMCache's environment: its own storage backends, made as an engine's LMCache does, with our connector behind the remote one.

Chunks are named by numbers, and full of one number each.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend import CreateStorageBackends

LAYERS, CHUNK_TOKENS, HEADS, HEAD_SIZE = 4, 16, 2, 32
WAIT_S = 60.0


class Child:
    def __init__(self, config: str) -> None:
        options = json.loads(config)
        self.dtype = getattr(torch, options.pop("dtype", "float32"))
        layers, heads = options.pop("split", (LAYERS, HEADS))
        shape = (layers, 2, CHUNK_TOKENS, heads, HEAD_SIZE)
        metadata = LMCacheMetadata("some/model", 1, 1, 0, 0, self.dtype, shape, role="worker", chunk_size=CHUNK_TOKENS)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        backends = CreateStorageBackends(LMCacheEngineConfig.from_defaults(chunk_size=CHUNK_TOKENS, **options), metadata, loop, "cpu")
        self.local = backends["LocalCPUBackend"]
        (self.remote,) = (backend for name, backend in backends.items() if name.startswith("RemoteBackend"))
        self.loop = loop

    def key(self, name: int, tag: str | None = None, hint: Any = None) -> CacheEngineKey:
        """`hint`: retention hint of the request that the chunk is of."""
        configs = {"lmcache.tag.user": tag, "lmcache.retention": hint}
        return CacheEngineKey("some/model", 1, 0, name, self.dtype, {key: value for key, value in configs.items() if value} or None)

    def memory(self, tokens: int, fill: float) -> MemoryObj:
        obj = self.local.allocate(torch.Size([2, LAYERS, tokens, HEADS * HEAD_SIZE]), self.dtype, MemoryFormat.KV_2LTD)
        obj.tensor.fill_(fill)
        return obj

    def put(self, names: list[int], tokens: list[int], tag: str | None = None, hint: Any = None) -> Any:
        """Chunks of so many tokens; how many references to their memory are left once they are stored."""
        objects = [self.memory(count, name) for name, count in zip(names, tokens, strict=True)]
        left, done = [len(names)], threading.Event()

        def count(key: CacheEngineKey) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        self.remote.batched_submit_put_task([self.key(name, tag, hint) for name in names], objects, on_complete_callback=count)
        told = done.wait(WAIT_S)
        references = [each.get_ref_count() for each in objects]
        for each in objects:
            each.ref_count_down()
        return {"told": told, "references": references}

    def get(self, names: list[int], tag: str | None = None, hint: Any = None) -> Any:
        """For each [tokens, the number it is full of], None for a miss."""
        return [self.seen(each) for each in self.remote.batched_get_blocking([self.key(name, tag, hint) for name in names])]

    def get_one(self, name: int) -> Any:
        return self.seen(self.remote.get_blocking(self.key(name)))

    def prefetch(self, names: list[int]) -> Any:
        getting = self.remote.batched_get_non_blocking("lookup", [self.key(name) for name in names])
        return [self.seen(each) for each in asyncio.run_coroutine_threadsafe(getting, self.loop).result(WAIT_S)]

    def seen(self, obj: MemoryObj | None) -> Any:
        if obj is None:
            return None
        tensor = obj.tensor
        values = tensor.unique().tolist()
        references = obj.get_ref_count()
        obj.ref_count_down()
        return [tensor.shape[2], values[0] if len(values) == 1 else None, references]

    def contains(self, names: list[int], tag: str | None = None) -> Any:
        keys = [self.key(name, tag) for name in names]
        looking = self.remote.batched_async_contains("lookup", keys)
        found = asyncio.run_coroutine_threadsafe(looking, self.loop).result(WAIT_S)
        return {"one": [self.remote.contains(key) for key in keys], "leading": self.remote.batched_contains(keys), "async": found}

    def remove(self, name: int) -> Any:
        return self.remote.remove(self.key(name))

    def ping(self) -> Any:
        return asyncio.run_coroutine_threadsafe(self.remote.connection.ping(), self.loop).result(WAIT_S)

    def cancelled_get(self, name: int) -> Any:
        """Cancel a get of a chunk right after its start. Return the final reference count of its memory."""
        with self.noticed() as asked:

            async def get_and_stop() -> None:
                getting = asyncio.ensure_future(self.remote.connection.batched_get([self.key(name)]))
                await asyncio.sleep(0)
                getting.cancel()
                await asyncio.gather(getting, return_exceptions=True)
                while asked[0].get_ref_count():
                    await asyncio.sleep(0)

            asyncio.run_coroutine_threadsafe(get_and_stop(), self.loop).result(WAIT_S)
        return asked[0].get_ref_count()

    def get_misdescribed(self, name: int, tokens: int) -> Any:
        """Get a chunk whose header claims `tokens` tokens. Return the chunk and the final reference counts of the memory made for it."""
        deserialize = RemoteMetadata.deserialize

        def other(header: bytes) -> RemoteMetadata:
            found = deserialize(header)
            found.shapes = [torch.Size([2, LAYERS, tokens, HEADS * HEAD_SIZE])]
            return found

        with self.noticed() as asked, patch.object(RemoteMetadata, "deserialize", other):
            seen = self.get([name])
        return {"seen": seen, "references": [each.get_ref_count() for each in asked]}

    @contextmanager
    def noticed(self) -> Iterator[list[MemoryObj]]:
        """The memory that is allocated meanwhile."""
        asked: list[MemoryObj] = []
        allocate = self.local.allocate

        def noticed(*arguments: Any, **named: Any) -> Any:
            asked.append(allocate(*arguments, **named))
            return asked[-1]

        with patch.object(self.local, "allocate", noticed):
            yield asked

    def end(self) -> Any:
        self.remote.close()
        return {}
