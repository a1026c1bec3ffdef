"""Values looked at in place: the context manager that `AsyncClient.view` gives."""

from functools import partial
from types import TracebackType

from kvstore.client.async_at_hand import AsyncAtHand
from kvstore.client.async_work import carry_out
from kvstore.client.effects import Work
from kvstore.client.local.view import LocalView
from kvstore.client.reads.viewing import OpenView


class AsyncView:
    """As View, with `async with`."""

    def __init__(self, at_hand: AsyncAtHand, key: bytes, deadline_s: float | None) -> None:
        self._at_hand = at_hand
        self._key = key
        self._deadline_s = deadline_s
        self._view: OpenView | None = None
        self._near_view: LocalView | None = None

    async def __aenter__(self) -> memoryview | None:
        at_hand = self._at_hand
        near = at_hand.operations.near
        nodes, timeout = await at_hand.nodes(self._deadline_s)
        if nodes:
            near_view: LocalView | None = await carry_out(Work(partial(near.look, nodes, self._key), near.look_bytes))
            if near_view is None and near.wanted:
                near_view, timeout = await at_hand.again(timeout, near.look, nodes, self._key)
            if near_view is not None:
                self._near_view = near_view
                return near_view.memory
        self._view = await at_hand.run(at_hand.operations.open_view(self._key, deadline_s=timeout))
        return None if self._view is None else self._view.memory

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        near_view = self._near_view
        if near_view is not None:
            self._near_view = None
            self._at_hand.operations.check_process()
            near_view.close()
            return
        view, self._view = self._view, None
        if view is not None:
            await self._at_hand.run(self._at_hand.operations.close_view(view))
