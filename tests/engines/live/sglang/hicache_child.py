"""Run by SGLang's environment: its own host pools and cache controller over our back end.

Pages are filled with numbers made from a seed; a digest stands for a page's contents.
"""

import hashlib
import logging
import os
import threading
from typing import Any

import sglang.srt.managers.cache_controller as controllers
import torch
import torch.distributed
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args
from sglang.srt.server_args import ServerArgs

from kvstore.engines.sglang.identity import describe_pool, engine_facts, started
from kvstore.engines.sglang.settings import from_extra_config
from kvstore.protocol.errors import ConfigError

PAGE, LAYERS, TOKENS = 16, 3, 1024
WAIT_S = 60.0


def pools(kind: str, layout: str, heads: int = 2, dtype: str = "float32") -> tuple[Any, Any]:
    """A device pool with so many KV heads, and a host pool of twice its size."""
    sizes = {
        "size": TOKENS,
        "page_size": PAGE,
        "dtype": getattr(torch, dtype),
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    page_memory = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS, "pin_memory": False}
    if kind == "mla":
        device = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **sizes)
        return device, MLATokenToKVPoolHost(device._mla_buffer_info(), 2.0, 0, PAGE, layout, target_layer_num=LAYERS, **page_memory)
    device = MHATokenToKVPool(head_num=heads, head_dim=64, **sizes)
    return device, MHATokenToKVPoolHost(device._mha_buffer_info(), 2.0, 0, PAGE, layout, **page_memory)


