"""A rank's side of a connector: moves the blocks of a step's plan between the engine's pools and the store.

Loads run in threads, between steps of the engine. Saves are copied before the step that is told of them, so that the engine may use the
blocks at once, and stored by jobs. Each group of layers has values and keys of its own. No error of the store comes out: blocks that cannot
be had are failed ones, blocks that cannot be stored are dropped, and both are counted.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar

import torch

from kvstore.client import Client
from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.counters import LOG, ConnectorCounters, FailureLog
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.plan import BlockTransfer, StepPlan
from kvstore.engines.vllm.pools import CHUNK_BYTES, ChunkStaging, HeadPools, HeadShards, LayerPools, rows
from kvstore.engines.vllm.settings import LOAD_THREADS, VllmSettings
from kvstore.protocol.errors import typed
from kvstore.rpc.thread_pools import started

K = TypeVar("K")
IDLE_WAIT_S: Final = 0.002
"""An engine that has nothing but loads to wait for sleeps for so long before it looks for new requests again."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The layers of one group that this rank has."""

    shard: Shard | HeadShards
    pools: LayerPools | HeadPools
    is_writer: bool = True
    """Of ranks with equal bytes one stores them."""

    @property
    def block_bytes(self) -> int:
        """Of all values of a block."""
        return self.pools.value_bytes * self.pools.values_per_block


