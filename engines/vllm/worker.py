"""A rank's side of a connector: moves the blocks of a step's plan between the engine's pools and the store.

Loads run in threads, between steps of the engine, or in the step that needs them. Saves are copied in the step that is told of them, so
that the engine may use the blocks at once, and stored by jobs. No error of the store comes out: blocks that cannot be had are failed ones,
blocks that cannot be stored are dropped, and both are counted.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from kvstore.client import Client
from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.layout import LayerPools
from kvstore.engines.vllm.plan import StepPlan, Transfer
from kvstore.engines.vllm.settings import LOAD_THREADS, VllmSettings, job_settings
from kvstore.engines.vllm.staging import CHUNK_BYTES, Staging
from kvstore.engines.vllm.trouble import LOG, Trouble

IDLE_WAIT_S: Final = 0.002
"""An engine that has nothing but loads to wait for sleeps for so long before it looks for new requests again."""


class Worker:
    """Its methods are called by the engine's thread."""

    def __init__(self, client: Client, shard: Shard, pools: LayerPools, settings: VllmSettings, *, is_writer: bool) -> None:
        """It owns `client`. Only the writer of a shard stores its blocks."""
        self._client = client
        self._jobs = Jobs(client, job_settings(settings))
        self._shard = shard
        self._pools = pools
        self._settings = settings
        self._is_writer = is_writer
        self._load_staging = Staging(pools.value_bytes, LOAD_THREADS * CHUNK_BYTES)
        self._save_staging = Staging(pools.value_bytes, int(settings.write_behind_bytes))
        self._loaders = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvstore-load")
        self._load_trouble, self._save_trouble = (
            Trouble("loading blocks", "they are computed"),
            Trouble("storing blocks", "they are dropped"),
        )
        self._changed = threading.Condition()
        self._loading = self._saving = 0
        self._loaded: set[str] = set()
        self._copied: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._counters = Counters()

    def load(self, plan: StepPlan) -> None:
        """Begin the plan's loads, or make them where the engine waits for them."""
        for transfer in plan.loads:
            until_s = time.monotonic() + self._settings.load_deadline_s
            if self._settings.load_async:
                self._loading += 1
                self._loaders.submit(self._load, transfer, until_s)
            else:
                self._load(transfer, until_s)

    def save(self, plan: StepPlan) -> None:
        """Copy the blocks that the plan saves; they are stored later."""
        if self._is_writer:
            for transfer in plan.saves:
                self._copy(transfer)
        with self._changed:
            self._copied.update(plan.finishing)

    def wait_idle(self) -> None:
        """Called when there is nothing else to do: wait for a load, but for IDLE_WAIT_S only."""
        with self._changed:
            if self._loading and not self._loaded:
                self._changed.wait(IDLE_WAIT_S)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests that are over and whose blocks have been copied; and those whose asynchronous load is over, whatever came of it."""
        with self._changed:
            copied, loaded, self._copied, self._loaded = self._copied, self._loaded, set(), set()
            return copied, loaded

    def take_failed(self) -> set[int]:
        """Blocks of the engine's pool in which nothing was loaded. Those of a request are told no later than its end."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def take_counters(self) -> Counters:
        with self._changed:
            return self._counters.take()

    def flush(self) -> None:
        """Come back when all that was copied is in the store for all to read, or dropped. Raises as `Client.flush`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._saving)
        self._client.flush()

    def close(self) -> None:
        """Store what has been copied, within the deadline of saves, and hang up. Loads that have not begun are given up."""
        self._loaders.shutdown(cancel_futures=True)
        self._jobs.close(drain_s=self._settings.save_deadline_s)
        self._client.close()

    # --- loads ---

    def _load(self, transfer: Transfer, until_s: float) -> None:
        begin_s = time.monotonic()
        loaded = 0
        try:
            loaded = self._fetch(transfer, until_s)
        except Exception:
            LOG.exception("kvstore: loading blocks of request %s failed", transfer.request_id)
        counters = Counters(
            loaded_blocks=loaded,
            loaded_bytes=loaded * self._pools.value_bytes,
            load_s=time.monotonic() - begin_s,
            failed_blocks=len(transfer.blocks) - loaded,
        )
        with self._changed:
            self._counters.add(counters)
            self._failed_blocks.update(transfer.blocks[loaded:])
            if self._settings.load_async:
                self._loaded.add(transfer.request_id)
                self._loading -= 1
                self._changed.notify_all()

    def _fetch(self, transfer: Transfer, until_s: float) -> int:
        """How many of the blocks, from the first on, are in the pool now."""
        pieces = self._pools.pieces(transfer.blocks)
        if pieces is not None:
            return self._get(self._shard.keys(transfer.hashes), pieces, until_s)
        loaded = 0
        chunk = self._load_staging.take()
        assert chunk is not None, "there are as many as threads"
        try:
            for part, keys in self._parts(transfer, len(chunk)):
                rows = chunk[: len(keys)]
                there = self._get(keys, rows, until_s)
                self._pools.scatter(rows[:there], transfer.blocks[part][:there])
                loaded += there
                if there < len(keys):
                    break
        finally:
            self._load_staging.give_back(chunk)
        return loaded

    def _get(self, keys: list[bytes], buffers: Any, until_s: float) -> int:
        """How many of the values, from the first on, are in the buffers now."""
        job = self._jobs.load(keys, buffers, deadline_s=until_s - time.monotonic(), on_done=_ignore)
        job.wait()
        self._load_trouble.saw(job.error)
        whole = [result == self._pools.value_bytes for result in job.results]
        return whole.index(False) if False in whole else len(whole)

    # --- saves ---

    def _copy(self, transfer: Transfer) -> None:
        first = None if transfer.parent is None else self._shard.key(transfer.parent)
        parents = [first, *self._shard.keys(transfer.hashes)]
        for part, keys in self._parts(transfer, self._save_staging.chunk_values):
            chunk = self._save_staging.take()
            if chunk is None:
                with self._changed:
                    self._counters.add(Counters(dropped_blocks=len(keys)))
                continue
            self._pools.gather(transfer.blocks[part], chunk[: len(keys)])
            with self._changed:
                self._saving += 1
            self._store(keys, parents[part], chunk)

    def _store(self, keys: list[bytes], parents: list[bytes | None], chunk: torch.Tensor) -> None:
        begin_s = time.monotonic()

        def stored(job: Job) -> None:
            self._save_staging.give_back(chunk)
            self._save_trouble.saw(job.error)
            new = sum(result is True for result in job.results)
            counters = Counters(
                saved_blocks=new,
                saved_bytes=new * self._pools.value_bytes,
                save_s=time.monotonic() - begin_s,
                dropped_blocks=job.succeeded.count(False),
            )
            with self._changed:
                self._counters.add(counters)
                self._saving -= 1
                self._changed.notify_all()

        self._jobs.store(keys, chunk[: len(keys)], namespace=self._shard.namespace, parents=parents, on_done=stored)

    def _parts(self, transfer: Transfer, size: int) -> Iterator[tuple[slice, list[bytes]]]:
        """Slices of `size` of the transfer's blocks, and their keys."""
        for start in range(0, len(transfer.blocks), size):
            part = slice(start, min(start + size, len(transfer.blocks)))
            yield part, self._shard.keys(transfer.hashes[part])


def _ignore(job: Job) -> None:
    """Whoever submitted it waits for it."""
