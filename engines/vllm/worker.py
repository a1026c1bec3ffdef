"""Rank side of a connector: moves the blocks of each step's plan between the engine's pools and the store.

- **Loads** run in threads, across steps of the engine; their requests wait.
- **Saves** are copied before the engine runs the step that names them, so it may reuse the blocks at once. Jobs store
  the copies.
- **Errors** of the store are never raised. Blocks that cannot be loaded are reported as failed, blocks that cannot be
  stored are dropped, and both are counted.

Each group of layers has its own values and keys.
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
from kvstore.client.tensors.arrays import mark, on_side_stream
from kvstore.engines.vllm.counters import LOG, ConnectorCounters, FailureLog
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.plan import BlockTransfer, StepPlan
from kvstore.engines.vllm.pools import CHUNK_BYTES, ChunkStaging, HeadPools, HeadShards, LayerPools, rows
from kvstore.engines.vllm.settings import LOAD_THREADS, VllmSettings
from kvstore.protocol.errors import typed
from kvstore.protocol.retention import Retention
from kvstore.rpc.thread_pools import started

K = TypeVar("K")
IDLE_WAIT_S: Final = 0.002
"""Sleep of an engine that only waits for loads, before it checks for new requests."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Layers of one group that this rank holds."""

    shard: Shard | HeadShards
    pools: LayerPools | HeadPools
    is_writer: bool = True
    """Of ranks with equal bytes one stores them."""

    @property
    def block_bytes(self) -> int:
        """Bytes of all values of a block."""
        return self.pools.value_bytes * self.pools.values_per_block


