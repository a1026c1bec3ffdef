"""Puts into slots of a node on another host, by the transfer engine: one OpenSlots, copies in parts, and CommitPuts
alongside. Sans-I/O: see effects.py.

While one part is copied, earlier ones are hashed here, verified by the node, and committed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import AnyConnectionLease, GatherEffect, Operation, RequestEffect, work
from kvstore.client.memory import checksum
from kvstore.client.writes.put_batch import PutBatch
from kvstore.protocol.errors import ProtocolError, Unreachable
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import CommitPuts, OpenSlots, OpenSlotsReply
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.paths.batch import Copy, Span
from kvstore.transfer.paths.peer import Peer

PART_BYTES: Final = 8 << 20
"""Minimum unit of copy, hash and commit: a few milliseconds of a fast link, and many times the cost of a message."""


class EnginePut:
    """Engine writes of one put. Keys that the node had no space for, or that another writer reserved, go to `busy` for
    a retry."""

    def __init__(self, resources: ClientResources, batch: PutBatch, deadline: Deadline) -> None:
        self._resources = resources
        self._batch = batch
        self._deadline = deadline

    def write(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[list[int]]:
        """Write and commit; returns the keys that the engine could not write, which stay reserved."""
        resources = self._resources
        message = OpenSlots(self._batch.namespace, *self._batch.columns(indices), self._batch.parents_of(indices), 1)
        try:
            peer = yield from resources.engine_copies.peer_of(node)
        except Unreachable as error:
            yield from resources.engine_copies.failed(node, error, self._deadline)
            return indices
        connection, opened = yield from resources.daemons.begin(node.route, message, OpenSlotsReply, self._deadline)
        try:
            if not len(opened.statuses) == len(opened.regions) == len(indices):
                raise ProtocolError(f"node {node.node_id} opened {len(opened.statuses)} puts for {len(indices)} keys")
            filling = _StagingFill(
                connection, node, there=[i for i, status in zip(indices, opened.statuses, strict=True) if status == PRESENT]
            )
            filling.again += [i for i, status in zip(indices, opened.statuses, strict=True) if status == BUSY]
            yield from self._fill(filling, peer, indices, opened)
            if filling.failure is not None and not connection.channel.is_open:  # the node is dead, not only its engine unreachable
                raise filling.failure
        except BaseException:
            connection.discard()  # the node drops open puts of a closed connection
            raise
        if filling.failure is None:
            connection.release()
        else:
            connection.discard()
            yield from resources.engine_copies.failed(node, filling.failure, self._deadline)
        yield from self._batch.not_written(filling.there, filling.again, busy)
        return filling.left

    def _fill(self, filling: "_StagingFill", peer: Peer, indices: Sequence[int], opened: OpenSlotsReply) -> Operation[None]:
        """Write into the slots and commit, in parts."""
        try:
            parts = list(self._parts(peer, indices, opened))
        except Unreachable as error:
            filling.failure = error
            filling.left += [i for i, status in zip(indices, opened.statuses, strict=True) if status == GRANTED]
            return
        if len(parts) == 1:
            yield from self._write_part(filling, parts[0])
        elif parts:  # the engine copies them in this order
            yield GatherEffect([self._write_part(filling, part) for part in parts])

    def _parts(self, peer: Peer, indices: Sequence[int], opened: OpenSlotsReply) -> "Iterator[_JoinedValues]":
        """The granted values in parts: half of them, half of the rest, and so on. Few messages are sent, and little
        work is left after the last copy. Raises Unreachable for a malformed region."""
        remote, sources = self._resources.engine_copies.remote, self._batch.sources
        left_bytes = sources.bytes_of([i for i, status in zip(indices, opened.statuses, strict=True) if status == GRANTED])
        part = _JoinedValues()
        for i, status, put_id, description in zip(indices, opened.statuses, opened.put_ids, opened.regions, strict=True):
            if status != GRANTED:
                continue
            region, offset = remote.region(peer, description), 0
            for buffer in sources[i]:
                part.copies.append((buffer, Span(region, offset), len(buffer)))
                offset += len(buffer)
            part.indices.append(i)
            part.put_ids.append(put_id)
            part.size_bytes += offset
            if part.size_bytes >= max(PART_BYTES, left_bytes // 2):
                left_bytes -= part.size_bytes
                yield part
                part = _JoinedValues()
        if part.indices:
            yield part

    def _write_part(self, filling: "_StagingFill", part: "_JoinedValues") -> Operation[None]:
        """Copy and hash one part, then commit all copied parts, unless another operation is committing."""
        try:
            yield from self._resources.engine_copies.move(filling.node, part.copies, self._deadline)
        except Unreachable as error:
            filling.failure = filling.failure or error
            filling.left += part.indices
            return
        sources = [self._batch.sources[i] for i in part.indices]
        part.sums = yield from work(lambda: [checksum(buffers) for buffers in sources], part.size_bytes)
        filling.copied.append(part)
        if filling.is_committing:
            return
        filling.is_committing = True
        while filling.copied:
            yield from self._commit(filling)
        filling.is_committing = False

    def _commit(self, filling: "_StagingFill") -> Operation[None]:
        copied, filling.copied = filling.copied, []
        put_ids = [put_id for part in copied for put_id in part.put_ids]
        commit = CommitPuts(put_ids, [found for part in copied for found in part.sums])
        reply: Flags = yield RequestEffect(filling.connection.channel, commit, Flags, self._deadline)
        there, again = self._batch.written(filling.node, [i for part in copied for i in part.indices], reply)
        filling.there += there
        filling.again += again


@dataclass(slots=True, eq=False)
class _JoinedValues:
    """Values that are copied as one part."""

    indices: list[int] = field(default_factory=list)
    put_ids: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    size_bytes: int = 0
    sums: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class _StagingFill:
    """Slots of one OpenSlots, shared by its parts' operations, which run in one thread or as tasks of one loop."""

    connection: AnyConnectionLease
    node: KnownNode
    there: list[int]
    again: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    copied: list[_JoinedValues] = field(default_factory=list)
    """Parts to be committed."""
    is_committing: bool = False
    """One operation awaits the node's reply; it then commits the parts copied meanwhile."""
    failure: Unreachable | None = None
    """Why the engine could not write the keys in `left`."""
