"""Incremental resync (anti-entropy): digests of runs of blocks are compared with the master's, and only runs that
differ are sent (protocol/digests.py).

The blocks are read in parts, one per loop iteration, and the digests are sent in further iterations. Later changes of a
block are events and follow the inventory. Not thread-safe.
"""

import logging
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Final

import numpy as np

from kvstore.protocol.catalog_messages import Digests
from kvstore.protocol.digests import numbers, starts
from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.rows import read, rows_of, tier_masks

RUNS_PER_MESSAGE: Final = 4_096
"""Runs per message, computed in one loop iteration: 6 ms."""

SendDigests = Callable[[Digests, Callable[[Flags | KVStoreError], None]], None]
"""Sends one message to the master and calls back once."""
Soon = Callable[[Callable[[], None]], object]
Differs = Callable[[list[Block] | KVStoreError | None], None]

log = logging.getLogger("kvstore.store")


class InventoryComparison:
    """One comparison, started by its constructor. Calls `then` once in a later loop iteration, unless `end` is called
    first.

    The argument is the list of blocks to send, the master's error, or None after a failure such as lack of memory.
    After None the caller sends the full inventory from new parts, because these may be half read.
    """

    def __init__(
        self, parts: Iterator[Sequence[Block]], *, epoch: int, send: SendDigests, soon: Soon, then: Differs, max_blocks: int
    ) -> None:
        """Above `max_blocks` all blocks are to be sent."""
        self._epoch, self._send, self._soon, self._then = epoch, send, soon, then
        self._parts, self._max_blocks = parts, max_blocks
        self._read_blocks: list[Block] = []
        self._generations, self._checksums, self._sizes, self._tiers = array("Q"), array("Q"), array("Q"), array("B")
        self._seed = 0
        self._flags: list[bytes | None] = []
        """By message."""
        self._order = np.zeros(0, np.intp)
        self._begins = np.zeros(0, np.intp)
        self._is_over = False
        soon(partial(self._step, self._read))

    def end(self) -> None:
        self._is_over = True

    def _step(self, step: Callable[[], None]) -> None:
        """Run a step unless the comparison has ended. A failed step ends it, so that the inventory can proceed."""
        if self._is_over:
            return
        try:
            step()
        except Exception:
            if self._is_over:  # `then` itself failed
                raise
            log.exception("comparing the inventory failed: sending all of it")
            self._finish(None)

    def _finish(self, differing: list[Block] | KVStoreError | None) -> None:
        self.end()
        self._then(differing)

    def _read(self) -> None:
        found = next(self._parts, None)
        if found:
            columns, rows = found[0].columns, rows_of(found)
            masks = tier_masks(columns, rows)
            is_here = masks != 0  # others were dropped
            rows = rows[is_here]
            self._read_blocks += compress(found, is_here.tolist())
            for column, wide in (
                (self._generations, columns.generations),
                (self._checksums, columns.checksums),
                (self._sizes, columns.sizes),
            ):
                column.frombytes(read(wide, rows).tobytes())
            self._tiers.frombytes(masks[is_here].tobytes())
        if found is not None:
            self._soon(partial(self._step, self._read))
        elif len(self._read_blocks) > self._max_blocks:
            self._finish(self._read_blocks)
        else:
            self._soon(partial(self._step, self._order_all))

    def _order_all(self) -> None:
        self._order = np.argsort(np.frombuffer(self._generations, np.uint64), kind="stable")  # they are nearly sorted
        self._begins = starts(np.frombuffer(self._tiers, np.uint8)[self._order])
        self._seed = secrets.randbits(64)
        self._flags = [None] * max(-(-len(self._begins) // RUNS_PER_MESSAGE), 1)
        self._soon(partial(self._step, partial(self._send_next, 0)))

    def _send_next(self, message: int) -> None:
        at, is_last = message * RUNS_PER_MESSAGE, message + 1 == len(self._flags)
        self._send(self._digests(at, more=not is_last), lambda reply: self._step(partial(self._answered, message, reply)))
        if not is_last:
            self._soon(partial(self._step, partial(self._send_next, message + 1)))

    def _digests(self, at: int, *, more: bool) -> Digests:
        """Digests of RUNS_PER_MESSAGE runs from `at` on, or fewer at the end."""
        ends = np.append(self._begins[at : at + RUNS_PER_MESSAGE + 1], len(self._order))[: RUNS_PER_MESSAGE + 1]
        begins = ends[:-1]
        part = self._order[ends[0] : ends[-1]]
        generations, checksums, sizes = (
            np.frombuffer(column, np.uint64)[part] for column in (self._generations, self._checksums, self._sizes)
        )
        firsts = begins - ends[0]
        found = numbers(self._seed, generations, checksums, sizes)
        return Digests(
            self._epoch,
            self._seed,
            int(more),
            generations[firsts].tolist(),
            np.diff(ends).astype(np.uint8).tobytes(),
            np.add.reduceat(found, firsts).tolist() if len(firsts) else [],
            np.frombuffer(self._tiers, np.uint8)[self._order[begins]].tobytes(),
        )

    def _answered(self, message: int, reply: Flags | KVStoreError) -> None:
        runs = min(len(self._begins) - message * RUNS_PER_MESSAGE, RUNS_PER_MESSAGE)
        if isinstance(reply, Flags) and len(reply.flags) != runs:
            reply = ProtocolError("the master answered Digests with a wrong number of flags")
        if isinstance(reply, KVStoreError):
            self._finish(reply)
            return
        self._flags[message] = reply.flags
        if None not in self._flags:
            self._finish(self._differing(b"".join(flags for flags in self._flags if flags is not None)))

    def _differing(self, flags: bytes) -> list[Block]:
        """Return the blocks of runs without a flag, in inventory order."""
        counts = np.diff(np.append(self._begins, len(self._order)))
        is_named = np.repeat(np.frombuffer(flags, np.uint8) == 0, counts)
        return [self._read_blocks[at] for at in np.sort(self._order[is_named]).tolist()]