class Worker:
    """Loads and saves blocks of one rank. The engine's thread calls it."""

    def __init__(self, client: Client, groups: Sequence[RankGroup | None], settings: VllmSettings, *, all_or_nothing: bool = False) -> None:
        """Start the load threads.

        Args:
            client: owned.
            groups: None for a group of which this rank has no layers.
            all_or_nothing: result of `plan.loads_all_or_nothing`.

        Raises:
            ConfigError: the system refuses threads; loads would never finish without them.
        """
        self._loaders = started(LOAD_THREADS, "kvstore-load")
        self._client = client
        self._jobs = Jobs(client, settings.jobs())
        self._groups = groups
        self._settings = settings
        self._fails_whole = all_or_nothing
        own = [group for group in groups if group is not None]
        block_bytes = max(group.block_bytes for group in own)
        self._device = own[0].pools.device
        is_pinned = self._device.type == "cuda"
        self._load_staging = ChunkStaging(block_bytes, LOAD_THREADS * max(CHUNK_BYTES, block_bytes), is_pinned=is_pinned)
        self._save_staging = ChunkStaging(block_bytes, int(settings.write_behind_bytes), is_pinned=is_pinned)
        self._load_failures = FailureLog("loading blocks", "they are computed")
        self._copy_failures, self._save_failures = (FailureLog(f"{what} blocks", "they are dropped") for what in ("copying", "storing"))
        self.is_store_unreachable = False
        """Set from the scheduler's `StepMetadata`; such failures are not logged again."""
        self._changed = threading.Condition()
        self._loading = self._saving = 0
        self._loaded: set[str] = set()
        self._copied: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._counters = ConnectorCounters()

    def load(self, plan: StepPlan) -> None:
        """Start the plan's loads. They write to the pools after the kernels that this thread has launched so far, which
        may still use the blocks."""
        marked = mark(self._device)
        for request_id, of_request in groupby(plan.loads, lambda transfer: transfer.request_id):
            with self._changed:
                self._loading += 1
            self._loaders.submit(self._load, request_id, list(of_request), marked, time.monotonic() + self._settings.load_deadline_s)

    def save(self, plan: StepPlan) -> None:
        """Copy the plan's blocks and store the copies in the background. Blocks that cannot be copied are dropped."""
        for transfer in plan.saves:
            self._copy(transfer)
        with self._changed:
            self._copied.update(plan.finishing)

    def wait_idle(self) -> None:
        """Wait for a load to finish, at most IDLE_WAIT_S. For steps without other work."""
        with self._changed:
            if self._loading and not self._loaded:
                self._changed.wait(IDLE_WAIT_S)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return finished requests whose blocks are copied, and requests whose load ended with or without success."""
        with self._changed:
            copied, loaded, self._copied, self._loaded = self._copied, self._loaded, set(), set()
            return copied, loaded

    def take_failed(self) -> set[int]:
        """Return pool blocks into which nothing was loaded. They are reported no later than the end of their
        request's load. Always empty if requests fail as a whole."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def take_failed_requests(self, loaded: set[str]) -> set[str]:
        """Return the requests of `loaded` of which a block is missing, if requests fail as a whole."""
        with self._changed:
            failed = self._failed_requests & loaded
            self._failed_requests -= failed
            return failed

    def take_counters(self) -> ConnectorCounters:
        with self._changed:
            return self._counters.take()

    def flush(self) -> None:
        """Wait until all copied blocks are readable in the store, or dropped. Raises as `Client.flush`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._saving)
        self._client.flush()

    def close(self) -> None:
        """Store the copied blocks within the deadline of saves, then disconnect. Loads that have not begun are
        cancelled."""
        self._loaders.shutdown(cancel_futures=True)
        self._jobs.close(drain_s=self._settings.jobs().store_deadline_s)
        self._client.close()

    # --- loads ---

    def _load(self, request_id: str, transfers: Sequence[BlockTransfer], marked: Any, until_s: float) -> None:
        """Run a request's transfers in order, up to the first one that is incomplete."""
        begin_s = time.monotonic()
        counters = ConnectorCounters()
        failed: list[int] = []
        for transfer in transfers:
            loaded = 0
            if not failed:
                try:
                    loaded = self._fetch(transfer, marked, until_s)
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

    def _fetch(self, transfer: BlockTransfer, marked: Any, until_s: float) -> int:
        """Load the transfer's blocks, after the marked event; return how many leading blocks are in the pool."""
        group = self._groups[transfer.group]
        if group is None:
            return len(transfer.blocks)
        pools, each = group.pools, group.pools.values_per_block
        keys = group.shard.of(transfer.variant).keys(transfer.hashes)
        pieces = pools.pieces(transfer.blocks)
        if pieces is not None:
            return self._get(transfer, keys, pieces, pools.value_bytes, until_s) // each
        loaded = 0
        chunk = self._load_staging.take()
        assert chunk is not None, "there are as many as threads"
        try:
            for part in _parts(transfer, self._load_staging.values(group.block_bytes)):
                value_keys = _of_values(keys, part, each)
                buffers = rows(chunk, len(value_keys), pools.value_bytes)
                complete = self._get(transfer, value_keys, buffers, pools.value_bytes, until_s) // each
                with on_side_stream(self._device, marked):
                    pools.scatter(rows(chunk, complete, group.block_bytes), transfer.blocks[part][:complete])
                loaded += complete
                if complete * each < len(value_keys):
                    break
        finally:
            self._load_staging.release(chunk)
        return loaded

    def _get(self, transfer: BlockTransfer, keys: list[bytes], buffers: Any, value_bytes: int, until_s: float) -> int:
        """Load values of the transfer; return how many leading ones are complete."""
        left_s, budget_s = until_s - time.monotonic(), self._settings.load_deadline_s
        job = self._jobs.load_now(keys, buffers, deadline_s=left_s, budget_s=budget_s, retention=transfer.retention)
        self._load_failures.record(job.error, is_store_unreachable=self.is_store_unreachable)
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
                self._store(group.pools, shard, _of_values(keys, part, each), _of_values(parents, part, each), chunk, transfer.retention)
            else:
                with self._changed:
                    self._counters.add(ConnectorCounters(dropped_blocks=len(transfer.blocks[part])))

    def _filled(self, group: RankGroup, blocks: list[int]) -> torch.Tensor | None:
        """Return a chunk with a copy of these blocks.

        None if they cannot be copied: all chunks wait to be stored, or memory is short on the host or the device.
        Neither is a reason to stop the engine.
        """
        chunk = None
        try:
            chunk = self._save_staging.take()
            if chunk is not None:
                group.pools.gather(blocks, rows(chunk, len(blocks), group.block_bytes))
        except Exception as error:
            self._copy_failures.record(typed(error))
            if chunk is not None:
                self._save_staging.release(chunk)
            return None
        self._copy_failures.record(None)
        return chunk

    def _store(
        self,
        pools: LayerPools | HeadPools,
        shard: Shard | HeadShards,
        keys: list[bytes],
        parents: list[bytes | None],
        chunk: torch.Tensor,
        retention: Retention | None,
    ) -> None:
        value_bytes, each = pools.value_bytes, pools.values_per_block
        begin_s = time.monotonic()

        def stored(job: Job) -> None:
            self._save_staging.release(chunk)
            self._save_failures.record(job.error, is_store_unreachable=self.is_store_unreachable)
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
        self._jobs.store(keys, values, namespace=shard.namespace, parents=parents, retention=retention, on_done=stored)

    def _block_bytes(self, transfer: BlockTransfer) -> int:
        group = self._groups[transfer.group]
        return group.block_bytes if group is not None else 0


def _parts(transfer: BlockTransfer, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` over the transfer's blocks."""
    for start in range(0, len(transfer.blocks), size):
        yield slice(start, min(start + size, len(transfer.blocks)))


def _of_values(of_all: list[K], blocks: slice, each: int) -> list[K]:
    """Return the entries of `blocks` in a list with `each` entries a block."""
    return of_all[blocks.start * each : blocks.stop * each]
