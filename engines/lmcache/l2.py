"""kvstore as an L2 adapter of LMCache's server, named by `--l2-adapter`:

    {"type": "plugin", "module_path": "kvstore.engines.lmcache.l2", "class_name": "KVStoreL2Adapter",
     "adapter_params": {"master": "127.0.0.1:7440", "dtype": "bfloat16"}}

`adapter_params` are settings of LMCacheSettings. This module imports LMCache; only LMCache imports it.
"""

import dataclasses
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from kvstore.client.jobs.circuit_breaker import CircuitState
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.lmcache.keys import ChunkKeys
from kvstore.engines.lmcache.settings import from_parameters
from kvstore.engines.lmcache.tasks import Tasks, log
from kvstore.engines.reachability import ReachabilityCheck


class KVStoreL2Adapter(L2AdapterInterface):
    """LMCache's objects as blocks of the store, shared by all servers with the same settings. Thread-safe.

    Errors of the store are never raised: a task fails, which LMCache treats as a miss. A lookup holds the objects that
    it found for HOLD_S (tasks.py), or until they are unlocked. An object that could not be held and is evicted before
    its load is a miss. The store evicts on its own policy; `get_usage` counts what this adapter stored and did not
    delete.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        """Create the client, which connects later. Raises ConfigError: invalid settings; LMCache does not start
        then."""
        super().__init__()
        self._settings = settings = from_parameters(params)
        if not settings.revision:
            log.warning(
                "kvstore: an LMCache server does not see weights: chunks are identified by the model name, and those of other weights are "
                "loaded. Set `revision` in adapter_params, and change it with the weights"
            )
        client = Client(settings=settings.client())
        self._client = client
        self._jobs = Jobs(client, settings.jobs())
        self._check = ReachabilityCheck(client, settings.master, log)
        self._tasks: Tasks[ObjectKey] = Tasks(
            self._client,
            self._jobs,
            ChunkKeys(settings),
            on_stored=self._notify_keys_stored,
            on_loaded=self._notify_keys_accessed,
        )

    def get_store_event_fd(self) -> int:
        return self._tasks.stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._tasks.lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._tasks.loads.event_fd

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._tasks.store(keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return {task: L2StoreResult(stored.is_whole, stored.new_bytes) for task, stored in self._tasks.stores.take_all().items()}

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]) -> int:
        return self._tasks.look_up(keys)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return _bitmap(self._tasks.lookups.take(task_id))

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._tasks.unlock(keys)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._tasks.load(keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return _bitmap(self._tasks.loads.take(task_id))

    def delete(self, keys: list[ObjectKey]) -> None:
        removed = self._tasks.remove(keys, deadline_s=self._settings.load_deadline_s)
        if removed:
            self._notify_keys_deleted(list(removed), list(removed.values()))

    def close(self) -> None:
        """Finish or cancel jobs and disconnect. LMCache's memory is not used afterwards."""
        self._check.close()
        self._jobs.close()
        self._tasks.close()
        self._client.close()

    def report_status(self) -> dict[str, Any]:
        """Return state and counters. `is_healthy`: the last calls reached the store. Counters of tasks, by kind,
        count keys."""
        stats = self._jobs.stats()
        return {
            "is_healthy": stats.reads.state is CircuitState.CLOSED and stats.writes.state is CircuitState.CLOSED,
            "type": type(self).__name__,
            "master": self._settings.master,
            "waiting": stats.waiting,
            "running": stats.running,
            "held_bytes": stats.held_bytes,
            "reads": stats.reads.state.value,
            "writes": stats.writes.state.value,
            "tasks": {kind.value: dataclasses.asdict(counts) for kind, counts in stats.kinds.items()},
        }


def _bitmap(flags: list[bool] | None) -> Bitmap | None:
    if flags is None:
        return None
    bitmap = Bitmap(len(flags))
    bitmap.batched_set([index for index, is_set in enumerate(flags) if is_set])
    return bitmap
