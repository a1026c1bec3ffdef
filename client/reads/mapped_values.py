"""Values in slabs mapped here, under a lease: a get copies them, a view reads them in place. Sans-I/O: see
effects.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.effects import AnyConnectionLease, Operation, SendOneWayEffect, work
from kvstore.client.memory import Parts, checksum
from kvstore.client.reads.progress import GetProgress, ReadReply
from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, LeaseExpired
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.node_messages import ReleaseLeases


class MappedUse(Protocol):
    """Use of mapped values, with the request parameters that make a node map them."""

    inline_bytes: int
    """Values up to this size are sent inline instead."""
    lease_ms: int

    def use(self, answer: ReadReply, positions: list[int], memory: Sequence[memoryview], progress: GetProgress[Any]) -> Operation[bool]:
        """Process the values at `positions`, whose memory is given. True: the connection, and so the lease, is kept;
        otherwise the lease is released. An error ends both."""


def to_verify(resources: ClientResources) -> int:
    """Largest value from local memory that is verified by checksum."""
    settings = resources.settings
    return MAX_VALUE_BYTES if settings.verify_all else int(settings.verify_bytes)


def verified(
    answer: ReadReply, progress: GetProgress[Any], positions: Sequence[int], values: Sequence[Parts], *, max_bytes: int
) -> Operation[list[int]]:
    """Positions of the values that pass verification, and of those over `max_bytes`, which are not verified. Damaged
    ones are retried."""
    sizes, sums = answer.blocks.sizes, answer.blocks.checksums

    def are_right() -> list[bool]:
        return [sizes[position] > max_bytes or checksum(value) == sums[position] for position, value in zip(positions, values, strict=True)]

    right = yield from work(are_right, sum(sizes[position] for position in positions if sizes[position] <= max_bytes))
    damaged = list(compress(positions, [not is_right for is_right in right]))
    if damaged:
        node_id = answer.node.node_id
        error = ChecksumMismatch(f"node {node_id} has a value in its memory whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node_id, answer.items(damaged), error)
    return list(compress(positions, right))


class CopyOut:
    """Copies values into their buffers and releases the lease. Shared by all gets of a client."""

    def __init__(self, resources: ClientResources, clock_ns: Callable[[], int]) -> None:
        self.inline_bytes = int(resources.settings.get_inline_bytes)
        self.lease_ms = int(resources.settings.read_lease_s * 1000)
        self._verify_bytes = to_verify(resources)
        self._copier = resources.copier
        self._clock_ns = clock_ns

    def use(self, answer: ReadReply, positions: list[int], memory: Sequence[memoryview], progress: GetProgress[Any]) -> Operation[bool]:
        blocks = answer.blocks
        buffers = [progress.buffer(answer.wanted[position][0], len(part)) for position, part in zip(positions, memory, strict=True)]
        scatters = [(part, buffer) for buffer, part in zip(buffers, memory, strict=True) if buffer is not None]
        yield from work(lambda: self._copier.scatter(scatters), sum(len(part) for part, _ in scatters))
        in_time = self._clock_ns() < blocks.lease_until_ns
        yield SendOneWayEffect(answer.connection.channel, ReleaseLeases([blocks.lease]))
        good = [position for position, buffer in zip(positions, buffers, strict=True) if buffer is not None]
        if in_time:
            values = [buffer for buffer in buffers if buffer is not None]
            right = yield from verified(answer, progress, good, values, max_bytes=self._verify_bytes)
            progress.arrived(answer, right)
        else:
            lapsed = LeaseExpired(f"copying took longer than the lease of {self.lease_ms} ms")
            progress.retry(0, answer.items(good), lapsed)
        return False


@dataclass(slots=True)
class OpenView:
    """A value in the node's memory, with the connection and the lease that protect it. Without a connection: a private
    copy."""

    memory: memoryview
    connection: AnyConnectionLease | None = None
    lease: int = 0
    lease_until_ns: int = 0


class KeepLease:
    """Use for a view: the value stays in place."""

    def __init__(self, lease_ms: int, *, verify_bytes: int) -> None:
        """Values up to `verify_bytes` are verified by checksum first."""
        self.inline_bytes = 0
        self._verify_bytes = verify_bytes
        self.lease_ms = lease_ms
        self.view: OpenView | None = None
        """The view, if the value was in a mapped slab."""

    def use(self, answer: ReadReply, positions: list[int], memory: Sequence[memoryview], progress: GetProgress[Any]) -> Operation[bool]:
        [part] = memory
        if not (yield from verified(answer, progress, positions, [(part,)], max_bytes=self._verify_bytes)):
            yield SendOneWayEffect(answer.connection.channel, ReleaseLeases([answer.blocks.lease]))
            return False
        self.view = OpenView(part, answer.connection, answer.blocks.lease, answer.blocks.lease_until_ns)
        progress.arrived(answer, positions)
        return True


def close_view(view: OpenView, clock_ns: Callable[[], int]) -> Operation[None]:
    """End a view and release its memory.

    Raises LeaseExpired if the lease ran out or the connection closed before: the bytes read may be another value's.
    Raises InvalidArgument if another object still exports the memory, as far as Python can tell (a numpy array goes
    unseen).
    """
    in_time = view.connection is None or (view.connection.channel.is_open and clock_ns() < view.lease_until_ns)
    try:
        view.memory.release()
        still_used = False
    except BufferError:
        still_used = True
    if view.connection is not None:
        try:
            yield SendOneWayEffect(view.connection.channel, ReleaseLeases([view.lease]))
        except BaseException:
            view.connection.discard()  # ends the lease, whether or not the message was sent
            raise
        view.connection.release()
    if not in_time:
        raise LeaseExpired("the view outlived its lease, or the connection to its node broke: discard what was read")
    if still_used:
        raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")