class Worker:
    """Its methods are called by the engine's thread."""

    def __init__(self, client: Client, groups: Sequence[RankGroup | None], settings: VllmSettings, *, fails_whole: bool = False) -> None:
        """It owns `client`. None: a group of which this rank has no layers. `fails_whole`: plan.fail_whole. Raises ConfigError: the system
        does not give its threads, without which no load would end later."""
        self._loaders = started(LOAD_THREADS, "kvstore-load")
        self._client = client
        self._jobs = Jobs(client, settings.jobs())
        self._groups = groups
        self._settings = settings
        self._fails_whole = fails_whole
        block_bytes = max(group.block_bytes for group in groups if group is not None)
        self._load_staging = ChunkStaging(block_bytes, LOAD_THREADS * max(CHUNK_BYTES, block_bytes))
        self._save_staging = ChunkStaging(block_bytes, int(settings.write_behind_bytes))
        self._load_trouble = FailureLog("loading blocks", "they are computed")
        self._copy_trouble, self._save_trouble = (FailureLog(f"{what} blocks", "they are dropped") for what in ("copying", "storing"))
        self.is_store_away = False
        """As the scheduler's connector logged it: see Trouble."""
        self._changed = threading.Condition()
        self._loading = self._saving = 0
        self._loaded: set[str] = set()
        self._copied: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._counters = ConnectorCounters()

    def load(self, plan: StepPlan) -> None:
        """Begin the plan's loads."""
        for request_id, of_request in groupby(plan.loads, lambda transfer: transfer.request_id):
            with self._changed:
                self._loading += 1
            self._loaders.submit(self._load, request_id, list(of_request), time.monotonic() + self._settings.load_deadline_s)

    def save(self, plan: StepPlan) -> None:
        """Copy the blocks that the plan saves; they are stored later. What cannot be copied is dropped."""
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
        """Requests that are over and whose blocks have been copied; and those whose load is over, whatever came of it."""
        with self._changed:
            copied, loaded, self._copied, self._loaded = self._copied, self._loaded, set(), set()
            return copied, loaded

    def take_failed(self) -> set[int]:
        """Blocks of the engine's pool in which nothing was loaded. Those of a request are told no later than its end. None where
        requests fail whole."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def take_failed_requests(self, loaded: set[str]) -> set[str]:
        """Those of `loaded`, whose load is over, of which a block did not come, where requests fail whole."""
        with self._changed:
            failed = self._failed_requests & loaded
            self._failed_requests -= failed
            return failed

    def take_counters(self) -> ConnectorCounters:
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
        self._jobs.close(drain_s=self._settings.jobs().store_deadline_s)
        self._client.close()

    # --- loads ---

    def _load(self, request_id: str, transfers: Sequence[BlockTransfer], until_s: float) -> None:
        """All of a request's transfers; the first one that does not come whole is the last."""
        begin_s = time.monotonic()
        counters = ConnectorCounters()
        failed: list[int] = []
        for transfer in transfers:
            loaded = 0
            if not failed:
                try:
                    loaded = self._fetch(transfer, until_s)
                except Exception:
                    LOG.exception("kvstore: loading blocks of request %s failed", request_id)
            failed += transfer.blocks[loaded:]
            counters.add(ConnectorCounters(loaded_blocks=loaded, loaded_bytes=loaded * self._block_bytes(transfer)))
        counters.add(ConnectorCounters(load_s=time.monotonic() - begin_s, failed_blocks=len(failed)))
        with self._changed:
            self._counters.add(counters)
            if failed and self._fails_whole:
                self._failed_requests.add(request_id)
            else:
                self._failed_blocks.update(failed)
            self._loaded.add(request_id)
            self._loading -= 1
            self._changed.notify_all()

    def _fetch(self, transfer: BlockTransfer, until_s: float) -> int:
        """How many of the blocks, from the first on, are in the pool now."""
        group = self._groups[transfer.group]
        if group is None:
            return len(transfer.blocks)
        pools, each = group.pools, group.pools.values_per_block
        keys = group.shard.of(transfer.variant).keys(transfer.hashes)
        pieces = pools.pieces(transfer.blocks)
        if pieces is not None:
            return self._get(keys, pieces, pools.value_bytes, until_s) // each
        loaded = 0
        chunk = self._load_staging.take()
        assert chunk is not None, "there are as many as threads"
        try:
            for part in _parts(transfer, self._load_staging.values(group.block_bytes)):
                wanted = _of_values(keys, part, each)
                there = self._get(wanted, rows(chunk, len(wanted), pools.value_bytes), pools.value_bytes, until_s) // each
                pools.scatter(rows(chunk, there, group.block_bytes), transfer.blocks[part][:there])
                loaded += there
                if there * each < len(wanted):
                    break
        finally:
            self._load_staging.give_back(chunk)
        return loaded

    def _get(self, keys: list[bytes], buffers: Any, value_bytes: int, until_s: float) -> int:
        """How many of the values, from the first on, are in the buffers now."""
        left_s, budget_s = until_s - time.monotonic(), self._settings.load_deadline_s
        job = self._jobs.load_now(keys, buffers, deadline_s=left_s, budget_s=budget_s)
        self._load_trouble.saw(job.error, is_store_away=self.is_store_away)
        whole = [result == value_bytes for result in job.results]
        return whole.index(False) if False in whole else len(whole)

    # --- saves ---

    def _copy(self, transfer: BlockTransfer) -> None:
        group = self._groups[transfer.group]
        if group is None or not group.is_writer:
            return
        shard, each = group.shard.of(transfer.variant), group.pools.values_per_block
        keys = shard.keys(transfer.hashes)
        above = [None] * each if transfer.parent is None else shard.keys([transfer.parent])
        parents = [*above, *keys]
        for part in _parts(transfer, self._save_staging.values(group.block_bytes)):
            chunk = self._filled(group, transfer.blocks[part])
            if chunk is not None:
                self._store(group.pools, shard, _of_values(keys, part, each), _of_values(parents, part, each), chunk)
            else:
                with self._changed:
                    self._counters.add(ConnectorCounters(dropped_blocks=len(transfer.blocks[part])))

    def _filled(self, group: RankGroup, blocks: list[int]) -> torch.Tensor | None:
        """A chunk with these blocks; None if they cannot be copied: all chunks wait to be stored, or there is no memory for one, here or on
        the device. That is no reason for an engine to end."""
        chunk = None
        try:
            chunk = self._save_staging.take()
            if chunk is not None:
                group.pools.gather(blocks, rows(chunk, len(blocks), group.block_bytes))
        except Exception as error:
            self._copy_trouble.saw(typed(error))
            if chunk is not None:
                self._save_staging.give_back(chunk)
            return None
        self._copy_trouble.saw(None)
        return chunk

    def _store(
        self,
        pools: LayerPools | HeadPools,
        shard: Shard | HeadShards,
        keys: list[bytes],
        parents: list[bytes | None],
        chunk: torch.Tensor,
    ) -> None:
        value_bytes, each = pools.value_bytes, pools.values_per_block
        begin_s = time.monotonic()

        def stored(job: Job) -> None:
            self._save_staging.give_back(chunk)
            self._save_trouble.saw(job.error, is_store_away=self.is_store_away)
            new = sum(result is True for result in job.results)
            counters = ConnectorCounters(
                saved_blocks=-(-new // each),
                saved_bytes=new * value_bytes,
                save_s=time.monotonic() - begin_s,
                dropped_blocks=-(-job.succeeded.count(False) // each),
            )
            with self._changed:
                self._counters.add(counters)
                self._saving -= 1
                self._changed.notify_all()

        with self._changed:
            self._saving += 1
        values = rows(chunk, len(keys), value_bytes)
        self._jobs.store(keys, values, namespace=shard.namespace, parents=parents, on_done=stored)

    def _block_bytes(self, transfer: BlockTransfer) -> int:
        group = self._groups[transfer.group]
        return group.block_bytes if group is not None else 0


def _parts(transfer: BlockTransfer, size: int) -> Iterator[slice]:
    """Slices of `size` of the transfer's blocks."""
    for start in range(0, len(transfer.blocks), size):
        yield slice(start, min(start + size, len(transfer.blocks)))


def _of_values(of_all: list[K], blocks: slice, each: int) -> list[K]:
    """Those of the values of `blocks`, of which each has `each`."""
    return of_all[blocks.start * each : blocks.stop * each]
