"""Views: context managers returned by `Client.view` and `AsyncClient.view` that give a value without a copy."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from kvstore.client.local.fast_reads import FastReads
from kvstore.client.local.reader_slots import LocalView
from kvstore.client.operations import Operations
from kvstore.client.reads.mapped_values import OpenView

Run = Callable[[Any], Any]
"""Runs an operation to its end: `Driver.run`."""
RunAsync = Callable[[Any], Awaitable[Any]]
"""Runs an operation to its end: `AsyncDriver.run`."""


class View:
    """View of a value: a context manager that gives a read-only memoryview, None on a miss. Use it once.

    A local view is the node's memory, which the node does not reuse until the view ends; a remote one is a private
    copy. The memoryview ends with the block, and arrays made from it must not be used afterwards. A view that needed a
    request to the node has a lease of 30 s and holds a connection: a value not in DRAM, more than 64 views at a time,
    or `use_index` off. If it stays open for longer, it ends with LeaseExpired, because its bytes may have been
    replaced. So does a view whose node closed the connection.
    """

    def __init__(self, operations: Operations, run: Run, fast: FastReads, key: bytes, deadline_s: float | None) -> None:
        self._operations = operations
        self._run = run
        self._fast = fast
        self._key = key
        self._deadline_s = deadline_s
        self._view: LocalView | OpenView | None = None

    def __enter__(self) -> memoryview | None:
        nodes = self._fast.nodes(self._deadline_s)
        if nodes:
            self._view = self._operations.local_reads.open_view(nodes, self._key)
        if self._view is None:
            self._view = self._run(self._operations.open_view(self._key, deadline_s=self._deadline_s))
        return None if self._view is None else self._view.memory

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        view, self._view = self._view, None
        if isinstance(view, LocalView):
            self._operations.check_process()
            view.close()
        elif view is not None:
            self._run(self._operations.close_view(view))


class AsyncView:
    """`View` for `async with`."""

    def __init__(self, operations: Operations, run: RunAsync, key: bytes, deadline_s: float | None) -> None:
        self._operations = operations
        self._run = run
        self._key = key
        self._deadline_s = deadline_s
        self._view: LocalView | OpenView | None = None

    async def __aenter__(self) -> memoryview | None:
        self._view = await self._run(self._operations.open_view(self._key, deadline_s=self._deadline_s))
        return None if self._view is None else self._view.memory

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        view, self._view = self._view, None
        if isinstance(view, LocalView):
            self._operations.check_process()
            view.close()
        elif view is not None:
            await self._run(self._operations.close_view(view))
