"""Run by LMCache's environment: the real L2 adapter interface with real memory objects. The adapter is made as LMCache's server does."""

import select
import time
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config, parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

ARENA_BYTES = 64 << 20
WAIT_MS = 60_000


class Child:
    def __init__(self, adapter: str) -> None:
        self.arena = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
        (config,) = parse_args_to_l2_adapters_config(type("Args", (), {"l2_adapter": [adapter]})).adapters
        assert get_type_name_for_config(config) == "plugin"
        self.adapter = create_l2_adapter(config, L1MemoryDesc(self.arena.data_ptr(), ARENA_BYTES, 1))
        self.adapter.set_backend_identity("plugin", shared=True)

    def objects(self, sizes: list[int], fills: list[int]) -> list[Any]:
        """Memory objects one after another in the arena, each full of one byte."""
        made, start = [], 0
        for size, fill in zip(sizes, fills, strict=True):
            raw = self.arena[start : start + size]
            raw.fill_(fill)
            metadata = MemoryObjMetadata(
                shape=torch.Size([size]), dtype=torch.uint8, address=start, phy_size=size, fmt=MemoryFormat.KV_2LTD, ref_count=1
            )
            made.append(TensorMemoryObj(raw_data=raw, metadata=metadata, parent_allocator=None))
            start += size
        return made

    def store(self, names: list[str], sizes: list[int], fills: list[int], salt: str = "") -> Any:
        began = time.monotonic()
        task = self.adapter.submit_store_task(keys(names, salt), self.objects(sizes, fills))
        submitted_s = time.monotonic() - began
        told = wait(self.adapter.get_store_event_fd())
        result = self.adapter.pop_completed_store_tasks()[task]
        return {"told": told, "ok": result.is_successful(), "bytes": result.bytes_transferred(), "submitted_s": submitted_s}

    def lookup(self, names: list[str], salt: str = "", keeps: bool = False) -> Any:
        layout = MemoryLayoutDesc(shapes=[torch.Size([1])], dtypes=[torch.uint8])
        task = self.adapter.submit_lookup_and_lock_task(keys(names, salt), {0: layout})
        told = wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        if not keeps:
            self.unlock(names, salt)
        return {
            "told": told,
            "found": [found.test(index) for index in range(len(names))],
            "again": self.adapter.query_lookup_and_lock_result(task),
        }

    def unlock(self, names: list[str], salt: str = "") -> Any:
        self.adapter.submit_unlock(keys(names, salt))
        return {}

    def load(self, names: list[str], sizes: list[int], salt: str = "") -> Any:
        objects = self.objects(sizes, [0] * len(sizes))
        task = self.adapter.submit_load_task(keys(names, salt), objects)
        told = wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        flags = [loaded.test(index) for index in range(len(names))]
        # The byte that fills an object, None where it is not one byte only.
        contents = [int(each.raw_data[0]) if len(each.raw_data.unique()) == 1 else None for each in objects]
        return {"told": told, "loaded": flags, "contents": contents}

    def delete(self, names: list[str], salt: str = "") -> Any:
        self.adapter.delete(keys(names, salt))
        return {}

    def usage(self) -> Any:
        usage = self.adapter.get_usage()
        return {"bytes": usage.total_bytes_used, "salts": dict(usage.bytes_by_cache_salt), "evicts": self.adapter.supports_global_eviction}

    def status(self) -> Any:
        return self.adapter.report_status()

    def end(self) -> Any:
        self.adapter.close()
        return {}


def keys(names: list[str], salt: str) -> list[ObjectKey]:
    rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
    return [ObjectKey(chunk_hash=name.encode(), model_name="some/model", kv_rank=rank, cache_salt=salt) for name in names]


def wait(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(WAIT_MS):
        return False
    consume_fd(descriptor)
    return True
