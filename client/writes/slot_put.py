"""Puts into slots that a local node opens: copied through shared memory. Sans-I/O: see effects.py."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import AnyConnectionLease, Operation, RequestEffect, work
from kvstore.client.writes.put_batch import UNRESERVED, PutBatch
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import CommitPuts, OpenSlots, OpenSlotsReply
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.memcpy import Pair

RUN_BYTES: Final = 256 << 10
"""Largest copy, unless a single row is larger: a copy is hashed while in the processor's cache."""

Part = Callable[[int, int], memoryview]
"""Memory of a slab: (offset, size in bytes) to view."""


def runs_of_rows(
    flat: memoryview, row_bytes: int, rows: Sequence[int], slabs: Sequence[int], offsets: Sequence[int], parts: Mapping[int, Part]
) -> list[Pair]:
    """Copies of rows of `flat`, in order, to their slabs and offsets; contiguous rows are joined."""
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
    """Slot writes of one put. Keys that the node had no space for, or that another writer reserved, go to `busy` for a
    retry."""

    def __init__(self, resources: ClientResources, batch: PutBatch, deadline: Deadline) -> None:
        self._resources = resources
        self._batch = batch
        self._deadline = deadline

    def write_shared(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[bool]:
        """Copy values into the node's slabs; False if they are not reachable from this process."""
        message = OpenSlots(self._batch.namespace, *self._batch.columns(indices), self._batch.parents_of(indices))
        begun = yield from self._resources.daemons.begin_local(node.route, message, OpenSlotsReply, self._deadline)
        if begun is None:
            return False
        connection, opened = begun
        try:
            if len(opened.statuses) != len(indices):
                raise ProtocolError(f"node {node.node_id} opened {len(opened.statuses)} puts for {len(indices)} keys")
            there, again = yield from self._fill_slots(connection, node, indices, opened)
        except BaseException:
            connection.discard()  # the node drops open puts of a closed connection
            raise
        connection.release()
        if opened.statuses.count(GRANTED) < len(indices):
            there += [i for i, status in zip(indices, opened.statuses, strict=True) if status == PRESENT]
            again += [i for i, status in zip(indices, opened.statuses, strict=True) if status == BUSY]
        yield from self._batch.not_written(there, again, busy)
        return True

    def _commit(self, connection: AnyConnectionLease, node: KnownNode, indices: list[int], commit: CommitPuts) -> Operation[Flags]:
        try:
            reply: Flags = yield RequestEffect(connection.channel, commit, Flags, self._deadline)
        finally:
            self._answered(connection, node, indices)
        return reply

    def _answered(self, connection: AnyConnectionLease, node: KnownNode, indices: list[int]) -> None:
        """Record that the node may hold uncommitted blocks of this put, once a commit was sent."""
        if self._batch.granted[indices[0]] == UNRESERVED:
            self._resources.uncommitted_puts.answered(node, connection.channel.welcome.epoch)

    def _fill_slots(
        self, connection: AnyConnectionLease, node: KnownNode, indices: list[int], opened: OpenSlotsReply
    ) -> Operation[tuple[list[int], list[int]]]:
        """Copy into the slots and commit; returns what was not stored, as `PutBatch.written`."""
        resources, channel = self._resources, connection.channel
        slabs, offsets, put_ids, written = opened.slabs, opened.offsets, opened.put_ids, indices
        if opened.statuses.count(GRANTED) < len(indices):
            positions = [position for position, status in enumerate(opened.statuses) if status == GRANTED]
            slabs, offsets = [opened.slabs[position] for position in positions], [opened.offsets[position] for position in positions]
            put_ids, written = [opened.put_ids[position] for position in positions], [indices[position] for position in positions]
        wanted = list(set(slabs))
        mapped = yield from resources.mapping.map_slabs(channel, node.node_id, wanted, self._deadline, writable=True)
        if opened.slabs_ahead:  # after map_slabs, to run beside the copies: a process maps one slab at a time
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
            reply = yield from self._commit(connection, node, indices, CommitPuts(put_ids, sums))
            return self._batch.written(node, written, reply)
        self._answered(connection, node, indices)
        return [], []
