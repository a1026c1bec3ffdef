"""Copies between tiers, in threads of their own: demotions and warm-ups planned by the table, and reads from tiers that block.

The node's loop plans and records; here only bytes move. Slots of a planned copy and of a block being read are neither freed nor
reused until the loop is told that it is over, so the threads need no locks.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.protocol.errors import ChecksumMismatch, KVStoreError, Unavailable
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
    """Made in the node's loop, used in the mover's thread and looked at again in the loop once it is over."""

    __slots__ = ("checksum", "damage", "data", "is_refused", "loss", "lossy_checksum", "move", "source")

    def __init__(self, move: TierMove, source: Slot, tier: Tier) -> None:
        block = move.block
        self.move = move
        self.source = source
        self.damage: Exception | None = None
        self.is_refused = False
        """The value cannot be encoded, or not without losing more than it has lost before."""
        self.data: Buffer = tier.view(source) if isinstance(tier, DramTier) else b""
        self.loss = block.loss_of_copy(move.source)
        self.checksum = block.checksum_in(move.source)
        self.lossy_checksum = block.lossy_checksum()

    def encode(self, codec: ValueCodec) -> None:
        """Put the encoded value in place of the value. All lossy copies of a block give the same bytes: else a reader's second read would
        not be like its first, and each way down might cost some more."""
        try:
            encoded = codec.encode(memoryview(self.data))
        except Exception:
            log.exception("a value could not be encoded; it is stored as it is")
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
    """Read the sources that cannot be looked at in place."""
    if isinstance(tier, DramTier):
        return
    destinations = [memoryview(bytearray(job.source.size_bytes)) for job in jobs]
    answers = tier.read_batch_into([job.source for job in jobs], destinations)
    for job, destination, answer in zip(jobs, destinations, answers, strict=True):
        job.data, job.damage = destination, answer


@dataclass(slots=True, eq=False)
class SlowRead:
    """One block to be read from a tier that blocks, into `destination`; None: memory for it is taken when it is read, and none while it
    waits for a thread. `loss` is what its copy there gives in place of what was put."""

    block: Block
    tier: int
    slot: Slot
    destination: memoryview | None = None
    loss: Loss | None = None

    def room(self) -> memoryview:
        """Its bytes are undefined. From numpy, which unlike bytearray does not fill it first while it holds the GIL."""
        if self.destination is None:
            self.destination = np.empty(self.block.size_bytes, np.uint8).data
        return self.destination


class TierMover:
    """Owns the threads. Methods belong to the node's loop; `on_room` is called there whenever slots may have become free."""

    def __init__(
        self,
        reactor: Reactor,
        table: BlockTable,
        tiers: dict[int, Tier],
        *,
        settings: NodeSettings,
        on_room: Callable[[], None],
        codec: ValueCodec | None = None,
    ) -> None:
        """`codec` makes the encoded values that the table plans. Raises ConfigError: there are not so many threads to be had."""
        self._reactor = reactor
        self._table = table
        self._tiers = tiers
        self._batch_bytes = settings.move_batch
        self._tier_retry_s = settings.tier_retry_s
        self._on_room = on_room
        self._codec = codec
        self._writers = started(settings.write_threads, "mover")
        self._readers = started(settings.read_threads, "tier-reader")

    def kick(self) -> None:
        """Start the copies that the table wants. Called after every round of events. Whatever one of them raises is logged and its own
        affair: it may be one tenant's block, and the mover makes room for all."""
        if self._table.room.next_turn():
            self._reactor.call_soon(self._on_room)
        self._reactor.guarded(self._table.relieve)
        moves = self._table.room.take_moves()
        if not moves:
            return
        for pair in sorted({(move.source, move.target) for move in moves}):
            self._start([move for move in moves if (move.source, move.target) == pair])

    def _start(self, moves: list[TierMove]) -> None:
        jobs: list[MoveJob] = []
        size_bytes = 0
        for move in moves:
            if jobs and size_bytes + move.block.size_bytes > self._batch_bytes:
                self._writers.submit(self._copy, jobs)
                jobs, size_bytes = [], 0
            self._reactor.guarded(self._begin, move, jobs)
            size_bytes += move.block.size_bytes
        if jobs:
            self._writers.submit(self._copy, jobs)

    def _begin(self, move: TierMove, jobs: list[MoveJob]) -> None:
        """Add it to the jobs if it is still wanted. Sources are looked up here: once its block is gone a slot cannot be found any more."""
        slot = move.block.slot_in(move.source)
        if move.block.is_gone or slot is None:
            self._table.finish_move(move.block, move.source, move.target, move.slot, is_done=False)
        else:
            jobs.append(MoveJob(move, slot, self._tiers[move.source]))

    def _copy(self, jobs: list[MoveJob]) -> None:
        """In a writer's thread."""
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
            log.exception("a copy between tiers failed")
            failure = str(error)
        self._reactor.call_soon(lambda: self._finish(jobs, failure))

    def _finish(self, jobs: list[MoveJob], failure: str | None) -> None:
        target = jobs[0].move.target
        if failure is not None:
            log.warning("%d blocks could not be copied to %s: %s", len(jobs), self._tiers[target].name, failure)
            self._rest(target)
        for job in jobs:
            self._reactor.guarded(self._end, job, failure is None and job.is_good)
        self._on_room()

    def _end(self, job: MoveJob, is_done: bool) -> None:
        move = job.move
        move.block.stays_raw |= job.is_refused
        self._table.finish_move(move.block, move.source, move.target, move.slot, is_done=is_done, loss=job.loss)
        if job.damage is not None:
            log.warning("a block in %s is given up: %s", self._tiers[move.source].name, job.damage)
            self._table.copies.drop_copy(move.block, move.source)

    def _rest(self, tier: int) -> None:
        """The tier refused: go on without it for a while."""
        self._table.room.suspend(tier, is_suspended=True)
        self._reactor.call_later(self._tier_retry_s, lambda: self._table.room.suspend(tier, is_suspended=False))

    def read(self, reads: Sequence[SlowRead], done: Callable[[list[Exception | None]], None]) -> None:
        """Read blocks from tiers that block; `done` gets one answer each, in the loop's thread. The caller holds the blocks."""

        def work() -> None:
            answers: list[Exception | None] = [None] * len(reads)
            for tier in {read.tier for read in reads}:
                indexes = [index for index, read in enumerate(reads) if read.tier == tier]
                for index, answer in zip(indexes, self._read(tier, [reads[index] for index in indexes]), strict=True):
                    answers[index] = answer
            self._reactor.call_soon(lambda: done(answers))

        self._readers.submit(work)

    def _read(self, tier: int, reads: Sequence[SlowRead]) -> Sequence[Exception | None]:
        """In a reader's thread."""
        try:
            found = self._tiers[tier].read_batch_into([read.slot for read in reads], [read.room() for read in reads])
            return [answer or _check_decoded(read) for read, answer in zip(reads, found, strict=True)]
        except Exception as error:
            log.exception("reading from %s failed", self._tiers[tier].name)
            return [error] * len(reads)

    def do_aside(self, work: Callable[[], None]) -> None:
        """Have a reader's thread do something short that would hold up the loop."""
        self._readers.submit(work)

    def flush(self, done: Callable[[KVStoreError | None], None] = lambda _error: None) -> None:
        """Make deletions durable where a tier queues them; `done` is called in the loop's thread. It gets an error where a tier could
        not: what was deleted there may come back with the next process, until a later flush."""

        def work() -> None:
            failure: KVStoreError | None = None
            for tier in self._tiers.values():
                try:
                    tier.flush()
                except Exception as error:  # of whatever kind: `done` is called all the same
                    failure = Unavailable(f"deletions in {tier.name} wait, and would not outlive the node: {error}")
                    log.warning("%s", failure)
            self._reactor.call_soon(lambda: done(failure))

        self._writers.submit(work)

    def close(self) -> None:
        """Wait for the copies under way; those that have not begun are given up."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)


def _check_decoded(read: SlowRead) -> Exception | None:
    """What was decoded must be what this node, or the one before it on this folder, decoded when it wrote the value: its readers are told
    that checksum, and other releases of torch may round otherwise."""
    if read.loss is None or len(read.room()) == read.slot.size_bytes:
        return None
    if xxhash.xxh3_64_intdigest(read.room()) == read.loss.checksum:
        return None
    return ChecksumMismatch(f"{read.slot} does not decode to what it decoded to when it was written")
