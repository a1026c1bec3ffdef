"""Values that lie in slabs mapped here, under a lease: what a get does with them is a MappedUse. Sans-I/O: see effects.py."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Protocol

from kvstore.client.effects import Operation, Post, work
from kvstore.client.memory import Parts, checksum
from kvstore.client.reads.answer import Answer
from kvstore.client.reads.progress import Progress
from kvstore.client.resources import ClientResources
from kvstore.protocol.errors import ChecksumMismatch, LeaseExpired
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.node_messages import Release


class MappedUse(Protocol):
    """What becomes of mapped values, and what a node is asked for so that they are mapped."""

    inline_bytes: int
    """Up to this size values come inline instead."""
    lease_ms: int

    def use(self, answer: Answer, places: list[int], memory: Sequence[memoryview], progress: Progress[Any]) -> Operation[bool]:
        """`memory` is that of the values at `places`. True: the loan, and with it the lease, is kept. Otherwise the lease is released. An
        error ends both."""


def to_verify(resources: ClientResources) -> int:
    """Values of up to so many bytes are compared with their checksums when they come from memory of this host."""
    settings = resources.settings
    return MAX_VALUE_BYTES if settings.verify_all else int(settings.verify_bytes)


def verified(
    answer: Answer, progress: Progress[Any], places: Sequence[int], values: Sequence[Parts], *, max_bytes: int
) -> Operation[list[int]]:
    """The places of those values, of up to `max_bytes`, that have the checksums they should, and of all larger ones; the others are looked
    up anew."""
    sizes, sums = answer.blocks.sizes, answer.blocks.checksums

    def are_right() -> list[bool]:
        return [sizes[place] > max_bytes or checksum(value) == sums[place] for place, value in zip(places, values, strict=True)]

    right = yield from work(are_right, sum(sizes[place] for place in places if sizes[place] <= max_bytes))
    damaged = list(compress(places, [not is_right for is_right in right]))
    if damaged:
        node_id = answer.node.node_id
        error = ChecksumMismatch(f"node {node_id} has a value in its memory whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node_id, answer.items(damaged), error)
    return list(compress(places, right))


class CopyOut:
    """Copies values into their rooms and releases the lease. Gets of a client share one."""

    def __init__(self, resources: ClientResources, clock_ns: Callable[[], int]) -> None:
        self.inline_bytes = int(resources.settings.get_inline_bytes)
        self.lease_ms = int(resources.settings.read_lease_s * 1000)
        self._verify_bytes = to_verify(resources)
        self._copier = resources.copier
        self._clock_ns = clock_ns

    def use(self, answer: Answer, places: list[int], memory: Sequence[memoryview], progress: Progress[Any]) -> Operation[bool]:
        blocks = answer.blocks
        rooms = [progress.room(answer.wanted[place][0], len(part)) for place, part in zip(places, memory, strict=True)]
        scatters = [(part, room) for room, part in zip(rooms, memory, strict=True) if room is not None]
        yield from work(lambda: self._copier.scatter(scatters), sum(len(part) for part, _ in scatters))
        in_time = self._clock_ns() < blocks.lease_until_ns
        yield Post(answer.loan.channel, Release([blocks.lease]))
        good = [place for place, room in zip(places, rooms, strict=True) if room is not None]
        if in_time:
            values = [room for room in rooms if room is not None]
            right = yield from verified(answer, progress, good, values, max_bytes=self._verify_bytes)
            progress.arrived(answer, right)
        else:
            lapsed = LeaseExpired(f"copying took longer than the lease of {self.lease_ms} ms")
            progress.retry(0, answer.items(good), lapsed)
        return False
