"""Values that lie in slabs mapped here, under a lease: what a get does with them is a MappedUse. Sans-I/O: see effects.py."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.client.effects import Operation, Post, work
from kvstore.client.reads.answer import Answer
from kvstore.client.reads.progress import Progress
from kvstore.client.resources import ClientResources
from kvstore.protocol.errors import LeaseExpired
from kvstore.protocol.node_messages import Release


class MappedUse(Protocol):
    """What becomes of mapped values, and what a node is asked for so that they are mapped."""

    inline_bytes: int
    """Up to this size values come inline instead."""
    lease_ms: int

    def use(self, answer: Answer, places: list[int], memory: Sequence[memoryview], progress: Progress[Any]) -> Operation[bool]:
        """`memory` is that of the values at `places`. True: the loan, and with it the lease, is kept. Otherwise the lease is released. An
        error ends both."""


class CopyOut:
    """Copies values into their rooms and releases the lease. Gets of a client share one."""

    def __init__(self, resources: ClientResources, clock_ns: Callable[[], int]) -> None:
        self.inline_bytes = int(resources.settings.get_inline_bytes)
        self.lease_ms = int(resources.settings.read_lease_s * 1000)
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
            progress.arrived(answer, good)
        else:
            lapsed = LeaseExpired(f"copying took longer than the lease of {self.lease_ms} ms")
            progress.retry(0, answer.items(good), lapsed)
        return False
