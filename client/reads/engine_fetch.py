"""Values that lie in slabs of another host, under a lease: the transfer engine reads them. Sans-I/O: see effects.py."""

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
    """One to be read: its place in the answer, where it lies, and where it goes."""

    place: int
    span: Span
    room: Parts


class EngineFetch:
    """Of the values of one answer. Make it before the node is asked: its lease is counted from then on, as clocks of two hosts differ."""

    def __init__(self, engine_copies: EngineCopies, clock_ns: Callable[[], int], lease_ms: int) -> None:
        self._engine_copies = engine_copies
        self._clock_ns = clock_ns
        self._lease_ms = lease_ms
        self._asked_ns = clock_ns()

    def run(self, answer: ReadReply, progress: GetProgress[Any], *, is_alone: bool) -> Operation[None]:
        """Have the engine read the mapped values, verify them, and release the lease. What the engine cannot read is to be tried again.
        `is_alone`: nothing else is read meanwhile, so that what has arrived is hashed while the rest is on its way. Raises StaleHandle,
        Unreachable: the node is gone; DeadlineExceeded."""
        blocks, channel, node = answer.blocks, answer.loan.channel, answer.node
        places = answer.places(MAPPED)
        try:
            slabs = [blocks.slabs[place] for place in places]
            regions = yield from self._engine_copies.show_slabs(channel, node, slabs, answer.deadline)
            rooms = [progress.room(answer.wanted[place][0], blocks.sizes[place]) for place in places]
            moved = [
                _FetchedValue(place, Span(region, blocks.offsets[place]), room)
                for region, place, room in zip(regions, places, rooms, strict=True)
                if room is not None
            ]
            total_bytes = sum(size_of(value.room) for value in moved)
            if is_alone and len(moved) == 1 and total_bytes > SLICE_BYTES:
                sums = [(yield from self._in_slices(moved[0], answer))]
            elif is_alone and total_bytes > SLICE_BYTES:  # the engine copies them in this order
                found = yield GatherEffect([self._bring(part, answer) for part in _parts(moved)])
                sums = [total for part in found for total in part]
            else:
                sums = yield from self._bring(moved, answer)
        except (StaleHandle, Unreachable) as error:
            if not channel.is_open:  # it is the node that is gone, not only the way to its engine
                raise
            # Its engine is out of reach, or its slabs have changed: ask anew, and then by message.
            yield SendOneWayEffect(channel, ReleaseLeases([blocks.lease]))
            yield from self._engine_copies.failed(node, error, progress.deadline)
            progress.retry_otherwise(answer.items(places), error)
            return
        yield SendOneWayEffect(channel, ReleaseLeases([blocks.lease]))
        good = [value.place for value, found in zip(moved, sums, strict=True) if found == blocks.checksums[value.place]]
        damaged = [value.place for value, found in zip(moved, sums, strict=True) if found != blocks.checksums[value.place]]
        progress.arrived(answer, good)
        if damaged:
            is_late = self._clock_ns() >= self._asked_ns + blocks.lease_ms * 1_000_000
            self._retry_wrong(node, answer.items(damaged), progress, is_late=is_late)

    def _bring(self, values: Sequence["_FetchedValue"], answer: ReadReply) -> Operation[list[int]]:
        """Have the engine read these values: the xxh3_64 of each."""
        copies = [copy for value in values for copy in _copies(value.span.region, value.span.offset_bytes, value.room)]
        yield from self._engine_copies.move(answer.node, copies, answer.deadline)
        return (yield from work(lambda: [checksum(value.room) for value in values], sum(size_of(value.room) for value in values)))

    def _in_slices(self, value: "_FetchedValue", answer: ReadReply) -> Operation[int]:
        """Have the engine read one large value, hashed on the way: its xxh3_64."""
        region, begin = value.span.region, value.span.offset_bytes

        def bring(offset: int, room: Parts) -> Operation[None]:
            return self._engine_copies.move(answer.node, _copies(region, begin + offset, room), answer.deadline)

        return SlicedValue(value.room, bring).run()

    def _retry_wrong(self, node: KnownNode, items: list[Wanted], progress: GetProgress[Any], *, is_late: bool) -> None:
        """Values came out wrong: overwritten after their lease, or damaged."""
        if is_late:
            progress.retry(0, items, LeaseExpired(f"reading took longer than the lease of {self._lease_ms} ms"))
            return
        error = ChecksumMismatch(f"node {node.node_id} holds a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node.node_id, items, error)


def _parts(values: Sequence[_FetchedValue]) -> Iterator[list[_FetchedValue]]:
    """The values in order, cut after each SLICE_BYTES."""
    part: list[_FetchedValue] = []
    size_bytes = 0
    for value in values:
        part.append(value)
        size_bytes += size_of(value.room)
        if size_bytes >= SLICE_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _copies(region: Any, offset_bytes: int, room: Parts) -> list[Copy]:
    """What brings the memory of a region from an offset on into the parts of a room."""
    copies: list[Copy] = []
    for part in room:
        copies.append((Span(region, offset_bytes), part, len(part)))
        offset_bytes += len(part)
    return copies
