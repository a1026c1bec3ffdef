"""Values looked at in place: the context manager that `Client.view` gives."""

from types import TracebackType

from kvstore.client.at_hand import AtHand
from kvstore.client.local.view import LocalView
from kvstore.client.reads.viewing import OpenView


class View:
    """A value looked at in place: a context manager that gives a read-only memoryview, None on a miss. Use it once.

    On the node's host this is the node's memory, which it leaves alone until the end; elsewhere a private copy. The memoryview ends with
    the block, and arrays made from it must not be used any more by then. Where the node had to be asked (a value that was not in DRAM,
    more than 64 views at a time, `use_index` off) the view has a lease and holds a connection: a block open for longer than that (setting
    `view_lease_s`) ends with LeaseExpired, for its bytes may have been replaced. So does one whose node hung up.
    """

    def __init__(self, at_hand: AtHand, key: bytes, deadline_s: float | None) -> None:
        self._at_hand = at_hand
        self._key = key
        self._deadline_s = deadline_s
        self._view: OpenView | None = None
        self._near_view: LocalView | None = None

    def __enter__(self) -> memoryview | None:
        at_hand = self._at_hand
        near = at_hand.operations.near
        nodes, timeout = at_hand.nodes(self._deadline_s)
        if nodes:
            near_view = near.look(nodes, self._key)
            if near_view is None and near.wanted:
                near_view, timeout = at_hand.again(timeout, near.look, nodes, self._key)
            if near_view is not None:
                self._near_view = near_view
                return near_view.memory
        self._view = at_hand.run(at_hand.operations.open_view(self._key, deadline_s=timeout))
        return None if self._view is None else self._view.memory

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        near_view = self._near_view
        if near_view is not None:
            self._near_view = None
            self._at_hand.operations.check_process()
            near_view.close()
            return
        view, self._view = self._view, None
        if view is not None:
            self._at_hand.run(self._at_hand.operations.close_view(view))
