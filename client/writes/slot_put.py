"""Values that are copied into slots which a node of this host opens. Sans-I/O: see effects.py."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import AnyLoan, Operation, RequestEffect, work
from kvstore.client.writes.put_batch import UNRESERVED, PutBatch
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import CommitPuts, OpenSlots, OpenSlotsReply
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.memcpy import Pair

RUN_BYTES: Final = 256 << 10
"""A copy is no larger, unless one row is: what has been copied is hashed while it is in the processor's cache."""

Part = Callable[[int, int], memoryview]
"""The memory of a slab from an offset on, by its size."""


def runs_of_rows(
    flat: memoryview, row_bytes: int, rows: Sequence[int], slabs: Sequence[int], offsets: Sequence[int], parts: Mapping[int, Part]
) -> list[Pair]:
    """The copies of these rows of `flat`, in order, each to its slab and offset."""
    row, slab, offset = np.array(rows, np.int64), np.array(slabs, np.int64), np.array(offsets, np.int64)
    is_end = (np.diff(row) != 1) | (np.diff(slab) != 0) | (np.diff(offset) != row_bytes)
    most = max(1, RUN_BYTES // row_bytes)
    pairs = []
    for begin, end in pairwise([0, *(np.flatnonzero(is_end) + 1).tolist(), len(rows)]):
        part, source, target = parts[slabs[begin]], rows[begin] * row_bytes, offsets[begin]
        for at in range(0, (end - begin) * row_bytes, most * row_bytes):
            size = min(most * row_bytes, (end - begin) * row_bytes - at)
            pairs.append((part(target + at, size), flat[source + at : source + at + size]))
    return pairs


class SlotPut:
    """Of one put. Keys for which a node had no room, or that another writer has there, go to `busy`, to be asked for again."""

    def __init__(self, resources: ClientResources, batch: PutBatch, deadline: Deadline) -> None:
        self._resources = resources
        self._batch = batch
        self._deadline = deadline

    def write_shared(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[bool]:
        """Values are copied into the node's slabs; False if they cannot be reached from here."""
        message = OpenSlots(self._batch.namespace, *self._batch.columns(indices), self._batch.parents_of(indices))
        begun = yield from self._resources.daemons.begin_shared(node.route, message, OpenSlotsReply, self._deadline)
        if begun is None:
            return False
        loan, opened = begun
        try:
            if len(opened.statuses) != len(indices):
                raise ProtocolError(f"node {node.node_id} opened {len(opened.statuses)} puts for {len(indices)} keys")
            there, again = yield from self._fill_slots(loan, node, indices, opened)
        except BaseException:
            loan.discard()  # the node forgets the puts of a connection that ends
            raise
        loan.release()
        if opened.statuses.count(GRANTED) < len(indices):
            there += [i for i, status in zip(indices, opened.statuses, strict=True) if status == PRESENT]
            again += [i for i, status in zip(indices, opened.statuses, strict=True) if status == BUSY]
        yield from self._batch.not_written(there, again, busy)
        return True

    def _commit(self, loan: AnyLoan, node: KnownNode, indices: list[int], commit: CommitPuts) -> Operation[Flags]:
        try:
            reply: Flags = yield RequestEffect(loan.channel, commit, Flags, self._deadline)
        finally:
            self._answered(loan, node, indices)
        return reply

    def _answered(self, loan: AnyLoan, node: KnownNode, indices: list[int]) -> None:
        """The node may have something of this put, which the cluster need not know: before it is told to commit, it has nothing."""
        if self._batch.granted[indices[0]] == UNRESERVED:
            self._resources.early_puts.answered(node, loan.channel.welcome.epoch)

    def _fill_slots(
        self, loan: AnyLoan, node: KnownNode, indices: list[int], opened: OpenSlotsReply
    ) -> Operation[tuple[list[int], list[int]]]:
        """Copy into the slots and commit; what was not stored, as `PutBatch.written` tells it."""
        resources, channel = self._resources, loan.channel
        slabs, offsets, put_ids, written = opened.slabs, opened.offsets, opened.put_ids, indices
        if opened.statuses.count(GRANTED) < len(indices):
            places = [place for place, status in enumerate(opened.statuses) if status == GRANTED]
            slabs, offsets = [opened.slabs[place] for place in places], [opened.offsets[place] for place in places]
            put_ids, written = [opened.put_ids[place] for place in places], [indices[place] for place in places]
        wanted = list(set(slabs))
        mapped = yield from resources.mapping.map_slabs(channel, node.node_id, wanted, self._deadline, writable=True)
        if opened.slabs_ahead:  # then, so that it goes on beside the copies: one process maps one thing at a time
            yield from resources.mapping.map_ahead(channel, node.node_id, opened.slabs_ahead, self._deadline)
        if written:
            parts = {number: slab.part for number, slab in zip(wanted, mapped, strict=True)}
            sources = self._batch.sources
            copies: Callable[[], list[int]]
            if sources.flat is None:
                columns = zip(slabs, offsets, written, strict=True)
                gathers = [(parts[slab](offset, sources.sizes[i]), sources[i]) for slab, offset, i in columns]
                copies = partial(resources.copier.gather_and_sum, gathers)
            else:
                row_bytes = sources.sizes[0]
                runs = runs_of_rows(sources.flat, row_bytes, written, slabs, offsets, parts)
                copies = partial(resources.copier.copy_and_sum_rows, runs, row_bytes)
            sums = yield from work(copies, sources.bytes_of(written))
            reply = yield from self._commit(loan, node, indices, CommitPuts(put_ids, sums))
            return self._batch.written(node, written, reply)
        self._answered(loan, node, indices)
        return [], []
