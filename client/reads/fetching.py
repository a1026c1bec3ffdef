"""Values that lie in slabs of another host, under a lease: the transfer engine reads them. Sans-I/O: see effects.py."""

from collections.abc import Callable
from typing import Any

from kvstore.client.buffers import checksum
from kvstore.client.effects import Operation, Post, work
from kvstore.client.engine_copies import EngineCopies
from kvstore.client.reads.answer import Answer
from kvstore.client.reads.finding import Wanted
from kvstore.client.reads.progress import Progress
from kvstore.client.routes import KnownNode
from kvstore.protocol.errors import ChecksumMismatch, LeaseExpired, StaleHandle, Unreachable
from kvstore.protocol.node_messages import MAPPED, Release
from kvstore.transfer.paths.spans import Copy, Span


class EngineFetch:
    """Of the values of one answer. Make it before the node is asked: its lease is counted from then on, as clocks of two hosts differ."""

    def __init__(self, engine_copies: EngineCopies, clock_ns: Callable[[], int], lease_ms: int) -> None:
        self._engine_copies = engine_copies
        self._clock_ns = clock_ns
        self._lease_ms = lease_ms
        self._asked_ns = clock_ns()

    def run(self, answer: Answer, progress: Progress[Any]) -> Operation[None]:
        """Have the engine read the mapped values, verify them, and release the lease. What the engine cannot read is to be tried again.
        Raises StaleHandle, Unreachable: the node is gone; DeadlineExceeded."""
        blocks, channel, node = answer.blocks, answer.loan.channel, answer.node
        places = answer.places(MAPPED)
        try:
            slabs = [blocks.slabs[place] for place in places]
            regions = yield from self._engine_copies.show_slabs(channel, node, slabs, answer.deadline)
            rooms = [progress.room(answer.wanted[place][0], blocks.sizes[place]) for place in places]
            copies: list[Copy] = [
                (Span(region, blocks.offsets[place]), room, len(room))
                for region, place, room in zip(regions, places, rooms, strict=True)
                if room is not None
            ]
            yield from self._engine_copies.move(node, copies, answer.deadline)
        except (StaleHandle, Unreachable) as error:
            if not channel.is_open:  # it is the node that is gone, not only the way to its engine
                raise
            # Its engine is out of reach, or its slabs have changed: ask anew, and then by message.
            yield Post(channel, Release([blocks.lease]))
            yield from self._engine_copies.failed(node, error, progress.deadline)
            progress.retry(0, answer.items(places), error)
            return
        moved = [(place, room) for place, room in zip(places, rooms, strict=True) if room is not None]
        sums = yield from work(lambda: [checksum(room) for _, room in moved], sum(len(room) for _, room in moved))
        yield Post(channel, Release([blocks.lease]))
        good = [place for (place, _), found in zip(moved, sums, strict=True) if found == blocks.checksums[place]]
        damaged = [place for (place, _), found in zip(moved, sums, strict=True) if found != blocks.checksums[place]]
        progress.arrived(answer, good)
        if damaged:
            is_late = self._clock_ns() >= self._asked_ns + blocks.lease_ms * 1_000_000
            self._retry_wrong(node, answer.items(damaged), progress, is_late=is_late)

    def _retry_wrong(self, node: KnownNode, items: list[Wanted], progress: Progress[Any], *, is_late: bool) -> None:
        """Values came out wrong: overwritten after their lease, or damaged."""
        if is_late:
            progress.retry(0, items, LeaseExpired(f"reading took longer than the lease of {self._lease_ms} ms"))
            return
        error = ChecksumMismatch(f"node {node.node_id} holds a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node.node_id, items, error)