def other(value: Any) -> Any:
    """A value that an argument of this default does not have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "perturbed" if value is None or isinstance(value, str) else ["perturbed"] if isinstance(value, list) else {"perturbed": 1}


class Child:
    storages: list[Any]
    controller: Any = None

    def __init__(self) -> None:
        self.storages = []
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        alone = dict.fromkeys(("tp_rank", "pp_rank", "attn_dcp_rank", "attn_tp_rank", "attn_dp_rank"), 0)
        get_parallel()._stamp.update(alone, tp_size=1, pp_size=1, attn_dcp_size=1, attn_tp_size=1)
        controllers.is_dp_attention_enabled = lambda: False
        self.told: Any = None
        self.tell()

    def use(self, kind: str, layout: str, extra: dict[str, Any], heads: int = 2, dtype: str = "float32") -> Any:
        """Have pools of KIND `mha` or `mla` from now on, with back ends of this configuration, none yet."""
        self.close()
        self.extra, self.kind = extra, kind
        self.device, self.host = pools(kind, layout, heads, dtype)
        self.sidecar = pools("mha", layout)[1]
        return {}

    def tell(self, **told: Any) -> Any:
        """Of SGLang's arguments, what pools are made by from now on."""
        if self.told is not None:
            self.told.restore()
        self.told = get_context().override_server_args(**told)
        self.told.install()
        return {}

    def close(self) -> None:
        if self.controller is not None:
            self.controller.detach_storage_backend()
        for storage in self.storages:
            storage.close()
        self.controller, self.storages = None, []

    def end(self) -> None:
        self.close()
        os._exit(0)  # SGLang's controller leaves threads that would keep it

    # --- a back end without a controller, of any rank ---

    def open(self, tp: tuple[int, int] = (0, 1), tp_lcm_size: int | None = None) -> Any:
        """One more, as the factory makes it; its number, or why there is none."""
        try:
            storage = StorageBackendFactory.create_backend("dynamic", self.config(tp, tp_lcm_size), self.host)
        except ConfigError as error:
            return str(error)
        try:
            storage.register_mem_pool_host(self.host)
        except ConfigError as error:
            storage.close()
            return str(error)
        storage.register_mem_host_pool_v2(self.host, PoolName.KV)
        storage.register_mem_host_pool_v2(self.sidecar, PoolName.SWA)
        storage.on_host_pools_registered()
        self.storages.append(storage)
        return len(self.storages) - 1

    def config(self, tp: tuple[int, int], tp_lcm_size: int | None = None) -> HiCacheStorageConfig:
        return HiCacheStorageConfig(
            tp_rank=tp[0],
            tp_size=tp[1],
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=self.kind == "mla",
            enable_storage_metrics=False,
            is_page_first_layout=self.host.layout == "page_first",
            model_name="some/model",
            tp_lcm_size=tp_lcm_size,
            extra_config=self.extra,
        )

    # --- the name of a page ---

    def arguments(self) -> Any:
        """All arguments that this SGLang takes."""
        return list(ServerArgs.__struct_fields__)

    def names(self, told: dict[str, Any], perturbed: list[str]) -> Any:
        """The namespace of a pool under these arguments and without settings (""), then with each of those perturbed; of a draft's pool,
        too. LoRAs are given as [name, path]."""
        found = {}
        adapters = [LoRARef(LoRARef.deterministic_id(*each), *each) for each in told.get("lora_paths", [])]
        for name in ["", *perturbed]:
            self.tell(**told | {"lora_paths": adapters})
            if name:
                get_context().override("test", **{name: other(getattr(get_server_args(), name))})
            settings, log = from_extra_config({}, {}), logging.getLogger()
            weights, facts = started(settings, log), engine_facts(self.config((0, 1)), settings, log)
            pools = [describe_pool(self.host, pool, self.config((0, 1)), facts) for pool in (PoolName.KV, PoolName.DRAFT)]
            found[name] = [pool.under(weights.target.text, weights.draft).namespace.id.hex() for pool in pools]
        self.tell()
        return found

    def pool(self, name: str) -> Any:
        return self.host if name == "kv" else self.sidecar

    def set(self, storage: int, keys: list[str], seed: int, pool: str | None = None) -> Any:
        """By v1; by v2 where a pool is named."""
        place = self.filled(self.pool(pool or "kv"), len(keys), seed)
        if pool is None:
            return self.storages[storage].batch_set_v1(keys, place, HiCacheStorageExtraInfo(prefix_keys=["ab" * 32]))
        return self.storages[storage].batch_set_v2([PoolTransfer(PoolName(pool), host_indices=place, keys=keys)])[pool]

    def get(self, storage: int, keys: list[str], pool: str | None = None) -> Any:
        """[was it read, what is there] of each page, whose place was all zeros."""
        host = self.pool(pool or "kv")
        place = host.alloc(len(keys) * PAGE)
        for page in place[::PAGE].tolist():
            host.set_from_flat_data_page(page, torch.zeros_like(host.get_data_page(page)))
        if pool is None:
            read = self.storages[storage].batch_get_v1(keys, place)
        else:
            read = self.storages[storage].batch_get_v2([PoolTransfer(PoolName(pool), host_indices=place, keys=keys)])[pool]
        digests = self.digests(host, place)
        host.free(place)
        return [list(each) for each in zip(read, digests, strict=True)]

    def set_heads(self, storage: int, keys: list[str], seed: int, heads: list[int]) -> Any:
        """Store pages of this rank's `heads` of the model's, each full of numbers made from the seed, its number and the head's."""
        place = self.host.alloc(len(keys) * PAGE)
        for number, page in enumerate(place[::PAGE].tolist()):
            for head, of_head in zip(heads, self.by_heads(page), strict=True):
                random = torch.Generator().manual_seed(seed * 10_000 + number * 100 + head)
                of_head[:] = torch.randn(of_head.shape, generator=random)
        return self.storages[storage].batch_set_v1(keys, place)

    def get_heads(self, storage: int, keys: list[str]) -> Any:
        """[was it read, digests of its heads] of each page."""
        place = self.host.alloc(len(keys) * PAGE)
        read = self.storages[storage].batch_get_v1(keys, place)
        pages = [
            [hashlib.blake2b(head.contiguous().numpy().tobytes(), digest_size=8).hexdigest() for head in self.by_heads(page)]
            for page in place[::PAGE].tolist()
        ]
        self.host.free(place)
        return [list(each) for each in zip(read, pages, strict=True)]

    def by_heads(self, page: int) -> torch.Tensor:
        """A page of the host pool, `[heads, ...]`."""
        whole = self.host.get_data_page(page, flat=False)
        return whole.movedim(2 if self.host.layout == "page_head" else -2, 0)

    def kept(self, storage: int) -> Any:
        """Return the number of finished jobs that the back end still holds."""
        return len(self.storages[storage]._jobs.finished())

    def exists(self, storage: int, keys: list[str]) -> Any:
        return self.storages[storage].batch_exists(keys)

    def exists_v2(self, storage: int, keys: list[str], policy: str, window: int) -> Any:
        transfer = PoolTransfer(PoolName.SWA, keys=keys[:window], hit_policy=PoolHitPolicy(policy))
        found = self.storages[storage].batch_exists_v2(keys, [transfer])
        return {"pages": found.kv_hit_pages, "pools": found.extra_pool_hit_pages, "restorable": found.restorable_prefix_pages}

    def nonsense(self, storage: int) -> Any:
        """Make calls that no controller makes: pages without places, an unknown pool."""
        transfer = PoolTransfer(PoolName.MAMBA, host_indices=torch.arange(PAGE), keys=["aa"])
        backend = self.storages[storage]
        return [
            backend.batch_set_v1(["aa", "bb"], torch.arange(PAGE)),
            backend.batch_get_v2([transfer])[PoolName.MAMBA],
            backend.batch_exists_v2(["aa"], [transfer]).kv_hit_pages,
            backend.batch_get_v1([], torch.arange(0)),
            backend.get("aa"),
            backend.exists("aa"),
        ]

    # --- SGLang's controller and its threads ---

    def attach(self) -> Any:
        device = self.device
        allocator = type("Allocator", (), {"get_kvcache": lambda self: device})()
        self.controller = HiCacheController(
            allocator,
            self.host,
            PAGE,
            torch.distributed.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="kernel",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="some/model",
            storage_backend_extra_config=dict(self.extra),
        )
        return self.controller.page_get_func.__name__

    def backup(self, first: int, pages: int, seed: int) -> Any:
        """Write pages of tokens to the store, in SGLang's thread: how many tokens were, and what the pages hold."""
        tokens = list(range(first, first + pages * PAGE))
        place = self.filled(self.host, pages, seed)
        self.controller.write_storage(place, tokens, get_hash_str(tokens, None, page_size=PAGE))
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        return {"tokens": done.completed_tokens, "digests": self.digests(self.host, place)}

    def prefetch(self, first: int, pages: int) -> Any:
        """Read the pages of tokens that the store has, in SGLang's threads: the tokens found and read, and what the pages hold."""
        tokens = list(range(first, first + pages * PAGE))
        self.controller.prefetch("request", tokens, None)
        hit = self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        read, digests = 0, []
        if hit.storage_hit_count:
            hit.host_indices = self.host.alloc(hit.storage_hit_count)
            self.controller.prefetch_buffer.put(hit)
            ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
            while not ack.completed_req:
                read = ack.completed_tokens
                ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
            digests = self.digests(self.host, hit.host_indices)
        return {"found": hit.storage_hit_count, "read": read, "digests": digests}

    def detach(self) -> Any:
        controller, self.controller = self.controller, None
        controller.detach_storage_backend()
        return controller.enable_storage

    def filled(self, host: Any, pages: int, seed: int) -> torch.Tensor:
        place = host.alloc(pages * PAGE)
        random = torch.Generator().manual_seed(seed)
        for page in place[::PAGE].tolist():
            flat = host.get_data_page(page)
            numbers = torch.randint(256, (flat.numel() * flat.element_size(),), generator=random, dtype=torch.uint8)
            host.set_from_flat_data_page(page, numbers.view(flat.dtype).reshape(flat.shape))
        return place

    def digests(self, host: Any, place: torch.Tensor) -> list[str]:
        pages = (host.get_data_page(page).contiguous().numpy().tobytes() for page in place[::PAGE].tolist())
        return [hashlib.blake2b(page, digest_size=8).hexdigest() for page in pages]
