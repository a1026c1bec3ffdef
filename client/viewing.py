"""How a value is looked at where it is: one Read whose lease stays until the end of the view. Sans-I/O: see effects.py."""

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.client.effects import AnyLoan, Operation, Post
from kvstore.client.reading import FreshBytes, Reading, Wanted
from kvstore.client.resources import ClientResources
from kvstore.protocol.errors import InvalidArgument, LeaseExpired
from kvstore.protocol.node_messages import Blocks, Release
from kvstore.rpc.deadline import Deadline


@dataclass(slots=True)
class OpenView:
    """A value in the node's memory, and what keeps it there: the lease, valid on this channel only. No loan: a private copy."""

    memory: memoryview
    loan: AnyLoan | None = None
    lease: int = 0
    lease_until_ns: int = 0


class Viewing(Reading[bytes]):
    """One view. Use once: `yield from Viewing(...).open()`."""

    def __init__(self, resources: ClientResources, key: bytes, deadline: Deadline, clock_ns: Callable[[], int]) -> None:
        super().__init__(resources, [key], FreshBytes(1), deadline, clock_ns)
        self._inline_bytes = 0
        self._lease_ms = int(resources.settings.view_lease_s * 1000)
        self._view: OpenView | None = None

    def open(self) -> Operation[OpenView | None]:
        """None on a miss. Raises as Reading.run does."""
        [value] = yield from self.run()
        if self._view is not None:
            return self._view
        return None if value is None else OpenView(memoryview(value))

    def _take_mapped(self, loan: AnyLoan, node_id: int, wanted: list[Wanted], blocks: Blocks) -> Operation[bool]:
        [memory] = yield from self._parts_of_slabs(loan.channel, node_id, [0], blocks)
        self._view = OpenView(memory, loan, blocks.lease, blocks.lease_until_ns)
        self._arrived(wanted, blocks, [0])
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
            yield Post(view.loan.channel, Release([view.lease]))
        except BaseException:
            view.loan.discard()  # with it goes the lease, whether the node has been told or not
            raise
        view.loan.give_back()
    if not in_time:
        raise LeaseExpired("the view was open for longer than its lease, or the connection to its node broke: throw away what was read")
    if still_used:
        raise InvalidArgument("something made from the view still uses its memory: end its use, or copy it, before the view's end")
