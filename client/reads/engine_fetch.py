"""Reads of values in slabs of another host, by the transfer engine, under a lease. Sans-I/O: see effects.py."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.client.connections.engine_copies import EngineCopies
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import GatherEffect, Operation, SendOneWayEffect, work
from kvstore.client.memory import Parts, checksum, size_of
from kvstore.client.reads.inline_values import SLICE_BYTES, SlicedValue
from kvstore.client.reads.progress import GetProgress, ReadReply
from kvstore.client.reads.replica_lookup import Wanted
from kvstore.protocol.errors import ChecksumMismatch, LeaseExpired, StaleHandle, Unreachable
from kvstore.protocol.node_messages import MAPPED, ReleaseLeases
from kvstore.transfer.paths.batch import Copy, Span


class _FetchedValue(NamedTuple):
    """A value to be read: its position in the reply, its source span and its buffer."""

    position: int
    span: Span
    buffer: Parts


class EngineFetch:
    """Fetch of the values of one reply. Create it before the request is sent: the lease is measured from then, because
    clocks of two hosts differ."""

    def __init__(self, engine_copies: EngineCopies, clock_ns: Callable[[], int], lease_ms: int) -> None:
        self._engine_copies = engine_copies
        self._clock_ns = clock_ns
        self._lease_ms = lease_ms
        self._asked_ns = clock_ns()

    def run(self, answer: ReadReply, progress: GetProgress[Any], *, is_alone: bool) -> Operation[None]:
        """Read the mapped values, verify them, and release the lease. Failed values are retried.

        `is_alone`: no other read is in flight, so values are hashed while the rest is transferred. Raises StaleHandle
        and Unreachable if the node is dead, DeadlineExceeded.
        """
        blocks, channel, node = answer.blocks, answer.connection.channel, answer.node
        positions = answer.positions(MAPPED)
        try:
            slabs = [blocks.slabs[position] for position in positions]
            regions = yield from self._engine_copies.show_slabs(channel, node, slabs, answer.deadline)
            buffers = [progress.buffer(answer.wanted[position][0], blocks.sizes[position]) for position in positions]
            moved = [
                _FetchedValue(position, Span(region, blocks.offsets[position]), buffer)
                for region, position, buffer in zip(regions, positions, buffers, strict=True)
                if buffer is not None
            ]
            total_bytes = sum(size_of(value.buffer) for value in moved)
            if is_alone and len(moved) == 1 and total_bytes > SLICE_BYTES:
                sums = [(yield from self._in_slices(moved[0], answer))]
            elif is_alone and total_bytes > SLICE_BYTES:  # the engine copies them in this order
                found = yield GatherEffect([self._fetch(part, answer) for part in _parts(moved)])
                sums = [total for part in found for total in part]
            else:
                sums = yield from self._fetch(moved, answer)
        except (StaleHandle, Unreachable) as error:
            if not channel.is_open:  # the node is dead, not only its engine unreachable
                raise
            # The engine is unreachable, or slabs were freed: look up again, and read by message.
            yield SendOneWayEffect(channel, ReleaseLeases([blocks.lease]))
            yield from self._engine_copies.failed(node, error, progress.deadline)
            progress.retry_otherwise(answer.items(positions), error)
            return
        yield SendOneWayEffect(channel, ReleaseLeases([blocks.lease]))
        good = [value.position for value, found in zip(moved, sums, strict=True) if found == blocks.checksums[value.position]]
        damaged = [value.position for value, found in zip(moved, sums, strict=True) if found != blocks.checksums[value.position]]
        progress.arrived(answer, good)
        if damaged:
            is_late = self._clock_ns() >= self._asked_ns + blocks.lease_ms * 1_000_000
            self._retry_wrong(node, answer.items(damaged), progress, is_late=is_late)

    def _fetch(self, values: Sequence["_FetchedValue"], answer: ReadReply) -> Operation[list[int]]:
        """Read these values: the xxh3_64 of each."""
        copies = [copy for value in values for copy in _copies(value.span.region, value.span.offset_bytes, value.buffer)]
        yield from self._engine_copies.move(answer.node, copies, answer.deadline)
        return (yield from work(lambda: [checksum(value.buffer) for value in values], sum(size_of(value.buffer) for value in values)))

    def _in_slices(self, value: "_FetchedValue", answer: ReadReply) -> Operation[int]:
        """Read one large value in slices, hashed while in flight: its xxh3_64."""
        region, begin = value.span.region, value.span.offset_bytes

        def bring(offset: int, buffer: Parts) -> Operation[None]:
            return self._engine_copies.move(answer.node, _copies(region, begin + offset, buffer), answer.deadline)

        return SlicedValue(value.buffer, bring).run()

    def _retry_wrong(self, node: KnownNode, items: list[Wanted], progress: GetProgress[Any], *, is_late: bool) -> None:
        """Retry values with a wrong checksum: overwritten after the lease expired, or damaged."""
        if is_late:
            progress.retry(0, items, LeaseExpired(f"reading took longer than the lease of {self._lease_ms} ms"))
            return
        error = ChecksumMismatch(f"node {node.node_id} holds a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node.node_id, items, error)


def _parts(values: Sequence[_FetchedValue]) -> Iterator[list[_FetchedValue]]:
    """The values in order, in groups of SLICE_BYTES."""
    part: list[_FetchedValue] = []
    size_bytes = 0
    for value in values:
        part.append(value)
        size_bytes += size_of(value.buffer)
        if size_bytes >= SLICE_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _copies(region: Any, offset_bytes: int, buffer: Parts) -> list[Copy]:
    """Copies from a region, from an offset on, into the parts of a buffer."""
    copies: list[Copy] = []
    for part in buffer:
        copies.append((Span(region, offset_bytes), part, len(part)))
        offset_bytes += len(part)
    return copies
