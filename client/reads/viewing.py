"""How a value is looked at where it is: one Read whose lease stays until the end of the view. Sans-I/O: see effects.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client.effects import AnyLoan, Operation, Post
from kvstore.client.reads.answer import Answer
from kvstore.client.reads.mapped import verified
from kvstore.client.reads.progress import Progress
from kvstore.client.reads.reading import Reading
from kvstore.client.reads.sinks import FreshBytes
from kvstore.client.resources import ClientResources
from kvstore.protocol.errors import InvalidArgument, LeaseExpired
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.node_messages import Release
from kvstore.rpc.deadline import Deadline


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

    def use(self, answer: Answer, places: list[int], memory: Sequence[memoryview], progress: Progress[Any]) -> Operation[bool]:
        [part] = memory
        if not (yield from verified(answer, progress, places, [(part,)], max_bytes=self._verify_bytes)):
            yield Post(answer.loan.channel, Release([answer.blocks.lease]))
            return False
        self.view = OpenView(part, answer.loan, answer.blocks.lease, answer.blocks.lease_until_ns)
        progress.arrived(answer, places)
        return True


def open_view(resources: ClientResources, key: bytes, deadline: Deadline, clock_ns: Callable[[], int]) -> Operation[OpenView | None]:
    """None on a miss. Raises as Reading.run does."""
    settings = resources.settings
    keep = KeepLease(int(settings.view_lease_s * 1000), verify_bytes=MAX_VALUE_BYTES if settings.verify_all else 0)
    [value] = yield from Reading(resources, [key], FreshBytes(1), keep, deadline, clock_ns).run()
    if keep.view is not None:
        return keep.view
    return None if value is None else OpenView(memoryview(value))


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
            yield Post(view.loan.channel, Release([view.lease]))
        except BaseException:
            view.loan.discard()  # with it goes the lease, whether the node has been told or not
            raise
        view.loan.give_back()
    if not in_time:
        raise LeaseExpired("the view was open for longer than its lease, or the connection to its node broke: throw away what was read")
    if still_used:
        raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")
