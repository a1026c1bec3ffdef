"""Values looked at in place, by either client: the context managers that `view` gives."""

from types import TracebackType
from typing import Protocol, TypeVar

from kvstore.client.effects import Operation
from kvstore.client.local.nodes import LocalNode
from kvstore.client.local.reads import LocalReads
from kvstore.client.local.view import LocalView
from kvstore.client.operations import Operations, Timeout
from kvstore.client.reads.viewing import OpenView

T = TypeVar("T")
AtHand = tuple[tuple[LocalNode, ...], Timeout]


class Viewer(Protocol):
    """What a view needs of its client."""

    _near: LocalReads
    _operations: Operations

    def _at_hand(self, deadline_s: float | None) -> AtHand: ...
    def _run(self, operation: Operation[T]) -> T: ...


class AsyncViewer(Protocol):
    """As Viewer, of an asynchronous one."""

    _near: LocalReads
    _operations: Operations

    async def _at_hand(self, deadline_s: float | None) -> AtHand: ...
    async def _run(self, operation: Operation[T]) -> T: ...


class View:
    """A value looked at in place: a context manager that gives a read-only memoryview, None on a miss. Use it once.

    On the node's host this is the node's memory, which it leaves alone until the end; elsewhere a private copy. The memoryview ends with
    the block, and arrays made from it must not be used any more by then. Where the node had to be asked (a value that was not in DRAM,
    more than 64 views at a time, `use_index` off) the view has a lease and holds a connection: a block open for longer than that (setting
    `view_lease_s`) ends with LeaseExpired, for its bytes may have been replaced. So does one whose node hung up.
    """

    def __init__(self, client: Viewer, key: bytes, deadline_s: float | None) -> None:
        self._client = client
        self._key = key
        self._deadline_s = deadline_s
        self._view: OpenView | None = None
        self._near_view: LocalView | None = None

    def __enter__(self) -> memoryview | None:
        client = self._client
        nodes, timeout = client._at_hand(self._deadline_s)
        if nodes:
            view = client._near.look(nodes, self._key)
            if view is None and client._near.wanted:
                timeout = client._operations.deadline(timeout)
                client._run(client._operations.map_wanted(timeout))
                view = client._near.look(nodes, self._key)
            if view is not None:
                self._near_view = view
                return view.memory
        self._view = client._run(client._operations.open_view(self._key, deadline_s=timeout))
        return None if self._view is None else self._view.memory

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        near_view = self._near_view
        if near_view is not None:
            self._near_view = None
            self._client._operations.check_process()
            near_view.close()
            return
        view, self._view = self._view, None
        if view is not None:
            self._client._run(self._client._operations.close_view(view))


class AsyncView:
    """As View, with `async with`."""

    def __init__(self, client: AsyncViewer, key: bytes, deadline_s: float | None) -> None:
        self._client = client
        self._key = key
        self._deadline_s = deadline_s
        self._view: OpenView | None = None
        self._near_view: LocalView | None = None

    async def __aenter__(self) -> memoryview | None:
        client = self._client
        nodes, timeout = await client._at_hand(self._deadline_s)
        if nodes:
            view = client._near.look(nodes, self._key)
            if view is None and client._near.wanted:
                timeout = client._operations.deadline(timeout)
                await client._run(client._operations.map_wanted(timeout))
                view = client._near.look(nodes, self._key)
            if view is not None:
                self._near_view = view
                return view.memory
        self._view = await client._run(client._operations.open_view(self._key, deadline_s=timeout))
        return None if self._view is None else self._view.memory

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        near_view = self._near_view
        if near_view is not None:
            self._near_view = None
            self._client._operations.check_process()
            near_view.close()
            return
        view, self._view = self._view, None
        if view is not None:
            await self._client._run(self._client._operations.close_view(view))
