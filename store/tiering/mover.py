"""Mover: executes planned moves between tiers and reads from tiers that block, in its own threads.

The node's loop plans and records; the threads only copy bytes. Slots of moves and reads in progress are neither freed
nor reused until the loop is notified, so the threads need no locks.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.protocol.errors import ChecksumMismatch, Corrupt, KVStoreError, Unavailable
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.thread_pools import started
from kvstore.store.block_table.block import Block, Loss
from kvstore.store.block_table.evictor import TierMove
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.tags import tag_of
from kvstore.store.config import NodeSettings
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Buffer, Record, Slot, Tier, TierFull
from kvstore.tiers.value_codec import ValueCodec

log = logging.getLogger("kvstore.store")


class MoveJob:
    """One move. Made in the loop, executed in a mover thread, finished in the loop."""

    __slots__ = ("checksum", "damage", "data", "is_refused", "loss", "lossy_checksum", "move", "source")

    def __init__(self, move: TierMove, source: Slot, tier: Tier) -> None:
        block = move.block
        self.move = move
        self.source = source
        self.damage: Exception | None = None
        self.is_refused = False
        """The codec cannot encode the value, or would lose more than an earlier encoding."""
        self.data: Buffer = tier.view(source) if isinstance(tier, DramTier) else b""
        self.loss = block.loss_of_copy(move.source)
        self.checksum = block.checksum_in(move.source)
        self.lossy_checksum = block.lossy_checksum()

    def encode(self, codec: ValueCodec) -> None:
        """Encode the value. All lossy copies of a block must decode to the same bytes, so that repeated reads agree and
        losses do not accumulate."""
        try:
            encoded = codec.encode(memoryview(self.data))
        except Exception:
            log.exception("encoding a value failed: storing it raw")
            encoded = None
        if encoded is None or self.lossy_checksum not in (None, encoded.decoded_checksum):
            self.is_refused = True
            return
        self.data, self.checksum = encoded.data, encoded.checksum
        self.loss = Loss(encoded.decoded_checksum, self.move.encoding)

    @property
    def is_good(self) -> bool:
        return self.damage is None and not self.is_refused

    def record(self) -> Record:
        return Record(self.move.slot, self.data, self.checksum, tag_of(self.move.block, self.loss))


def fetch(tier: Tier, jobs: Sequence[MoveJob]) -> None:
    """Read sources that are not mapped memory."""
    if isinstance(tier, DramTier):
        return
    destinations = [memoryview(bytearray(job.source.size_bytes)) for job in jobs]
    answers = tier.read_batch_into([job.source for job in jobs], destinations)
    for job, destination, answer in zip(jobs, destinations, answers, strict=True):
        job.data, job.damage = destination, answer


@dataclass(slots=True, eq=False)
class SlowRead:
    """Read of a block from a tier that blocks, into `destination`; None: memory is allocated when the read runs, not
    while it is queued. `loss` is that of the copy."""

    block: Block
    tier: int
    slot: Slot
    destination: memoryview | None = None
    loss: Loss | None = None

    def buffer(self) -> memoryview:
        """Return the destination, allocated if needed, with undefined bytes. numpy does not zero it, unlike bytearray,
        which holds the GIL meanwhile."""
        if self.destination is None:
            self.destination = np.empty(self.block.size_bytes, np.uint8).data
        return self.destination


@dataclass(slots=True, eq=False)
class _AfterMoves:
    """A flush that waits for the end of `batches`."""

    batches: set[int]
    done: Callable[[KVStoreError | None], None]


class TierMover:
    """Owns the mover and reader threads. Called from the node's loop; `on_space_freed` is called there whenever slots
    may have become free."""

    def __init__(
        self,
        reactor: Reactor,
        table: BlockTable,
        tiers: dict[int, Tier],
        *,
        settings: NodeSettings,
        on_space_freed: Callable[[], None],
        codec: ValueCodec | None = None,
    ) -> None:
        """`codec` makes the planned encodings. Raises ConfigError: the threads cannot be started."""
        self._reactor = reactor
        self._table = table
        self._tiers = tiers
        self._batch_bytes = settings.move_batch
        self._tier_retry_s = settings.tier_retry_s
        self._on_space_freed = on_space_freed
        self._codec = codec
        self._numbers = itertools.count()
        self._in_progress: set[int] = set()
        """Numbers of the batches that were submitted and have not ended."""
        self._after_moves: list[_AfterMoves] = []
        self._writers = started(settings.write_threads, "mover")
        self._readers = started(settings.read_threads, "tier-reader")

    def start_moves(self) -> None:
        """Plan due demotions and start planned moves. Called after each round of events. An exception in one move is
        logged and affects no other."""
        if self._table.evictor.begin_iteration():
            self._reactor.call_soon(self._on_space_freed)
        self._reactor.guarded(self._table.demote_to_low_watermark)
        moves = self._table.evictor.take_moves()
        if not moves:
            return
        for pair in sorted({(move.source, move.target) for move in moves}):
            self._start([move for move in moves if (move.source, move.target) == pair])

    def _start(self, moves: list[TierMove]) -> None:
        jobs: list[MoveJob] = []
        size_bytes = 0
        for move in moves:
            if jobs and size_bytes + move.block.size_bytes > self._batch_bytes:
                self._submit(jobs)
                jobs, size_bytes = [], 0
            self._reactor.guarded(self._begin, move, jobs)
            size_bytes += move.block.size_bytes
        if jobs:
            self._submit(jobs)

    def _begin(self, move: TierMove, jobs: list[MoveJob]) -> None:
        """Make a job unless the block was dropped. The source slot is looked up here, because it is unknown afterwards."""
        slot = move.block.slot_in(move.source)
        if move.block.is_dropped or slot is None:
            self._table.finish_move(move.block, move.source, move.target, move.slot, is_done=False)
        else:
            jobs.append(MoveJob(move, slot, self._tiers[move.source]))

    def _submit(self, jobs: list[MoveJob]) -> None:
        number = next(self._numbers)
        self._in_progress.add(number)
        self._writers.submit(self._copy, number, jobs)

    def _copy(self, number: int, jobs: list[MoveJob]) -> None:
        """Execute a batch, in a mover thread."""
        first = jobs[0].move
        failure: str | None = None
        try:
            fetch(self._tiers[first.source], jobs)
            if self._codec is not None:
                for job in jobs:
                    if job.move.encoding is not None:
                        job.encode(self._codec)
            self._tiers[first.target].write_batch([job.record() for job in jobs if job.is_good])
        except (TierFull, KVStoreError) as error:
            failure = str(error)
        except Exception as error:
            log.exception("moving blocks between tiers failed")
            failure = str(error)
        self._reactor.call_soon(lambda: self._finish(number, jobs, failure))

    def _finish(self, number: int, jobs: list[MoveJob], failure: str | None) -> None:
        try:
            self._end_all(jobs, failure)
        finally:
            self._in_progress.discard(number)
            waiting, self._after_moves = self._after_moves, []
            for one in waiting:
                one.batches.discard(number)
                self._flush_after(one)

    def _end_all(self, jobs: list[MoveJob], failure: str | None) -> None:
        target = jobs[0].move.target
        if failure is not None:
            log.warning("moving %d blocks to %s failed: %s", len(jobs), self._tiers[target].name, failure)
            self._suspend(target, failure)
        for job in jobs:
            self._reactor.guarded(self._end, job, failure is None and job.is_good)
        self._on_space_freed()

    def _end(self, job: MoveJob, is_done: bool) -> None:
        move = job.move
        move.block.stays_raw |= job.is_refused
        self._table.finish_move(move.block, move.source, move.target, move.slot, is_done=is_done, loss=job.loss)
        if job.damage is not None:
            log.warning("dropped a damaged copy in %s: %s", self._tiers[move.source].name, job.damage)
            self._table.copies.drop_copy(move.block, move.source)

    def _suspend(self, tier: int, refusal: str) -> None:
        """Suspend a tier whose device refused a write."""
        self._table.evictor.suspend(tier, is_suspended=True, refusal=refusal)
        self._reactor.call_later(self._tier_retry_s, lambda: self._table.evictor.suspend(tier, is_suspended=False))

    def read(self, reads: Sequence[SlowRead], done: Callable[[list[Exception | None]], None]) -> None:
        """Read blocks from tiers that block; `done` gets a result for each, in the loop. The caller has acquired the
        blocks."""

        def work() -> None:
            answers: list[Exception | None] = [None] * len(reads)
            for tier in {read.tier for read in reads}:
                indexes = [index for index, read in enumerate(reads) if read.tier == tier]
                for index, answer in zip(indexes, self._read(tier, [reads[index] for index in indexes]), strict=True):
                    answers[index] = answer
            self._reactor.call_soon(lambda: done(answers))

        self._readers.submit(work)

    def _read(self, tier: int, reads: Sequence[SlowRead]) -> Sequence[Exception | None]:
        """Execute reads of one tier, in a reader thread."""
        try:
            found = self._tiers[tier].read_batch_into([read.slot for read in reads], [read.buffer() for read in reads])
            return [answer or _check_decoded(read) for read, answer in zip(reads, found, strict=True)]
        except Exception as error:
            log.exception("reading from %s failed", self._tiers[tier].name)
            return [error] * len(reads)

    def drop_damaged(self, read: SlowRead, result: Exception | None) -> None:
        """Drop the copy that was read if the read found it damaged."""
        if isinstance(result, Corrupt):
            log.warning("dropped a damaged copy in %s: %s", self._tiers[read.tier].name, result)
            self._table.corrupt_reads += 1
            self._table.copies.drop_copy(read.block, read.tier)

    def run_in_reader(self, work: Callable[[], None]) -> None:
        """Run a short function that would block the loop in a reader thread."""
        self._readers.submit(work)

    def flush(self, done: Callable[[KVStoreError | None], None] = lambda _error: None) -> None:
        """Make queued deletions durable and call `done` in the loop. With an error, deleted blocks may return after a
        restart until a later flush."""

        def work() -> None:
            failure: KVStoreError | None = None
            for tier in self._tiers.values():
                try:
                    tier.flush()
                except Exception as error:  # any: `done` must be called
                    failure = Unavailable(f"deletions in {tier.name} are not durable yet: {error}")
                    log.warning("%s", failure)
            self._reactor.call_soon(lambda: done(failure))

        self._writers.submit(work)

    def flush_after_moves(self, done: Callable[[KVStoreError | None], None]) -> None:
        """As `flush`, once all moves in progress have ended. Until then a dropped block that is being written to a
        durable tier has a copy there which cannot be deleted yet."""
        self._flush_after(_AfterMoves(set(self._in_progress), done))

    def _flush_after(self, waiting: "_AfterMoves") -> None:
        if waiting.batches:
            self._after_moves.append(waiting)
        else:
            self.flush(waiting.done)

    def close(self) -> None:
        """Wait for moves in progress; queued ones are dropped."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)


def _check_decoded(read: SlowRead) -> Exception | None:
    """Return an error unless the value decodes to the checksum that its readers get. Another release of torch may round
    differently."""
    if read.loss is None or len(read.buffer()) == read.slot.size_bytes:
        return None
    if xxhash.xxh3_64_intdigest(read.buffer()) == read.loss.checksum:
        return None
    return ChecksumMismatch(f"{read.slot} decodes to other bytes than when it was written: check the torch version")
