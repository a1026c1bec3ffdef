"""Values that lie in slabs mapped here, under a lease: a get copies them out, a view looks at one until its end. Sans-I/O: see
effects.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.effects import AnyLoan, Operation, SendOneWayEffect, work
from kvstore.client.memory import Parts, checksum
from kvstore.client.reads.progress import GetProgress, ReadReply
from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, LeaseExpired
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.node_messages import ReleaseLeases


class MappedUse(Protocol):
    """What becomes of mapped values, and what a node is asked for so that they are mapped."""

    inline_bytes: int
    """Up to this size values come inline instead."""
    lease_ms: int

    def use(self, answer: ReadReply, places: list[int], memory: Sequence[memoryview], progress: GetProgress[Any]) -> Operation[bool]:
        """`memory` is that of the values at `places`. True: the loan, and with it the lease, is kept. Otherwise the lease is released. An
        error ends both."""


def to_verify(resources: ClientResources) -> int:
    """Values of up to so many bytes are compared with their checksums when they come from memory of this host."""
    settings = resources.settings
    return MAX_VALUE_BYTES if settings.verify_all else int(settings.verify_bytes)


def verified(
    answer: ReadReply, progress: GetProgress[Any], places: Sequence[int], values: Sequence[Parts], *, max_bytes: int
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

    def use(self, answer: ReadReply, places: list[int], memory: Sequence[memoryview], progress: GetProgress[Any]) -> Operation[bool]:
        blocks = answer.blocks
        rooms = [progress.room(answer.wanted[place][0], len(part)) for place, part in zip(places, memory, strict=True)]
        scatters = [(part, room) for room, part in zip(rooms, memory, strict=True) if room is not None]
        yield from work(lambda: self._copier.scatter(scatters), sum(len(part) for part, _ in scatters))
        in_time = self._clock_ns() < blocks.lease_until_ns
        yield SendOneWayEffect(answer.loan.channel, ReleaseLeases([blocks.lease]))
        good = [place for place, room in zip(places, rooms, strict=True) if room is not None]
        if in_time:
            values = [room for room in rooms if room is not None]
            right = yield from verified(answer, progress, good, values, max_bytes=self._verify_bytes)
            progress.arrived(answer, right)
        else:
            lapsed = LeaseExpired(f"copying took longer than the lease of {self.lease_ms} ms")
            progress.retry(0, answer.items(good), lapsed)
        return False


@dataclass(slots=True)
class OpenView:
    """A value in the node's memory, and what keeps it there: the lease, valid on this channel only. No loan: a private copy."""

    memory: memoryview
    loan: AnyLoan | None = None
    lease: int = 0
    lease_until_ns: int = 0


class KeepLease:
    """The MappedUse of one view: the value stays where it is."""

    def __init__(self, lease_ms: int, *, verify_bytes: int) -> None:
        """A value of up to `verify_bytes` is compared with its checksum before it is given."""
        self.inline_bytes = 0
        self._verify_bytes = verify_bytes
        self.lease_ms = lease_ms
        self.view: OpenView | None = None
        """The value, once it has been found in a slab of this host."""

    def use(self, answer: ReadReply, places: list[int], memory: Sequence[memoryview], progress: GetProgress[Any]) -> Operation[bool]:
        [part] = memory
        if not (yield from verified(answer, progress, places, [(part,)], max_bytes=self._verify_bytes)):
            yield SendOneWayEffect(answer.loan.channel, ReleaseLeases([answer.blocks.lease]))
            return False
        self.view = OpenView(part, answer.loan, answer.blocks.lease, answer.blocks.lease_until_ns)
        progress.arrived(answer, places)
        return True


def close_view(view: OpenView, clock_ns: Callable[[], int]) -> Operation[None]:
    """End a view: its memory can no longer be used.

    Raises LeaseExpired when the lease ran out, or the connection broke, before: what was read through the view may be another value's.
    Raises InvalidArgument when something made from the view holds its memory, as far as Python can tell (a numpy array goes unseen).
    """
    in_time = view.loan is None or (view.loan.channel.is_open and clock_ns() < view.lease_until_ns)
    try:
        view.memory.release()
        still_used = False
    except BufferError:
        still_used = True
    if view.loan is not None:
        try:
            yield SendOneWayEffect(view.loan.channel, ReleaseLeases([view.lease]))
        except BaseException:
            view.loan.discard()  # with it goes the lease, whether the node has been told or not
            raise
        view.loan.release()
    if not in_time:
        raise LeaseExpired("the view was open for longer than its lease, or the connection to its node broke: throw away what was read")
    if still_used:
        raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")
